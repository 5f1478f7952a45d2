"""What both faces check at the door."""

import threading

import pytest

from rpcwheel.errors import ConfigurationError, RegistryUnavailable
from rpcwheel.registry import aio, sync
from rpcwheel.registry.base import checked_close, checked_wait, no_answer


def test_a_wait_is_seconds_or_none_and_never_longer_than_a_thread_can():
    assert (checked_wait(None), checked_wait(0), checked_wait(1.5)) == (None, 0.0, 1.5)
    assert checked_wait(float("inf")) == threading.TIMEOUT_MAX
    assert 1e9 < checked_close(1e300) <= threading.TIMEOUT_MAX
    for wrong, error in ((-1, ConfigurationError), (float("nan"), ConfigurationError)):
        with pytest.raises(error, match="wait"):
            checked_wait(wrong)
    for wrong in (0, -1, float("inf")):
        with pytest.raises(ConfigurationError, match="timeout"):
            checked_close(wrong)


def test_no_answer_says_who_and_how_long():
    error = no_answer("etcd://a", 0.5)
    assert (type(error), str(error)) == (
        RegistryUnavailable,
        "etcd://a has not answered within 0.5 s",
    )


@pytest.mark.parametrize("kind", [sync.FailbackRegistry, aio.FailbackRegistry])
def test_both_faces_show_the_url_without_the_password(kind, timer):
    registry = kind("memory://name", timer=timer)
    assert (registry.url, registry.up, registry.closed, registry.registrations) == (
        "memory://name",
        False,
        False,
        (),
    )
    assert registry._session.close().result(5)
