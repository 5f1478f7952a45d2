"""How often the states are read while calls of `grpc` wait."""

import threading
from types import SimpleNamespace

import pytest

from rpcwheel.balancer import channel
from rpcwheel.balancer.pending import MAX_POLL_S


@pytest.fixture
def waiting(monkeypatch):
    """The waiting calls of a channel; the test reads the states in place of the worker."""
    monkeypatch.setattr(channel, "EXECUTOR", SimpleNamespace(submit=lambda *_: None))
    pool = SimpleNamespace(lock=threading.RLock(), closed=False, refresh=lambda: None)
    return channel._WaitingCalls(pool)


def next_interval_s(waiting, others):
    """The time until the next read after a call began to wait, beside so many that wait for long.

    The interval has grown before.
    """
    for _ in range(others):
        waiting.hold(channel._BlockedCall())
    while others and waiting.poll() < MAX_POLL_S:
        """Read the states."""
    waiting.hold(channel._BlockedCall())
    return waiting.poll()


@pytest.mark.parametrize(
    ("others", "interval_s"), [(0, 0.0005), (1, 0.001), (49, 0.025), (99, 0.05), (500, 0.05)]
)
def test_a_new_call_shortens_the_interval_less_the_more_calls_wait(waiting, others, interval_s):
    assert next_interval_s(waiting, others) == pytest.approx(interval_s)
