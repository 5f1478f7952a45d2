"""A cluster of three etcd servers some of which fail."""

import pytest

from fixtures.engine_etcd import EtcdCluster
from fixtures.engine_watchers import RecordingWatcher, in_the_end, instance
from fixtures.waiting import wait_until
from rpcwheel.errors import RegistryUnavailable

SERVICE = "shop.Orders"
ONE, TWO = instance(1), instance(2)


@pytest.fixture
def cluster():
    with EtcdCluster() as running:
        yield running


@pytest.mark.parametrize("fault", ["kill9", "freeze"])
def test_registries_continue_after_the_leader_has_failed(cluster, opened, fault) -> None:
    backends = [
        opened(cluster.url(namespace=f"test-{number}"), lease=20.0, timeout=1.0)
        for number in range(4)  # each connects to a random member
    ]
    watchers = [RecordingWatcher() for _ in backends]
    for backend, watcher in zip(backends, watchers, strict=True):
        backend.watch(SERVICE, watcher)
        in_the_end(lambda backend=backend: backend.publish([ONE]))
        assert watcher.sees(ONE)
    leader = cluster.leader()
    getattr(leader, fault)()
    for backend, watcher in zip(backends, watchers, strict=True):
        in_the_end(lambda backend=backend: backend.publish([ONE, TWO]))
        assert in_the_end(lambda backend=backend: backend.renew([ONE, TWO])) == {}
        assert watcher.sees(ONE, TWO)
        in_the_end(lambda backend=backend: backend.withdraw([ONE]))
        assert watcher.sees(TWO)
    if fault == "freeze":  # requests that wait in the old leader must not undo later ones
        leader.thaw()
        assert wait_until(leader.answers)
    for backend, watcher in zip(backends, watchers, strict=True):
        assert in_the_end(lambda backend=backend: backend.renew([TWO])) == {}
        assert watcher.sees(TWO)
        assert list(in_the_end(lambda backend=backend: backend.lookup(SERVICE)).records) == [TWO.id]


def test_a_cluster_that_lost_its_quorum_is_reported_and_used_again_afterwards(cluster, opened):
    backend, watcher = opened(cluster.url(), lease=20.0, timeout=1.0), RecordingWatcher()
    backend.watch(SERVICE, watcher)
    in_the_end(lambda: backend.publish([ONE]))
    assert watcher.sees(ONE)
    killed = cluster.members[:2]
    for member in killed:
        member.kill9()
    assert watcher.doubts()
    with pytest.raises(RegistryUnavailable):
        backend.publish([TWO])
    for member in killed:
        member.launch()
    in_the_end(lambda: backend.publish([TWO]))
    assert in_the_end(lambda: backend.renew([ONE, TWO])) == {}
    assert watcher.sees(ONE, TWO)
