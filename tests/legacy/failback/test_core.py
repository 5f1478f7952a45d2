"""What is decided about a failed call, and the book of the calls that wait."""

import asyncio

import hypothesis.strategies as st
import pytest
import tenacity
from hypothesis import given, settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from rpcwheel.failback import FailbackPolicy, FailbackStats
from rpcwheel.failback.core import (
    LEAST_DRAIN_NS,
    Admission,
    Again,
    FailbackCore,
    First,
    GiveUp,
    Last,
)
from rpcwheel.failback.entry import Call, Entry, State

S = 1_000_000_000
CALL = Call.at_rest(print, (), {})
GONE = ConnectionError("gone")


def core(**settings):
    return FailbackCore(FailbackPolicy(**{"retry_on": ConnectionError} | settings))


def entry():
    return Entry(CALL, GONE, 0, 0, print)


def after(core, error=GONE, attempts=1, elapsed_ns=0, **more):
    return core.after_failure(error, attempts=attempts, elapsed_ns=elapsed_ns, **more)


# --- Decisions ---


def test_an_error_that_on_does_not_name_ends_it_at_any_try():
    for attempts in (1, 2):
        assert after(core(), ValueError(), attempts) == GiveUp(
            "its error is not one that `retry_on` names"
        )


def test_a_call_whose_channel_was_closed_ends_with_what_to_do_about_it():
    closed = ValueError("Cannot invoke RPC on closed channel!")
    remedy = "close the kit, or the queue, before the channel"
    assert after(core(), closed) == GiveUp(f"its channel was closed; {remedy}")
    assert after(core(), asyncio.CancelledError()) == GiveUp(
        f"its try was cancelled, as by a channel that was closed; {remedy}"
    )
    assert isinstance(after(core(retry_on=ValueError), closed), Again)  # it may get another channel


def test_a_stop_that_says_so_at_the_first_failure_is_obeyed_at_once():
    assert isinstance(after(core(stop=tenacity.stop_after_attempt(1))), GiveUp)


def test_a_stop_without_retries_decides_alone():
    patient = core(stop=tenacity.stop_after_delay(60))
    assert after(patient, attempts=1000, elapsed_ns=59 * S) == Again(5 * S)
    assert after(patient, attempts=2, elapsed_ns=60 * S) == GiveUp("no retries left")


def test_a_wait_object_sees_try_error_and_idle_time():
    seen = []
    core(backoff=lambda state: seen.append(state) or 1.0).after_failure(
        GONE, attempts=2, elapsed_ns=7 * S, idle_ns=6 * S
    )
    (state,) = seen
    assert (state.attempt_number, state.outcome.exception()) == (2, GONE)
    assert state.seconds_since_start == pytest.approx(7)
    assert state.idle_for == pytest.approx(6)


@pytest.mark.parametrize(
    ("left_ns", "wait_s", "delay_ns"),
    [
        (8 * S, 5.0, 4 * S),
        (20 * S, 5.0, 5 * S),
        (S, 5.0, S // 2),
        (1, 5.0, LEAST_DRAIN_NS),
        (-S, 5.0, LEAST_DRAIN_NS),
        (S, 0.001, 1_000_000),
    ],
)
def test_during_a_drain_no_wait_is_longer_than_half_of_what_is_left(left_ns, wait_s, delay_ns):
    assert after(core(backoff=wait_s), closes_in_ns=left_ns) == Again(delay_ns)


@given(retries=st.integers(0, 20), failures=st.integers(0, 30))
def test_a_call_is_tried_once_and_then_at_most_retries_times(retries, failures):
    decide, tries, left = core(max_attempts=retries + 1, backoff=0), 1, failures
    while left:
        left -= 1
        if isinstance(after(decide, attempts=tries), GiveUp):
            break
        tries += 1
    assert tries == min(failures, retries) + 1


# --- The book ---


def test_a_full_queue_refuses_or_drops_as_the_policy_says():
    for overflow, admission in (("raise", Admission.FULL), ("drop", Admission.DROPPED)):
        book = core(max_pending=2, overflow=overflow)
        assert [book.admit(entry()) for _ in range(3)] == [Admission.PARKED] * 2 + [admission]
        assert book.pending == 2


def test_calls_in_retry_count_as_pending():
    book, one = core(max_pending=1), entry()
    book.admit(one)
    book.claim(one, 0)
    assert book.admit(entry()) is Admission.FULL


def test_a_closed_queue_refuses_even_if_it_would_drop():
    book = core(max_pending=1, overflow="drop")
    assert (book.close(), book.close()) == (True, False)
    assert book.admit(entry()) is Admission.CLOSED


def test_of_two_who_claim_a_call_one_gets_it():
    book, one = core(), entry()
    book.admit(one)
    assert (book.claim(one, 3), book.claim(one, 4)) == (True, False)
    assert (one.attempts, one.idle_ns) == (2, 3)


def test_idle_time_adds_up():
    book, one = core(), entry()
    book.admit(one)
    book.claim(one, 5)
    book.wait_again(one, GONE, 7)
    book.claim(one, 17)
    assert one.idle_ns == 15


def test_a_call_that_is_gone_stays_gone():
    book, one = core(), entry()
    book.admit(one)
    assert book.remove(one, Last.DELIVERED)
    assert not book.remove(one, Last.ABANDONED)
    assert not book.claim(one, 0)
    assert not book.wait_again(one, GONE, 0)
    assert not book.give_up(one, GONE)
    assert book.stats() == FailbackStats(calls=1, parked=1, delivered_later=1)


def test_a_call_with_the_dead_letter_hook_is_pending_but_not_left_at_the_end():
    book, one, other = core(), entry(), entry()
    book.admit(one)
    book.admit(other)
    book.claim(one, 0)
    assert book.give_up(one, ValueError())
    assert not book.give_up(one, ValueError())
    assert book.pending == 2
    assert book.take_left() == [(other, State.WAITING)]
    assert book.stats() == FailbackStats(calls=2, parked=2, retried=1, abandoned=1, undelivered=1)


class Book(RuleBasedStateMachine):
    """Any order of transitions, against a model of states and counts."""

    LIMIT = 4
    entries = Bundle("entries")

    def __init__(self):
        super().__init__()
        self.core = core(max_pending=self.LIMIT, overflow="raise")
        self.now_ns = 0
        self.states = {}
        self.counts = dict.fromkeys(("calls", "parked", "rejected", "retried", "left"), 0)
        self.closed = False

    @rule(first=st.sampled_from(First))
    def end_first_try(self, first):
        self.core.count(first)
        self.counts["calls"] += 1

    @rule(target=entries)
    def admit(self):
        one = entry()
        admission = self.core.admit(one)
        self.counts["calls"] += 1
        full = self.pending() >= self.LIMIT
        if self.closed or full:
            assert admission is (Admission.CLOSED if self.closed else Admission.FULL)
            self.counts["rejected"] += 1
            one.state = State.GONE
            self.states[one] = State.GONE
        else:
            assert admission is Admission.PARKED
            self.counts["parked"] += 1
            self.states[one] = State.WAITING
        return one

    @rule(one=consumes(entries))
    def refuse(self, one):
        waited = self.states[one] is State.WAITING
        self.core.refuse(one)
        if waited:
            self.states[one] = State.GONE
            self.counts["parked"] -= 1

    @rule(one=entries, passed=st.integers(0, 10))
    def claim(self, one, passed):
        self.now_ns += passed
        before = one.attempts
        assert self.core.claim(one, self.now_ns) == (self.states[one] is State.WAITING)
        if self.states[one] is State.WAITING:
            self.states[one] = State.RUNNING
            self.counts["retried"] += 1
            assert one.attempts == before + 1

    @rule(one=entries)
    def wait_again(self, one):
        ran = self.states[one] is State.RUNNING
        assert self.core.wait_again(one, GONE, self.now_ns) == ran
        if ran:
            self.states[one] = State.WAITING

    @rule(one=entries)
    def give_up(self, one):
        alive = self.states[one] in (State.WAITING, State.RUNNING)
        assert self.core.give_up(one, GONE) == alive
        if alive:
            self.states[one] = State.ENDING

    @rule(one=entries, last=st.sampled_from(Last))
    def remove(self, one, last):
        there = self.states[one] is not State.GONE
        assert self.core.remove(one, last) == there
        self.states[one] = State.GONE

    @rule()
    def close(self):
        assert self.core.close() == (not self.closed)
        self.closed = True

    @rule()
    def take_left(self):
        left = self.core.take_left()
        alive = {one: s for one, s in self.states.items() if s is not State.GONE}
        assert dict(left) == {one: s for one, s in alive.items() if s is not State.ENDING}
        self.counts["left"] += len(left)
        self.states |= dict.fromkeys(alive, State.GONE)

    def pending(self):
        return sum(state is not State.GONE for state in self.states.values())

    @invariant()
    def entries_stand_as_in_the_model(self):
        assert all(one.state is state for one, state in self.states.items())
        waiting = [one for one, state in self.states.items() if state is State.WAITING]
        assert self.core.waiting() == waiting

    @invariant()
    def figures_add_up(self):
        stats = self.core.stats()
        assert stats.pending == self.core.pending == self.pending() <= self.LIMIT
        assert stats.calls == self.counts["calls"]
        assert stats.parked == self.counts["parked"]
        assert stats.retried == self.counts["retried"]
        assert stats.undelivered >= self.counts["left"]
        ends = stats.delivered_inline, stats.raised, stats.parked, stats.dropped, stats.rejected
        assert stats.calls == sum(ends)
        lasts = stats.delivered_later, stats.abandoned, stats.undelivered, stats.pending
        assert stats.parked == sum(lasts)


TestBook = Book.TestCase
TestBook.settings = settings(max_examples=50)
