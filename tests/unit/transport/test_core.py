"""Which connection serves a call, when it is closed and what is retired, also at random."""

import grpc
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from tenacity import stop_after_attempt, wait_exponential

from rpcwheel.backoff import Backoff
from rpcwheel.durations import NEVER
from rpcwheel.transport.core import ANSWERS, Links, Traffic

SECOND = 1_000_000_000


class Clock:
    def __init__(self) -> None:
        self.now_ns = 10 * SECOND

    def __call__(self) -> int:
        return self.now_ns

    def pass_(self, seconds: float) -> None:
        self.now_ns += int(seconds * SECOND)


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def links(clock):
    return Links("first", clock, Backoff(wait_exponential(multiplier=1, max=60)))


# Traffic


def test_of_a_new_connection_nothing_was_seen(links):
    traffic = links.active.traffic
    assert (traffic.last_read_ns, traffic.last_write_ns, traffic.last_use_ns) == (None, None, None)


def test_a_read_and_a_write_are_both_a_use(links, clock):
    traffic = links.active.traffic
    traffic.saw_write()
    wrote_ns = clock.now_ns
    assert (traffic.last_read_ns, traffic.last_write_ns) == (None, wrote_ns)
    assert traffic.last_use_ns == wrote_ns
    clock.pass_(1)
    traffic.saw_read()
    assert (traffic.last_read_ns, traffic.last_write_ns) == (clock.now_ns, wrote_ns)
    assert traffic.last_use_ns == clock.now_ns


def test_what_comes_in_on_an_old_connection_says_nothing_of_the_new_one(links):
    old = links.enter()
    links.replace("second", NEVER)
    old.traffic.saw_read()
    assert links.active.traffic.last_read_ns is None


def test_only_what_no_client_makes_up_is_an_answer(links, clock):
    made_here = {"CANCELLED", "DEADLINE_EXCEEDED", "INTERNAL", "RESOURCE_EXHAUSTED"}
    made_here |= {"UNAUTHENTICATED", "UNAVAILABLE", "UNKNOWN"}
    assert {code.name for code in grpc.StatusCode} - ANSWERS == {"OK", *made_here}
    for code in (None, 5, "NOT_FOUND", *(grpc.StatusCode[name] for name in made_here)):
        links.active.traffic.saw_status(code)
    assert links.active.traffic.last_read_ns is None
    links.active.traffic.saw_status(grpc.StatusCode.NOT_FOUND)
    assert links.active.traffic.last_read_ns == clock.now_ns


def test_a_message_that_could_not_be_made_was_not_written_and_one_that_came_was_read():
    now = iter(range(1, 10))
    traffic = Traffic(lambda: next(now))
    with pytest.raises(ValueError, match="invalid literal"):
        traffic.writing(int)("no number")
    assert traffic.last_write_ns is None
    assert (traffic.writing(None)(b"a"), traffic.last_write_ns) == (b"a", 1)
    with pytest.raises(ValueError, match="invalid literal"):
        traffic.reading(int)("no number")
    assert traffic.last_read_ns == 2


# Calls


def test_a_call_that_begins_after_a_replacement_is_on_the_new_connection(links):
    before = links.enter()
    links.replace("second", NEVER)
    after = links.enter()
    assert (before.channel, after.channel) == ("first", "second")
    assert (before.number, after.number, links.calls) == (1, 2, 2)


def test_a_connection_without_calls_is_closed_when_it_is_replaced(links):
    old, over = links.replace("second", NEVER, "why")
    assert (old.channel, over, old.ended, old.reason) == ("first", True, True, "why")
    assert not links.draining


def test_a_connection_with_calls_is_closed_when_the_last_has_ended(links):
    calls = [links.enter(), links.enter()]
    old, over = links.replace("second", NEVER)
    assert (over, old.ended, links.draining) == (False, False, [old])
    assert [links.leave(link) for link in calls] == [False, True]
    assert (old.ended, links.draining, links.calls) == (True, [], 0)


def test_a_connection_without_time_for_its_calls_is_closed_at_once(links):
    call = links.enter()
    _, over = links.replace("second", 0)
    assert over
    assert not links.leave(call)  # it was closed already


def test_a_connection_is_closed_when_its_time_is_over(links, clock):
    call = links.enter()
    old, _ = links.replace("second", SECOND)
    clock.pass_(0.999)
    assert links.overdue() == []
    clock.pass_(0.001)
    assert links.overdue() == [old]
    assert links.overdue() == []
    assert not links.expire(old)
    assert not links.leave(call)


def test_time_to_drain_that_is_infinite_is_never_over(links, clock):
    links.enter()
    links.replace("second", NEVER)
    clock.pass_(1e9)
    assert links.overdue() == []


def test_the_end_of_a_call_does_not_close_the_active_connection(links):
    assert not links.leave(links.enter())


def test_closing_gives_every_open_connection_once(links):
    links.enter()
    old, _ = links.replace("second", NEVER)
    assert links.close() == [links.active, old]
    assert links.close() == []
    assert links.closed
    assert links.active.ended
    assert old.ended


def test_the_end_of_a_call_after_closing_closes_nothing(links):
    calls = [links.enter(), links.enter()]
    links.replace("second", NEVER)
    links.close()
    assert [links.leave(link) for link in calls] == [False, False]


# Backoff


def test_the_first_replacement_is_never_forbidden(links):
    assert links.wait_ns() == 0


def test_each_replacement_of_a_silent_connection_waits_longer(links, clock):
    waits = []
    for number in range(2, 8):
        links.replace(number, NEVER)
        waits.append(links.wait_ns() / SECOND)
        clock.now_ns += links.wait_ns()
        assert links.wait_ns() == 0
    assert waits == [2, 4, 8, 16, 32, 60]


def test_a_connection_that_worked_is_replaced_at_once_and_the_wait_begins_anew(links, clock):
    for number in range(2, 6):
        links.replace(number, NEVER)
    assert links.wait_ns() > 10 * SECOND
    links.active.traffic.saw_read()
    assert links.wait_ns() == 0
    links.replace(6, NEVER)
    assert links.wait_ns() == SECOND


def test_what_is_only_written_proves_nothing_of_a_connection(links):
    links.replace("second", NEVER)
    links.active.traffic.saw_write()
    assert links.wait_ns() > 0


def test_a_backoff_that_stops_allows_no_more(clock):
    links = Links("first", clock, Backoff(1.0, stop_after_attempt(3)))
    for number in (2, 3):
        assert links.wait_ns() == 0
        links.replace(number, NEVER)
        clock.pass_(1)
    clock.pass_(1e6)
    assert links.wait_ns() > 0


def test_the_wait_grows_no_more_where_wait_objects_would_overflow(clock):
    asked = []

    def wait(state):
        asked.append(state.attempt_number)
        return 0

    links = Links("first", clock, Backoff(wait))
    for number in range(2, 100):
        links.replace(number, NEVER)
    assert (asked[0], asked[-1], max(asked)) == (2, 64, 64)


def test_a_wait_object_that_raises_changes_nothing(clock):
    def wait(_):
        raise KeyError("the user's")

    links = Links("first", clock, Backoff(wait))
    with pytest.raises(KeyError):
        links.replace("second", NEVER)
    assert (links.active.channel, links.active.ended, links.wait_ns()) == ("first", False, 0)


def test_the_wait_may_be_asked_before(links):
    links.replace("second", NEVER, "why", rest_ns=5 * SECOND)
    assert links.wait_ns() == 5 * SECOND


def test_a_connection_that_is_wanted_is_wanted_of_the_next_until_there_was_one(links):
    old = links.active
    old.wanted = True
    links.replace("second", NEVER)
    assert (old.wanted, links.active.wanted) == (True, True)
    old = links.active
    old.traffic.saw_read()
    links.replace("third", NEVER)
    assert (old.wanted, links.active.wanted) == (False, False)


# Retired


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


# At random


class Model(RuleBasedStateMachine):
    """Beside it: what each call is on, and for each connection what must have become of it."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.links = Links(1, self.clock, Backoff(0))
        self.calls: list[object] = []  # links, one for each call that runs
        self.open = {1: self.links.active}
        self.until: dict[int, int] = {}  # of those that drain
        self.ended: list[int] = []
        self.active = 1
        self.shut = False

    def end(self, link) -> None:
        self.ended.append(link.channel)
        del self.open[link.channel]
        self.until.pop(link.channel, None)

    def on(self, number: int) -> int:
        return sum(link.channel == number for link in self.calls)

    @rule()
    def begin(self) -> None:
        if not self.shut:
            link = self.links.enter()
            assert link.channel == self.active
            self.calls.append(link)

    @rule(which=st.integers(0, 20))
    def finish(self, which: int) -> None:
        if self.calls:
            link = self.calls.pop(which % len(self.calls))
            last = link.channel in self.until and not self.on(link.channel)
            assert self.links.leave(link) == last
            if last:
                self.end(link)

    @rule(drain=st.sampled_from([0, 1, 3, NEVER]))
    def replace(self, drain: int) -> None:
        if self.shut:
            return
        old, over = self.links.replace(self.active + 1, drain)
        assert old is self.open[self.active]
        assert over == (drain == 0 or not self.on(self.active))
        if over:
            self.end(old)
        else:
            self.until[self.active] = NEVER if drain == NEVER else self.clock.now_ns + drain
        self.active += 1
        self.open[self.active] = self.links.active

    @rule(step=st.integers(0, 3))
    def wait(self, step: int) -> None:
        self.clock.now_ns += step
        over = self.links.overdue()
        due = [number for number, until in self.until.items() if until <= self.clock.now_ns]
        assert [link.channel for link in over] == due
        for link in over:
            self.end(link)

    @rule(which=st.integers(0, 20))
    def expire(self, which: int) -> None:
        link = self.open.get(which)
        drains = which in self.until
        if link is not None:
            assert self.links.expire(link) == drains
            if drains:
                self.end(link)

    @rule(often=st.integers(0, 9))
    def close(self, often: int) -> None:
        if often:
            return  # else nothing would ever happen
        links = self.links.close()
        assert {link.channel for link in links} == (set() if self.shut else set(self.open))
        self.shut = True
        for link in links:
            self.end(link)

    @invariant()
    def each_call_is_on_one_connection(self) -> None:
        links = {id(link): link for link in self.calls}.values()
        assert all(link.calls == self.on(link.channel) for link in links)
        assert self.links.calls == len(self.calls)

    @invariant()
    def each_connection_ends_once_and_only_then_takes_nothing(self) -> None:
        assert len(set(self.ended)) == len(self.ended)
        assert not any(link.ended for link in self.open.values())
        assert all(link.ended for link in self.calls if link.channel in self.ended)
        assert {link.channel for link in self.links.draining} == set(self.until)


TestModel = Model.TestCase
TestModel.settings = settings(max_examples=50)


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
TestRetiring.settings = settings(max_examples=50)
