"""A process that starts while the registry is down uses the snapshot file of an earlier one."""

import contextlib

import pytest

from fixtures.cache_worlds import SERVICE, SnapshotListener, ids_of, instance, instances
from fixtures.waiting import WAIT_S, wait_until
from rpcwheel.errors import NotPublished, RegistryUnavailable
from rpcwheel.events.events import SnapshotFailed
from rpcwheel.registry import Registry, RegistryPolicy
from rpcwheel.registry.backend import Settings
from rpcwheel.registry.backends import open_backend
from rpcwheel.registry.url import parse_url
from rpcwheel.testing import FlakyBackend

LEASE_S = 6.0
FILE_DELAY_S = 1.0
"""Seconds after which the file is used if the registry neither answers nor fails."""


@pytest.fixture
def path(tmp_path):
    return tmp_path / "shop.json"


@pytest.fixture
def engine(request):
    """The URL of an engine of this test."""
    return f"memory://{request.node.name[:40]}"


@pytest.fixture
def start(path, timer, engine):
    """Start a process: its registry, whose engine is up or down, and its backend."""
    with contextlib.ExitStack() as opened:

        def start(*, up=True):
            settings = Settings(lease_s=LEASE_S, timeout_s=600.0, timer=timer)
            backend = FlakyBackend(open_backend(parse_url(engine), settings))
            if not up:
                backend.down()
            policy = RegistryPolicy(lease_ttl=LEASE_S, timeout=600.0, snapshot=str(path))
            return backend, opened.enter_context(
                Registry(backend, registry_policy=policy, timer=timer)
            )

        yield start
    assert timer.pending == 0


@pytest.fixture
def servers(start):
    """The backend and the registry of a process that publishes three instances."""
    backend, registry = start()
    for one in instances("a", "b", "c"):
        registry.register(one, wait=WAIT_S)
    return backend, registry


def run_a_subscriber(start, path):
    """Let a process subscribe, get the instances, and end."""
    _, registry = start()
    with registry.subscribe(SERVICE) as subscription:
        assert ids_of(subscription.wait(WAIT_S)) == "abc"
    close(registry, path)


def close(registry, path):
    """Close the registry, and wait until its file is written."""
    registry.close()
    assert wait_until(lambda: path.exists() and SERVICE.encode() in path.read_bytes())


def failures(events):
    return [event for event in events if isinstance(event, SnapshotFailed)]


def test_a_subscription_that_begins_without_the_registry_gets_the_instances_of_the_file(
    start, servers, path, timer
):
    run_a_subscriber(start, path)
    backend, registry = start(up=False)
    listener = SnapshotListener()
    subscription = registry.subscribe(SERVICE, listener)
    assert wait_until(lambda: timer.advance(FILE_DELAY_S / 100) >= 0 and subscription.snapshot)
    snapshot = subscription.wait(WAIT_S)
    assert (ids_of(snapshot), snapshot.source) == ("abc", "cache")
    assert 0 <= snapshot.age_s < 60
    looked_up = registry.lookup(SERVICE)
    assert (ids_of(looked_up), looked_up.source) == ("abc", "cache")
    servers[1].register(instance("d"), wait=WAIT_S)
    backend.up()
    assert wait_until(lambda: ids_of(subscription.snapshot) == "abcd")
    assert subscription.snapshot.source == "live"
    assert wait_until(lambda: listener.ids == ["abc", "abcd"])


def test_with_a_torn_file_there_is_no_snapshot_instead_of_an_empty_one(
    start, servers, path, timer, events
):
    path.write_bytes(b'{"v": 1, "services": {"shop.Ord')
    backend, registry = start(up=False)
    subscription = registry.subscribe(SERVICE)
    timer.advance(2 * FILE_DELAY_S)
    with pytest.raises(NotPublished):
        subscription.wait(0)
    with pytest.raises(RegistryUnavailable):
        registry.lookup(SERVICE)
    assert wait_until(lambda: len(failures(events)) == 1)  # a worker reads the file
    backend.up()
    assert ids_of(subscription.wait(WAIT_S)) == "abc"
    close(registry, path)
    _, later = start(up=False)
    assert ids_of(later.lookup(SERVICE)) == "abc"
