"""The registry of one process: the contract, and leases with a manual timer."""

import contextlib

import pytest

from fixtures.engine_watchers import RecordingWatcher
from fixtures.forks import holds_in_child
from fixtures.timers import run_threads
from fixtures.waiting import wait_until
from rpcwheel.errors import RegistryUnavailable
from rpcwheel.instance import ServiceInstance
from rpcwheel.registry.backend import Settings
from rpcwheel.registry.backends import open_backend
from rpcwheel.timer import ManualTimer

LEASE = 6.0
SERVICE = "shop.Orders"
ONE = ServiceInstance(service=SERVICE, host="10.0.0.1", port=1)
TWO = ServiceInstance(service=SERVICE, host="10.0.0.2", port=1)


@pytest.fixture
def opened(timer, closed_later):
    """Open backends on one engine; closed in the end."""

    def opened(url="memory://test", timer=timer):
        return closed_later(open_backend(url, Settings(LEASE, 1.0, timer)))

    return opened


def test_a_view_says_which_records_changed(opened):
    backend, watcher = opened(), RecordingWatcher()
    backend.publish([ONE])
    backend.watch(SERVICE, watcher)
    backend.publish([ONE, TWO])
    backend.publish([ONE.replace(weight=7)])
    backend.withdraw([TWO])
    assert [view.changed for view in watcher.views] == [None, {TWO.id}, {ONE.id}, {TWO.id}]


def test_without_a_timer_leases_end_by_the_shared_one():
    with contextlib.closing(open_backend("memory://real", Settings(0.1, 1.0))) as backend:
        backend.publish([ONE])
        assert wait_until(lambda: not backend.lookup(SERVICE).records)


def test_a_lease_has_one_timeout_and_none_after_its_end(opened, timer):
    backend = opened()
    for _ in range(3):
        backend.publish([ONE, TWO])
        backend.renew([ONE, TWO])
        timer.advance(1)
    assert timer.pending == 1
    timer.advance(3 * LEASE)
    assert timer.pending == 0
    backend.publish([ONE])
    assert backend.renew([ONE, TWO]) == {TWO.key: "missing"}
    backend.close()
    assert timer.pending == 0


def test_each_name_and_each_namespace_is_another_registry(opened):
    backend = opened()
    backend.publish([ONE])
    for url in ("memory://", "memory://other", "memory://test?namespace=other"):
        assert opened(url).services() == []
    assert opened().services() == [SERVICE]


def test_a_timer_that_is_stopped_makes_the_registry_unavailable(opened):
    stopped = ManualTimer()
    backend, empty = opened(timer=stopped), opened("memory://empty", timer=stopped)
    backend.publish([ONE])
    stopped.stop()
    for request in (
        lambda: empty.publish([ONE]),
        lambda: backend.publish([TWO]),
        lambda: backend.renew([ONE]),
    ):
        with pytest.raises(RegistryUnavailable, match="no timeout for the lease"):
            request()
    assert empty.services() == []
    assert [*backend.lookup(SERVICE).records] == [ONE.id]
    backend.withdraw([ONE])
    assert backend.services() == []


def test_threads_may_use_one_registry_at_the_same_time(opened):
    backends = [opened() for _ in range(4)]
    instances = [ONE.replace(id=str(number)) for number in range(4)]

    def work(number):
        for _ in range(200):
            backends[number].publish([instances[number]])
            assert backends[number].renew([instances[number]]) == {}
            backends[number].withdraw([instances[number]])

    run_threads(*[lambda number=number: work(number) for number in range(4)])
    assert backends[0].services() == []


def test_a_forked_child_starts_empty_and_does_not_change_its_parent(opened):
    backend = opened()
    backend.publish([ONE])

    def starts_empty():
        found = backend.renew([ONE]), backend.lookup(SERVICE).records
        backend.publish([ONE])
        backend.close()
        return found == ({ONE.key: "missing"}, {})

    assert holds_in_child(starts_empty)
    assert backend.renew([ONE]) == {}
