"""A process that starts while the registry is down uses the snapshot files of an earlier one."""

import contextlib

import pytest

from fixtures.cache_worlds import SERVICE, SnapshotListener, ids_of, instance, instances
from fixtures.flaky_backends import POLICY, flaky_backend
from fixtures.waiting import WAIT_S, wait_until
from rpcwheel.registry import Registry

FILE_DELAY_S = 1.0
"""Seconds after which the file is used if the registry neither answers nor fails."""


@pytest.fixture
def start(tmp_path, timer):
    """Start a process: its backend, whose engine is up or down, and its registry."""
    policy = POLICY.replace(snapshot=str(tmp_path))
    with contextlib.ExitStack() as opened:

        def start(*, up=True):
            backend = flaky_backend(timer, "cold-start")
            if not up:
                backend.down()
            return backend, opened.enter_context(Registry(backend, registry_policy=policy))

        yield start
    assert timer.pending == 0


def test_a_process_that_starts_without_the_registry_gets_the_instances_of_the_file(
    start, tmp_path, timer
):
    _, servers = start()
    for one in instances("a", "b", "c"):
        servers.register(one, wait=WAIT_S)
    _, earlier = start()
    with earlier.subscribe(SERVICE) as subscription:
        assert ids_of(subscription.wait(WAIT_S)) == "abc"
    earlier.close()
    assert wait_until(lambda: list(tmp_path.glob(f"*/{SERVICE}.json")))
    backend, registry = start(up=False)
    listener = SnapshotListener()
    subscription = registry.subscribe(SERVICE, listener)
    assert wait_until(lambda: timer.advance(FILE_DELAY_S / 100) >= 0 and subscription.snapshot)
    snapshot = subscription.wait(WAIT_S)
    assert (ids_of(snapshot), snapshot.source) == ("abc", "cache")
    assert 0 <= snapshot.age_s < 60
    looked_up = registry.lookup(SERVICE)
    assert (ids_of(looked_up), looked_up.source) == ("abc", "cache")
    servers.register(instance("d"), wait=WAIT_S)
    backend.up()
    assert wait_until(lambda: ids_of(subscription.snapshot) == "abcd")
    assert subscription.snapshot.source == "live"
    assert wait_until(lambda: listener.ids == ["abc", "abcd"])
