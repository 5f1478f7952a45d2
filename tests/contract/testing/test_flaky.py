"""A registry that fails on command does so in each way that real ones do."""

import threading
import time

import pytest

from fixtures.waiting import WAIT_S, wait_until
from rpcwheel.errors import RegistryClosed, RegistryRefused, RegistryUnavailable
from rpcwheel.instance import ServiceInstance
from rpcwheel.registry.provider import Settings
from rpcwheel.registry.providers import open_provider
from rpcwheel.testing import FlakyProvider, check_provider

LEASE = 6.0
ONE = ServiceInstance(service="shop.Orders", host="10.0.0.1", port=1)
TWO = ServiceInstance(service="shop.Orders", host="10.0.0.2", port=1)


class Told:
    """What a watcher was told: ids, and doubts as text."""

    def __init__(self):
        self.news = []

    def saw(self, view):
        self.news.append(sorted(view.records))

    def suspect(self, reason):
        self.news.append(reason)


@pytest.fixture
def opened(timer):
    """Open flaky providers on one engine; closed in the end."""
    made = []

    def opened(timeout=0.05):
        settings = Settings(LEASE, timeout, timer)
        made.append(FlakyProvider(open_provider("memory://flaky", settings)))
        return made[-1]

    yield opened
    for provider in made:
        provider.close()


def requests(provider):
    """One of each kind."""
    return {
        "publish": lambda: provider.publish([TWO]),
        "withdraw": lambda: provider.withdraw([TWO]),
        "renew": lambda: provider.renew([TWO]),
        "lookup": lambda: provider.lookup("shop.Orders"),
        "services": provider.services,
    }


def test_as_long_as_it_is_up_it_keeps_the_contract(opened):
    check_provider(opened)


def test_down_each_request_fails_at_once_and_nothing_is_done(opened):
    provider, other = opened(), opened()
    provider.down("a cable was cut")
    for ask in requests(provider).values():
        with pytest.raises(RegistryUnavailable, match="memory://flaky: a cable was cut"):
            ask()
    assert other.services() == []
    provider.up()
    provider.publish([ONE])
    assert other.services() == ["shop.Orders"]


def test_refusing_each_request_is_refused(opened):
    provider = opened()
    provider.refuse("wrong password")
    for ask in requests(provider).values():
        with pytest.raises(RegistryRefused, match="wrong password"):
            ask()


def test_a_lost_answer_is_a_failure_though_the_request_was_carried_out(opened):
    provider, other = opened(), opened()
    provider.lose_answers()
    with pytest.raises(RegistryUnavailable, match="the answer was lost"):
        provider.publish([ONE])
    assert list(other.lookup("shop.Orders").records) == [ONE.id]


def test_frozen_each_request_hangs_until_its_timeout(opened):
    provider = opened()
    provider.freeze()
    begin = time.monotonic()
    with pytest.raises(RegistryUnavailable, match="does not answer"):
        provider.publish([ONE])
    assert time.monotonic() - begin >= 0.05


@pytest.mark.parametrize("end", ["up", "close"])
def test_a_request_that_hangs_goes_on_when_the_engine_does_or_ends_with_it(opened, end):
    provider = opened(timeout=2 * WAIT_S)
    provider.freeze()
    ended = []

    def ask():
        try:
            provider.publish([ONE])
            ended.append("done")
        except RegistryClosed:
            ended.append("closed")

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    assert wait_until(lambda: provider.requests)
    getattr(provider, end)()
    thread.join(WAIT_S)
    assert ended == ["done" if end == "up" else "closed"]


def test_leases_end_while_it_is_down(opened, timer):
    provider = opened()
    provider.publish([ONE])
    provider.down()
    timer.advance(LEASE - 1)
    provider.up()
    assert provider.renew([ONE]) == {}
    provider.down()
    timer.advance(LEASE)
    provider.up()
    assert provider.renew([ONE]) == {ONE.key: "lease"}


def test_a_watcher_learns_at_once_that_it_is_down_and_what_there_is_when_it_is_up(opened):
    provider, other = opened(), opened()
    provider.publish([ONE])
    other.watch("shop.Orders", told := Told())
    other.down("cut")
    provider.publish([TWO])
    assert told.news == [[ONE.id], "cut"]
    other.up()
    assert told.news == [[ONE.id], "cut", [ONE.id, TWO.id]]
    other.up()
    other.lose_answers()
    assert len(told.news) == 3


def test_a_watcher_of_a_frozen_one_hears_nothing_until_it_is_up(opened):
    provider, other = opened(), opened()
    other.watch("shop.Orders", told := Told())
    other.freeze()
    provider.publish([ONE])
    assert told.news == [[]]
    other.up()
    assert told.news == [[], "contact was lost", [ONE.id]]


def test_a_watch_that_begins_while_it_is_down_is_told_when_it_is_up(opened):
    provider = opened()
    provider.publish([ONE])
    provider.down()
    watch = provider.watch("shop.Orders", told := Told())
    provider.up()
    assert told.news[-1] == [ONE.id]
    watch.close()
    provider.withdraw([ONE])
    assert told.news[-1] == [ONE.id]


def test_what_it_has_forgotten_is_gone_for_all_and_wiped_until_it_is_published_again(opened):
    provider, other = opened(), opened()
    provider.publish([ONE])
    other.publish([TWO])
    provider.watch("shop.Orders", told := Told())
    provider.forget()
    assert other.services() == []
    assert told.news == [[ONE.id, TWO.id], "the engine has lost its memory", []]
    assert provider.renew([ONE]) == provider.renew([ONE]) == {ONE.key: "wiped"}
    assert other.renew([TWO]) == {TWO.key: "missing"}
    provider.publish([ONE])
    assert provider.renew([ONE]) == {}


def test_it_may_forget_while_it_is_down(opened):
    provider = opened()
    provider.publish([ONE])
    provider.watch("shop.Orders", told := Told())
    provider.down("cut")
    provider.forget()
    provider.up()
    assert told.news == [[ONE.id], "cut", "the engine has lost its memory", []]
    assert provider.renew([ONE]) == {ONE.key: "wiped"}


def test_it_remembers_what_was_asked_also_in_vain(opened):
    provider = opened()
    provider.publish([ONE, TWO])
    provider.down()
    with pytest.raises(RegistryUnavailable):
        provider.renew([ONE])
    provider.watch("a", Told())
    with pytest.raises(RegistryUnavailable):
        provider.lookup("b")
    assert provider.requests == [
        ("publish", (ONE.id, TWO.id)),
        ("renew", (ONE.id,)),
        ("watch", ("a",)),
        ("lookup", ("b",)),
    ]


def test_closing_it_closes_the_one_inside_in_any_state(opened, timer):
    for spoil in ("up", "down", "freeze"):
        provider = opened()
        provider.publish([ONE])
        provider.watch("shop.Orders", Told())
        getattr(provider, spoil)()
        provider.close()
        provider.close()
        for ask in requests(provider).values():
            with pytest.raises(RegistryClosed):
                ask()
    assert timer.pending == 0
