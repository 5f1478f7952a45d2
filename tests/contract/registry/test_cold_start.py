"""A process that starts while the registry is down serves itself from what an earlier one saw."""

import contextlib

import pytest

from fixtures.registry_worlds import held
from fixtures.seen_worlds import SERVICE, Listener, instance, instances, keys
from fixtures.waiting import WAIT_S, wait_until
from rpcwheel.errors import NotPublished, RegistryUnavailable
from rpcwheel.observe.events import SnapshotFailed
from rpcwheel.registry import Registry, RegistryPolicy
from rpcwheel.registry.backend import Settings
from rpcwheel.registry.backends import open_backend
from rpcwheel.registry.url import parse_url
from rpcwheel.testing import FlakyBackend

LEASE_S = 6.0
A_WHILE = 1.0
"""Seconds after which the file is taken, if the registry does not say that it is down."""


@pytest.fixture
def path(tmp_path):
    return tmp_path / "shop.json"


@pytest.fixture
def engine(request):
    """Its URL; gone with the test."""
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
            return backend, opened.enter_context(Registry(backend, policy=policy, timer=timer))

        yield start
    assert timer.pending == 0


@pytest.fixture
def servers(start):
    """Three that stay: their backend and their registry."""
    backend, registry = start()
    for one in instances("a", "b", "c"):
        registry.register(one, wait=WAIT_S)
    return backend, registry


def an_earlier_run(start, path):
    """A client that saw them, and ended."""
    _, registry = start()
    with registry.subscribe(SERVICE) as subscription:
        assert keys(subscription.wait(WAIT_S)) == "abc"
    close(registry, path)


def close(registry, path):
    """End a run, whose file is written when this returns, however long that takes."""
    registry.close()
    assert wait_until(lambda: path.exists() and SERVICE.encode() in path.read_bytes())


def failures(events):
    return [event for event in events if isinstance(event, SnapshotFailed)]


def test_a_client_that_starts_without_the_registry_has_what_the_one_before_saw(
    start, servers, path, timer
):
    an_earlier_run(start, path)
    backend, registry = start(up=False)
    listener = Listener()
    subscription = registry.subscribe(SERVICE, listener)
    assert wait_until(lambda: timer.advance(A_WHILE / 100) >= 0 and subscription.snapshot)
    snapshot = subscription.wait(WAIT_S)
    assert (keys(snapshot), snapshot.source) == ("abc", "cache")
    assert 0 <= snapshot.age_s < 60
    servers[1].register(instance("d"), wait=WAIT_S)
    backend.up()
    assert wait_until(lambda: keys(subscription.snapshot) == "abcd")
    assert subscription.snapshot.source == "live"
    assert wait_until(lambda: listener.keys == ["abc", "abcd"])


def test_a_lookup_without_the_registry_gives_what_an_earlier_run_has_seen(start, servers, path):
    an_earlier_run(start, path)
    backend, registry = start(up=False)
    found = registry.lookup(SERVICE)
    assert (keys(found), found.source) == ("abc", "cache")
    backend.up()
    assert registry.lookup(SERVICE).source == "live"


def test_what_was_only_looked_up_is_remembered_too(start, servers, path):
    _, registry = start()
    assert keys(registry.lookup(SERVICE)) == "abc"
    close(registry, path)
    _, later = start(up=False)
    assert keys(later.lookup(SERVICE)) == "abc"


def test_a_registry_that_comes_back_without_its_memory_erases_nothing(start, servers, path, timer):
    an_earlier_run(start, path)
    backend, registry = start(up=False)
    subscription = registry.subscribe(SERVICE)
    assert wait_until(lambda: timer.advance(A_WHILE / 100) >= 0 and subscription.snapshot)
    servers[0].down()  # or they might publish before anybody has looked
    backend.forget()
    backend.up()
    assert wait_until(lambda: timer.advance(0.001) >= 0 and subscription.snapshot.source == "stale")
    assert keys(subscription.snapshot) == "abc"
    servers[0].up()
    assert wait_until(
        lambda: timer.advance(0.005) >= 0 and held(backend, SERVICE) == ["a", "b", "c"]
    )
    assert wait_until(lambda: subscription.snapshot.source == "live")
    assert keys(subscription.snapshot) == "abc"


def test_with_a_torn_file_nothing_is_known_and_never_an_empty_list(
    start, servers, path, timer, events
):
    path.write_bytes(b'{"v": 1, "services": {"shop.Ord')
    backend, registry = start(up=False)
    subscription = registry.subscribe(SERVICE)
    timer.advance(2 * A_WHILE)
    with pytest.raises(NotPublished):
        subscription.wait(0)
    with pytest.raises(RegistryUnavailable):
        registry.lookup(SERVICE)
    assert wait_until(lambda: len(failures(events)) == 1)  # a worker reads the file
    backend.up()
    assert keys(subscription.wait(WAIT_S)) == "abc"
    close(registry, path)
    _, later = start(up=False)
    assert keys(later.lookup(SERVICE)) == "abc"
