"""A cluster of three ZooKeeper servers whose leader is killed, frozen, or alone."""

import pytest

from fixtures.engine_watchers import RecordingWatcher, in_the_end, instance
from fixtures.engine_zookeeper import ZookeeperCluster
from fixtures.waiting import wait_until
from rpcwheel.errors import RegistryUnavailable

SERVICE = instance().service
LEASE, TIMEOUT = 6.0, 1.0


@pytest.fixture
def cluster():
    with ZookeeperCluster() as running:
        yield running


@pytest.fixture
def backends(cluster, opened):
    """Backends on servers that kazoo picks at random; at least one uses the leader."""
    backends = []
    while len(backends) < 2 or clients_of(cluster.leader()) == 0:
        backends.append(opened(cluster.url(), lease=LEASE, timeout=TIMEOUT))
        in_the_end(backends[-1].services)
    return backends


@pytest.fixture
def instances(backends):
    """One for each backend."""
    return [instance(port) for port in range(1, len(backends) + 1)]


@pytest.fixture
def watchers(backends, instances):
    """One in each backend, after all see the instance that each has published."""
    watchers = [RecordingWatcher() for _ in backends]
    for backend, watcher, one in zip(backends, watchers, instances, strict=True):
        in_the_end(lambda backend=backend, one=one: backend.publish([one]))
        backend.watch(one.service, watcher)
    for watcher in watchers:
        assert watcher.sees(*instances)
    return watchers


def clients_of(server):
    """How many clients are connected to a server, without the one that asks."""
    (line,) = [line for line in server.status().splitlines() if "Connections" in line]
    return int(line.split()[-1]) - 1


def publishes_again(backend, one):
    """Whether the instance is published in the end, under a session that may end before."""

    def published():
        try:
            if backend.renew([one]):
                backend.publish([one])
            return backend.renew([one]) == {}
        except RegistryUnavailable:
            return False

    return wait_until(published)


@pytest.mark.parametrize("fault", ["killed", "frozen"])
def test_with_another_leader_all_backends_publish_renew_look_up_and_watch(
    cluster, backends, instances, watchers, fault
):
    leader = cluster.leader()
    if fault == "killed":
        leader.kill9()
    else:
        leader.freeze()
    changed = [one.replace(weight=7) for one in instances]
    for backend, one in zip(backends, changed, strict=True):
        in_the_end(lambda backend=backend, one=one: backend.publish([one]))
        assert publishes_again(backend, one)
    wanted = {one.id: one.encoded() for one in changed}
    for backend, watcher in zip(backends, watchers, strict=True):
        assert wait_until(
            lambda backend=backend: in_the_end(lambda: backend.lookup(SERVICE)).records == wanted
        )
        assert wait_until(lambda watcher=watcher: watcher.views[-1].records == wanted)
    if fault == "frozen":
        leader.thaw()
        for backend, watcher, one in zip(backends, watchers, changed, strict=True):
            assert publishes_again(backend, one)
            assert wait_until(lambda watcher=watcher: watcher.views[-1].records == wanted)


def test_a_server_without_the_others_is_unavailable_until_one_is_back(
    cluster, backends, instances, watchers
):
    first, second, _ = cluster.members
    first.kill9()
    second.kill9()
    for watcher in watchers:
        assert watcher.doubts()

    def is_unavailable():
        try:
            backends[0].lookup(SERVICE)
        except RegistryUnavailable:
            return True
        return False

    assert wait_until(is_unavailable)  # the third serves until it notices that it is alone
    second.launch()
    second.wait_until_ready()
    for backend, one in zip(backends, instances, strict=True):
        assert publishes_again(backend, one)
    for watcher in watchers:
        assert watcher.sees(*instances)
