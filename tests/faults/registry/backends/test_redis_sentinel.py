"""Failover by Redis Sentinel, with a fixed address that leads to the present primary."""

import contextlib

import pytest

from fixtures.engine_redis import RedisEngine, SentinelEngine
from fixtures.engine_watchers import RecordingWatcher, in_the_end, instance, publishes
from fixtures.waiting import WAIT_S, wait_until
from rpcwheel import RegistryPolicy, open_registry

A, B = instance(1), instance(2)
POLICY = RegistryPolicy(lease_ttl=3.0, timeout=1.0, jitter=0.5, snapshot=False)
FAILOVER_TIMEOUT_S = 3 * WAIT_S
"""After the machine stood still for 2 s, Sentinel does nothing for 30 s (TILT)."""


class Failover:
    """A primary, its replica, Sentinel, and a proxy in the place of a load balancer."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self.primary = stack.enter_context(RedisEngine("--repl-diskless-sync-delay", "0"))
        self.address = self.primary.proxy()
        """The fixed address for clients."""
        self.link = self.primary.proxy()
        """The address by which the replica and Sentinel reach the first primary."""
        link = "--replicaof", self.link.host, str(self.link.port)
        self.replica = stack.enter_context(RedisEngine(*link))
        assert wait_until(self._is_replicated)
        self.sentinel = stack.enter_context(SentinelEngine(self.link.target))
        assert wait_until(lambda: self.sentinel.replicas == 1, timeout=FAILOVER_TIMEOUT_S)
        self.url = self.primary.url(port=self.address.port)

    def _is_replicated(self) -> bool:
        return self.replica.ask("INFO", "replication")["master_link_status"] == "up"

    def wait(self) -> None:
        """Wait until Sentinel has promoted the replica, and lead the address to it."""
        target = f"{self.replica.host}:{self.replica.port}"
        assert wait_until(lambda: self.sentinel.primary == target, timeout=FAILOVER_TIMEOUT_S)
        self.address.to(target)
        self.address.reset()


@pytest.fixture
def failover():
    """A running `Failover`."""
    with contextlib.ExitStack() as stack:
        yield Failover(stack)


@pytest.fixture
def registries(failover):
    """Two registries at the fixed address: one publishes, the other one watches."""
    with (
        open_registry(failover.url, registry_policy=POLICY) as registry,
        open_registry(failover.url, registry_policy=POLICY) as other,
    ):
        yield registry, other


def shows(known, *instances) -> bool:
    """Whether a subscription has exactly these live instances; waits for it."""

    def shown() -> bool:
        snapshot = known.snapshot
        return (
            snapshot is not None
            and snapshot.source == "live"
            and set(snapshot.instances) == set(instances)
        )

    return wait_until(shown)


def holds(backend, *instances) -> bool:
    """Whether a lookup finds exactly these instances; waits for it."""
    ids = {one.id for one in instances}
    return wait_until(lambda: in_the_end(lambda: backend.lookup(A.service)).records.keys() == ids)


def test_instances_are_published_again_after_a_primary_was_killed(failover, registries, opened):
    registry, other = registries
    registry.register(A, wait=WAIT_S)
    with other.subscribe(A.service) as known:
        assert shows(known, A)
        failover.primary.kill9()
        failover.wait()
        assert holds(opened(failover.replica.url()), A)
        assert shows(known, A)
        registry.register(B, wait=WAIT_S)
        assert shows(known, A, B)


def test_what_a_lagging_replica_has_lost_is_published_again(failover, registries, opened):
    registry, other = registries
    registry.register(A, wait=WAIT_S)
    with other.subscribe(A.service) as known:
        assert shows(known, A)
        failover.link.blackhole(new=True)  # the primary is cut off from all but the clients
        registry.register(B, wait=WAIT_S)
        registry.unregister(A, wait=WAIT_S)
        assert shows(known, B)
        failover.wait()
        assert holds(opened(failover.replica.url()), B)
        assert shows(known, B)


def test_a_client_leaves_a_primary_that_has_become_a_replica(opened):
    with RedisEngine() as old, RedisEngine() as new:
        address, watcher = old.proxy(), RecordingWatcher()
        backend = opened(old.url(port=address.port), lease=9.0)
        backend.watch(A.service, watcher)
        assert publishes(backend, watcher, A)
        address.to(f"{new.host}:{new.port}")  # the connections to the old one stay open
        old.ask("REPLICAOF", new.host, str(new.port))
        assert publishes(backend, watcher, A, B)
        assert opened(new.url()).lookup(A.service).records.keys() == {A.id, B.id}
