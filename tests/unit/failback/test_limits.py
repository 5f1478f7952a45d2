"""Limits of what a worker takes, with given times."""

import pytest

from rpcwheel.failback import limits as limits_module
from rpcwheel.failback.limits import Rates, TakeLimits
from rpcwheel.journal.backend import CallState, Route, StoredCall

SECOND_NS = 1_000_000_000
NOW_NS = 5 * SECOND_NS


def test_attempts_of_a_target_are_evenly_spaced():
    rates = Rates(4.0)
    delays = [rates.reserve("a", NOW_NS) / SECOND_NS for _ in range(3)]
    assert delays == [0.0, 0.25, 0.5]
    assert rates.reserve("b", NOW_NS) == 0
    assert rates.reserve("a", NOW_NS + 10 * SECOND_NS) == 0


@pytest.mark.parametrize(("reserved", "room"), [(0, 9), (1, 8), (8, 1), (9, 0), (20, 0)], ids=str)
def test_the_room_is_what_can_begin_within_the_time(reserved, room):
    rates = Rates(4.0)
    for _ in range(reserved):
        rates.reserve("a", NOW_NS)
    assert rates.room("a", NOW_NS, 2 * SECOND_NS) == room


class Journal:
    """Gives as many calls as it is asked for."""

    def __init__(self, most=1000, due_s=-1.0):
        self.asked = []
        self._left = most
        self._due_s = due_s

    def take(self, routes, within_s):
        self.asked.append(([(one.target, one.limit) for one in routes], within_s))
        given = []
        for route in routes:
            count = min(route.limit, self._left)
            self._left -= count
            given += [self._call(route) for _ in range(count)]
        return given

    def _call(self, route):
        state = CallState.TAKEN
        return StoredCall(
            1, route.queue, route.target, "/m", "k", b"", self._due_s, 1, 1, 1, "", None, state
        )


@pytest.fixture
def now(monkeypatch):
    """The monotonic clock, in nanoseconds; a list, so that it can be changed."""
    now = [NOW_NS]
    monkeypatch.setattr(limits_module.time, "monotonic_ns", lambda: now[0])
    return now


def test_a_rate_limits_each_target_and_each_function(now):
    limits, journal = TakeLimits(Rates(2.0)), Journal()
    routes = [Route("q", "a", 100), Route("q", "b", 3), Route("f", "", 100), Route("g", "", 100)]
    taken = limits.take(journal.take, routes, 2.0)
    assert journal.asked == [([("a", 5), ("b", 3), ("", 5), ("", 5)], 2.0)]
    assert [call.due_s for call in taken if call.target == "b"] == [0.0, 0.5, 1.0]
    assert [call.due_s for call in taken if call.queue == "g"] == [0.0, 0.5, 1.0, 1.5, 2.0]
    now[0] += SECOND_NS
    limits.take(journal.take, routes, 2.0)
    assert journal.asked[1:] == [([("a", 2), ("b", 3), ("", 2), ("", 2)], 2.0)]


def test_queues_share_the_rate_of_a_target(now):
    rates, journal = Rates(2.0), Journal()
    for queue in ("q", "r"):
        TakeLimits(rates).take(journal.take, [Route(queue, "a", 3)], 2.0)
    assert journal.asked == [([("a", 3)], 2.0), ([("a", 2)], 2.0)]


def test_a_call_that_is_due_later_is_not_made_earlier(now):
    limits, journal = TakeLimits(Rates(1.0)), Journal(due_s=1.5)
    taken = limits.take(journal.take, [Route("q", "a", 3)], 2.0)
    assert [call.due_s for call in taken] == [1.5, 1.5, 2.0]


def test_the_journal_is_not_asked_while_no_attempt_may_begin(now):
    limits, journal = TakeLimits(Rates(1.0)), Journal()
    limits.take(journal.take, [Route("q", "a", 3)], 2.0)
    assert limits.take(journal.take, [Route("q", "a", 3)], 2.0) == []
    assert len(journal.asked) == 1
    assert not limits.found_none


def test_only_calls_that_are_due_by_the_time_are_taken(now):
    limits, journal = TakeLimits(due_by_ns=NOW_NS + SECOND_NS), Journal()
    for _ in range(3):
        limits.take(journal.take, [Route("q", "a", 1)], 2.0)
        now[0] += 2 * SECOND_NS
    assert [within_s for _, within_s in journal.asked] == [1.0, -1.0, -3.0]


def test_found_none_says_that_the_journal_has_no_call_for_any_route(now):
    limits = TakeLimits(Rates(1.0))
    routes = [Route("q", "a", 3), Route("q", "b", 3)]
    limits.take(Journal(1).take, routes, 2.0)
    assert not limits.found_none
    limits.take(Journal(0).take, routes, 2.0)
    assert limits.found_none
    limits.take(Journal().take, routes[:1], 2.0)
    limits.take(Journal(0).take, routes, 2.0)  # there is no room for `a`
    assert not limits.found_none


def test_found_none_is_not_said_if_the_journal_fails(now):
    limits = TakeLimits()
    limits.take(Journal(0).take, [Route("q", "a", 1)], 2.0)

    def failing(routes, within_s):
        raise ConnectionError

    with pytest.raises(ConnectionError):
        limits.take(failing, [Route("q", "a", 1)], 2.0)
    assert not limits.found_none
