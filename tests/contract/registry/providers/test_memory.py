"""The registry of one process: the contract, and its leases by a clock that is moved by hand."""

import os

import pytest

from fixtures.timers import run_threads
from rpcwheel.errors import ConfigurationError, RegistryUnavailable
from rpcwheel.instance import ServiceInstance
from rpcwheel.registry.provider import Settings
from rpcwheel.registry.providers import memory, open_provider
from rpcwheel.testing import PROVIDER_CHECKS
from rpcwheel.timer import ManualTimer, shared_timer

LEASE = 6.0
ONE = ServiceInstance(service="shop.Orders", host="10.0.0.1", port=1)
TWO = ServiceInstance(service="shop.Orders", host="10.0.0.2", port=1)


class Told:
    """What a watcher was told: ids."""

    def __init__(self):
        self.news = []

    def saw(self, view):
        self.news.append(sorted(view.records))

    def suspect(self, reason):
        self.news.append(reason)


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


@pytest.mark.parametrize("check", PROVIDER_CHECKS.values(), ids=PROVIDER_CHECKS)
def test_it_keeps_the_contract_in_manual_time(check, opened):
    check(opened)


@pytest.mark.parametrize("check", PROVIDER_CHECKS.values(), ids=PROVIDER_CHECKS)
def test_it_keeps_the_contract_in_real_time(check):
    check(lambda: open_provider("memory://real", Settings(1.5, 2.0)))


def test_what_is_not_renewed_vanishes_at_the_end_of_its_lease_and_is_told(opened, timer):
    provider, other = opened(), opened()
    other.watch("shop.Orders", told := Told())
    provider.publish([ONE, TWO])
    timer.advance(LEASE - 0.01)
    assert told.news == [[], [ONE.id, TWO.id]]
    timer.advance(0.02)
    assert told.news == [[], [ONE.id, TWO.id], []]
    assert provider.renew([ONE]) == {ONE.key: "lease"}
    assert other.services() == []
    provider.publish([ONE])
    assert provider.renew([ONE]) == {}
    assert told.news[-1] == [ONE.id]


def test_a_renewal_begins_the_lease_anew(opened, timer):
    provider = opened()
    provider.publish([ONE])
    for _ in range(5):
        timer.advance(LEASE - 1)
        assert provider.renew([ONE]) == {}
    timer.advance(LEASE - 0.01)
    assert provider.lookup("shop.Orders").records
    timer.advance(0.02)
    assert not provider.lookup("shop.Orders").records


def test_one_timeout_waits_for_all_of_a_provider_and_none_when_it_is_closed(opened, timer):
    provider = opened()
    for _ in range(3):
        provider.publish([ONE, TWO])
        provider.renew([ONE, TWO])
        timer.advance(1)
    assert timer.pending == 1
    provider.close()
    assert timer.pending == 0


def test_a_lease_without_renewals_leaves_no_timeout(opened, timer):
    opened().publish([ONE])
    timer.advance(3 * LEASE)
    assert timer.pending == 0


def test_each_name_and_each_namespace_is_a_registry_of_its_own(opened):
    provider = opened()
    provider.publish([ONE])
    for url in ("memory://", "memory://other", "memory://test?namespace=other"):
        assert opened(url).services() == []
    assert opened().services() == ["shop.Orders"]


def test_a_registry_is_forgotten_with_its_last_provider(opened):
    opened("memory://short").publish([ONE])
    assert "short" in memory._engines
    provider = open_provider("memory://shorter", Settings(LEASE, 1.0))
    provider.close()
    del provider
    assert "shorter" not in memory._engines


def test_watchers_are_told_on_the_thread_that_acts_before_it_goes_on(opened):
    provider = opened()
    provider.watch("shop.Orders", told := Told())
    assert told.news == [[]]
    provider.publish([ONE])
    assert told.news[-1] == [ONE.id]
    provider.withdraw([ONE])
    assert told.news[-1] == []


def test_without_a_timer_it_takes_the_shared_one(opened):
    provider = opened(timer=None)
    before = shared_timer().pending
    provider.publish([ONE])
    assert shared_timer().pending == before + 1
    provider.close()
    assert shared_timer().pending == before


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


@pytest.mark.parametrize(
    "url", ["memory://a,b", "memory://a:1", "memory://u:p@a", "memory://a?poll=1"]
)
def test_a_url_with_more_than_a_name_is_refused(url):
    with pytest.raises(ConfigurationError):
        open_provider(url, Settings(LEASE, 1.0))


def test_a_forked_child_begins_with_nothing_and_leaves_its_parents_alone(opened):
    provider = opened()
    provider.publish([ONE])
    provider._engine.lock.acquire()  # as another thread might have it
    child = os.fork()
    if not child:
        code = 1
        try:
            found = provider.renew([ONE]), provider.lookup("shop.Orders").records
            provider.publish([ONE])
            provider.close()
            code = 0 if found == ({ONE.key: "missing"}, {}) else 2
        finally:
            os._exit(code)
    provider._engine.lock.release()
    assert os.waitpid(child, 0)[1] == 0
    assert provider.renew([ONE]) == {}
