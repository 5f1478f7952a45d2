"""The registry of one process: the contract, and its leases by a clock that is moved by hand."""

import contextlib
import gc
import os

import pytest

from fixtures.engine_watchers import Witness
from fixtures.timers import run_threads
from fixtures.waiting import wait_until
from rpcwheel.errors import ConfigurationError, RegistryUnavailable
from rpcwheel.instance import ServiceInstance
from rpcwheel.registry.provider import Settings
from rpcwheel.registry.providers import open_provider
from rpcwheel.testing import check_provider
from rpcwheel.timer import ManualTimer

LEASE = 6.0
SERVICE = "shop.Orders"
ONE = ServiceInstance(service=SERVICE, host="10.0.0.1", port=1)
TWO = ServiceInstance(service=SERVICE, host="10.0.0.2", port=1)


@pytest.fixture
def opened(timer):
    """Open providers on one engine; closed in the end."""
    made = []

    def opened(url="memory://test", timer=timer):
        made.append(open_provider(url, Settings(LEASE, 1.0, timer)))
        return made[-1]

    yield opened
    for provider in made:
        provider.close()


def test_it_keeps_the_provider_contract(opened):
    check_provider(opened)


def test_without_a_timer_leases_end_by_the_shared_one():
    with contextlib.closing(open_provider("memory://real", Settings(0.1, 1.0))) as provider:
        provider.publish([ONE])
        assert wait_until(lambda: not provider.lookup(SERVICE).records)


def test_an_instance_that_is_not_renewed_vanishes_at_the_end_of_its_lease(opened, timer):
    provider, other = opened(), opened()
    other.watch(SERVICE, witness := Witness())
    provider.publish([ONE, TWO])
    both = {ONE.id, TWO.id}
    timer.advance(LEASE - 0.01)
    assert witness.news == [set(), both]
    timer.advance(0.02)
    assert witness.news == [set(), both, set()]
    assert provider.renew([ONE]) == {ONE.key: "lease"}
    assert other.services() == []
    provider.publish([ONE])
    for _ in range(3):
        assert provider.renew([ONE]) == {}
        assert witness.has_seen(ONE)
        timer.advance(LEASE - 0.01)


def test_one_timeout_waits_for_all_leases_and_none_once_they_are_over(opened, timer):
    provider = opened()
    for _ in range(3):
        provider.publish([ONE, TWO])
        provider.renew([ONE, TWO])
        timer.advance(1)
    assert timer.pending == 1
    timer.advance(3 * LEASE)
    assert timer.pending == 0
    provider.publish([ONE])
    provider.close()
    assert timer.pending == 0


def test_each_name_and_each_namespace_is_a_registry_of_its_own(opened):
    provider = opened()
    provider.publish([ONE])
    for url in ("memory://", "memory://other", "memory://test?namespace=other"):
        assert opened(url).services() == []
    assert opened().services() == [SERVICE]


def test_a_timer_that_is_stopped_makes_the_registry_unavailable(opened):
    provider = opened(timer=(stopped := ManualTimer()))
    stopped.stop()
    with pytest.raises(RegistryUnavailable, match="no timeout for the lease"):
        provider.publish([ONE])
    assert provider.services() == []


def test_many_threads_may_use_it_at_once(opened):
    providers = [opened() for _ in range(4)]
    instances = [ONE.changed(id=str(number)) for number in range(4)]

    def work(number):
        for _ in range(200):
            providers[number].publish([instances[number]])
            assert providers[number].renew([instances[number]]) == {}
            providers[number].withdraw([instances[number]])

    run_threads(*[lambda number=number: work(number) for number in range(4)])
    assert providers[0].services() == []


def test_a_url_with_more_than_a_name_is_refused():
    for url in ("memory://a,b", "memory://a:1", "memory://u:p@a", "memory://a?poll=1"):
        with pytest.raises(ConfigurationError):
            open_provider(url, Settings(LEASE, 1.0))


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_begins_with_nothing_and_leaves_its_parents_instances(opened):
    provider = opened()
    provider.publish([ONE])
    gc.disable()  # nothing of gRPC's must be destroyed in the child
    try:
        child = os.fork()
        if not child:
            code = 1
            try:
                found = provider.renew([ONE]), provider.lookup(SERVICE).records
                provider.publish([ONE])
                provider.close()
                code = 0 if found == ({ONE.key: "missing"}, {}) else 2
            finally:
                os._exit(code)
    finally:
        gc.enable()
    assert os.waitpid(child, 0)[1] == 0
    assert provider.renew([ONE]) == {}
