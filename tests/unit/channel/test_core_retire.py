"""A channel that is retired takes no more calls, and is over when the last of its own has ended."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from rpcwheel.backoff import Backoff
from rpcwheel.channel.core import Links
from rpcwheel.durations import NEVER

SECOND = 1_000_000_000


class Clock:
    now_ns = 10 * SECOND

    def __call__(self):
        return self.now_ns


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def links(clock):
    return Links("first", clock, Backoff(0))


def test_without_calls_it_is_over_at_once(links):
    active = links.active
    assert links.retire(NEVER, "why") == ([active], [])
    assert (active.ended, links.is_spent, links.refuses) == (True, True, True)


def test_it_is_over_when_the_last_call_has_ended(links):
    calls = [links.enter(), links.enter()]
    links.retire(NEVER, "why")
    assert (links.is_spent, links.opened()) == (False, [calls[0]])
    assert [links.leave(link) for link in calls] == [False, True]
    assert (links.is_spent, links.calls) == (True, 0)


def test_calls_on_a_connection_that_was_replaced_before_count_too(links):
    old = links.enter()
    links.replace("second", NEVER)
    over, _ = links.retire(NEVER)
    assert [link.channel for link in over] == ["second"]
    assert not links.is_spent
    assert links.leave(old)
    assert links.is_spent


def test_calls_are_ended_when_their_time_is_over(links, clock):
    link = links.enter()
    assert links.retire(2 * SECOND) == ([], [link])
    clock.now_ns += 2 * SECOND
    assert links.overdue() == [link]
    assert links.is_spent
    assert not links.leave(link)


def test_without_time_calls_are_ended_at_once(links):
    link = links.enter()
    assert links.retire(0) == ([link], [])
    assert links.is_spent


def test_the_time_can_only_become_shorter(links):
    link = links.enter()
    links.retire(5 * SECOND, "first")
    assert links.retire(9 * SECOND, "second") == ([], [])
    assert links.retire(SECOND, "third") == ([], [link])
    assert link.details == "channel retired: first"
    assert links.retire(0) == ([link], [])


def test_an_old_connection_that_ends_sooner_anyway_does(links):
    links.enter()
    old, _ = links.replace("second", SECOND, "dead")
    links.enter()
    assert links.retire(5 * SECOND)[1] == [links.active]
    assert (old.drain_until_ns, old.details) == (11 * SECOND, "connection replaced: dead")


def test_it_can_be_closed_while_it_drains(links):
    link = links.enter()
    links.retire(NEVER)
    assert links.close() == [link]
    assert links.retire(0) == ([], [])


def test_what_is_over_leaves_nothing_to_close(links):
    links.retire(NEVER)
    assert links.close() == []


class Retiring(RuleBasedStateMachine):
    """At random: every link is closed exactly once, and none while it has calls and time."""

    def __init__(self):
        super().__init__()
        self.clock = Clock()
        self.links = Links(1, self.clock, Backoff(0))
        self.calls = []
        self.closed = []

    def end(self, links):
        assert not {link.number for link in links} & set(self.closed)
        self.closed += [link.number for link in links]

    @rule()
    def call(self):
        if not self.links.refuses:
            self.calls.append(self.links.enter())

    @rule(number=st.integers(0, 9))
    def call_ends(self, number):
        if self.calls:
            link = self.calls.pop(number % len(self.calls))
            self.end([link] if self.links.leave(link) else [])

    @rule(drain=st.sampled_from([0, SECOND, NEVER]))
    def replace(self, drain):
        if not self.links.refuses:
            old, over = self.links.replace(self.links.active.number + 1, drain)
            self.end([old] if over else [])

    @rule(drain=st.sampled_from([0, SECOND, NEVER]))
    def retire(self, drain):
        self.end(self.links.retire(drain)[0])

    @rule(seconds=st.integers(0, 2))
    def time_passes(self, seconds):
        self.clock.now_ns += seconds * SECOND
        self.end(self.links.overdue())

    @invariant()
    def it_is_spent_when_all_are_closed(self):
        numbers = set(range(1, self.links.active.number + 1))
        assert self.links.is_spent is (set(self.closed) == numbers)
        assert self.links.calls == len(self.calls)
        if self.links.is_spent:
            assert self.links.retired
            assert self.links.close() == []


TestRetiring = Retiring.TestCase
