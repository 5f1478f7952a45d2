"""Random calls through a failback queue, compared with a reference that only has lists.

Times are nanoseconds. The reference has the real `Pacing`, which has its own tests.
"""

import asyncio
import itertools
import math
from collections import Counter
from contextlib import closing, nullcontext
from dataclasses import dataclass
from random import Random
from typing import NamedTuple
from unittest.mock import Mock

import grpc
import pytest
import tenacity
from hypothesis import given, note, settings
from hypothesis import strategies as st

from rpcwheel._grpc.calls import CANCELLED_HERE, set_not_sent
from rpcwheel._grpc.finished import FinishedError
from rpcwheel.call.failback_policy import FailedCall
from rpcwheel.call.failed_calls import ChannelKey
from rpcwheel.call.keeper import KeptDelivery
from rpcwheel.call.metadata import not_sent_metadata
from rpcwheel.durations import NEVER, to_ns
from rpcwheel.errors import FailbackClosed, FailbackFull
from rpcwheel.events import (
    DeadLetterFailed,
    FailbackAttemptFailed,
    FailbackDelivered,
    FailbackDropped,
    FailbackGaveUp,
    FailbackLost,
    FailbackQueued,
    FailbackRejected,
    add_sink,
    remove_sink,
)
from rpcwheel.failback import FailbackPolicy, FailbackStats, QueueEntry
from rpcwheel.failback.pacing import Outcome, Pacing
from rpcwheel.failback.queue import FailbackQueue
from rpcwheel.failback.queued_call import QueuedCall, QueuedCallState, SavedCall
from rpcwheel.timer import DeadlineHeap, ManualTimer

WAITING, RUNNING, ENDING, DONE = QueuedCallState
REMEDY = "close the kit, or the queue, before the channel"
NOT_NAMED = "its error is not one that `retry_on` names"
NO_ATTEMPTS = "no attempts left"
LOOP_CLOSED = "its event loop is closed"
CLOSED = "it came after close(), or at the end of the program"
MIN_WAIT = to_ns(0.05)
TIMEOUT_S = 60


class Failure(NamedTuple):
    """How an attempt fails. `retry_on` names connection errors and UNAVAILABLE."""

    error: BaseException
    outcome: Outcome = Outcome.UNKNOWN
    """What it says about the server, unless it ends the call by its error."""
    is_named: bool = False
    is_repeated: bool = False
    """Whether a queued call is attempted again after it."""
    least: int | None = None
    """The shortest wait after an attempt that was not sent; None: it was sent."""
    reason: str = NOT_NAMED
    """Why it ends a call otherwise."""


def ended(code, details=""):
    return FinishedError(grpc.StatusCode[code], details)


def not_sent(code="UNAVAILABLE", pushback_s=None):
    """An attempt that the client has refused."""
    least = to_ns(pushback_s or 0.05)
    trailing = not_sent_metadata(None if pushback_s is None else least)
    error = FinishedError(grpc.StatusCode[code], "not sent: open", trailing=trailing)
    set_not_sent(error)
    is_busy = code == "UNAVAILABLE"
    return Failure(error, Outcome.BUSY if is_busy else Outcome.FAILED, is_busy, True, least)


GONE = Failure(ConnectionError("gone"), Outcome.FAILED, is_named=True, is_repeated=True)
FAILURES = [
    *[GONE] * 4,
    Failure(ended("UNAVAILABLE"), Outcome.BUSY, is_named=True, is_repeated=True),
    Failure(ended("DEADLINE_EXCEEDED"), Outcome.BUSY, is_repeated=True),
    Failure(ended("RESOURCE_EXHAUSTED"), Outcome.REFUSED, is_repeated=True),
    Failure(ended("CANCELLED", "by the server"), Outcome.FAILED, is_repeated=True),
    not_sent(),
    not_sent(pushback_s=3),
    not_sent("FAILED_PRECONDITION"),
    Failure(ended("CANCELLED", CANCELLED_HERE)),
    Failure(ValueError("no such shop")),
    Failure(
        ValueError("Cannot invoke RPC on closed channel!"),
        reason=f"its channel was closed; {REMEDY}",
    ),
    Failure(
        asyncio.CancelledError(),
        reason=f"its attempt was cancelled, as by a channel that was closed; {REMEDY}",
    ),
]


def push(number):
    """The function whose calls are queued."""


PLACES = {"function": f"{__name__}.push", "channel": "/a/B", "other channel": "/a/B"}
"""What calls are paced with, and their names."""


@dataclass(eq=False)
class Call:
    """A call in the reference."""

    number: int
    place: str
    started: int
    error: BaseException
    state: QueuedCallState = WAITING
    attempts: int = 1
    has_retried: bool = False
    idle: int = 0
    waiting_since: int = 0
    due: int = 0
    began: int = 0

    @property
    def name(self):
        return PLACES[self.place]

    def failed_call(self, now, reason):
        waited_s = (now - self.started) / 1e9
        args = (self.number,)
        return FailedCall(self.name, args, {}, self.attempts, waited_s, self.error, reason)


@dataclass
class Rules:
    """The settings of a queue, which the reference applies in plain numbers."""

    max_pending: int
    max_attempts: int | None
    wait_s: float
    stop: str | None
    stop_s: float
    overflow: str
    has_hook: bool
    rate: float | None
    max_in_flight: int | None

    def wait(self, attempt, elapsed_s, idle_s, error):
        """A wait in seconds that depends on all that may have an influence on it."""
        more_s = attempt / 8 + elapsed_s / 64 + idle_s / 4 + (error is GONE.error)
        return self.wait_s and self.wait_s + more_s

    def stops(self, elapsed_s, wait_s):
        at_s = elapsed_s + (wait_s if self.stop == "before" else 0.0)
        return self.stop is not None and at_s >= self.stop_s

    def policy(self):
        stops = {
            None: None,
            "before": tenacity.stop_before_delay(self.stop_s),
            "after": tenacity.stop_after_delay(self.stop_s),
        }
        return FailbackPolicy(
            retry_on=(ConnectionError, "UNAVAILABLE"),
            name="q",
            max_pending=self.max_pending,
            max_attempts=self.max_attempts,
            backoff=lambda state: self.wait(
                state.attempt_number,
                state.seconds_since_start,
                state.idle_for,
                state.outcome.exception(),
            ),
            stop=stops[self.stop],
            overflow=self.overflow,
            dead_letter=(lambda failed: failed) if self.has_hook else None,
            rate=self.rate,
            max_in_flight=self.max_in_flight,
        )


RULES = {
    "max_pending": [1, 3, 6, 6],
    "max_attempts": [1, 2, 2, 3, 3, 4, None],
    "wait_s": [0.0, 0.001, 2.0, 5.0],
    "stop": [None, None, "before", "after"],
    "stop_s": [4.0, 10.0],
    "overflow": ["raise", "drop"],
    "has_hook": [False, True],
    "rate": [None, None, 2.0],
    "max_in_flight": [None, None, 1],
}
"""The settings among which a run chooses."""


class Reference:
    """A queue in plain lists. Its methods return what those of the queue return."""

    def __init__(self, rules):
        self.rules = rules
        self.now = 0
        self.calls = []  # the queued calls, the oldest first
        self.hooks = []  # calls whose hook runs
        self.late = []  # calls that have ended during an attempt, which may still report
        self.pacings = {place: Pacing(rules.rate, rules.max_in_flight) for place in PLACES}
        self.ready = {place: [] for place in PLACES}  # calls that are due
        self.wakes = dict.fromkeys(PLACES, NEVER)  # when the pacing allows the next one
        self.timeouts = []  # when, a number, and the call, or the place whose calls are ready
        self.numbers = itertools.count()
        self.closes_at = None
        self.to_return = []  # what `close` returns of calls that have ended before
        self.begun, self.events, self.counts = [], [], Counter()

    def in_state(self, *states):
        return [call for call in self.calls if call.state in states]

    # Time

    def set_timeout(self, at, what):
        self.timeouts.append((at, next(self.numbers), what))

    def cancel_timeout(self, call):
        self.timeouts = [timeout for timeout in self.timeouts if timeout[2] is not call]

    def advance(self, until):
        while self.timeouts and min(self.timeouts)[0] <= until:
            timeout = at, _, what = min(self.timeouts)
            self.timeouts.remove(timeout)
            self.now = max(self.now, at)
            if isinstance(what, Call):
                self.is_due(what)
            else:
                self.wakes[what] = NEVER
                self.begin_ready(what)
        self.now = until

    def is_due(self, call):
        if call not in self.ready[call.place]:
            self.ready[call.place].append(call)
            self.begin_ready(call.place)

    def begin_ready(self, place):
        """Begin the attempts that the pacing allows now."""
        while self.ready[place]:
            at = self.pacings[place].next_ns(self.now)
            if at > self.now:
                if at < min(NEVER, self.wakes[place]):
                    self.wakes[place] = at
                    self.set_timeout(at, place)
                return
            call = self.ready[place].pop(0)
            self.cancel_timeout(call)
            timeout = NEVER if place == "function" else to_ns(TIMEOUT_S)
            self.pacings[place].began(self.now, timeout)
            call.state, call.began, call.has_retried = RUNNING, self.now, True
            call.attempts += 1
            call.idle += self.now - call.waiting_since
            self.counts["attempts"] += 1
            self.begun.append(call)

    # What follows a failure

    def decide(self, call, failure):
        """The time until the next attempt, or why there is none."""
        if not (failure.is_named or (failure.is_repeated and call.has_retried)):
            return failure.reason
        elapsed_s = (self.now - call.started) / 1e9
        wait_s = self.rules.wait(call.attempts, elapsed_s, call.idle / 1e9, failure.error)
        wait = max(to_ns(wait_s), failure.least or 0)
        is_counted = failure.least is None or not call.has_retried
        most = self.rules.max_attempts if is_counted else None
        is_over = most is not None and call.attempts >= most
        if is_over or self.rules.stops(elapsed_s, wait / 1e9):
            if self.closes_at is None or not call.has_retried:
                return NO_ATTEMPTS
            wait = max(wait, MIN_WAIT)
        if self.closes_at is not None:
            wait = min(wait, max((self.closes_at - self.now) // 2, MIN_WAIT))
        return wait

    def wait_again(self, call, wait):
        call.state, call.waiting_since, call.due = WAITING, self.now, self.now + wait
        self.set_timeout(call.due, call)

    def add(self, call, failure):
        """A first attempt has failed; an exception is raised."""
        pending, wait = len(self.calls), self.decide(call, failure)
        self.counts["calls"] += 1
        if isinstance(wait, str):
            self.counts["failed"] += 1
            return None
        is_full = pending >= self.rules.max_pending
        if is_full and self.closes_at is None and self.rules.overflow == "drop":
            self.counts["dropped"] += 1
            self.events.append(FailbackDropped("q", call.name, call.error, pending))
            return "dropped"
        if is_full or self.closes_at is not None:
            self.counts["rejected"] += 1
            full = (
                f"max_pending ({pending}) calls are queued already; raise max_pending, or drop "
                'such calls with overflow="drop"'
            )
            kind, why = (FailbackFull, full) if self.closes_at is None else (FailbackClosed, CLOSED)
            self.events.append(FailbackRejected("q", call.name, call.error, why))
            return kind(f"q: {call.name} failed and was not queued, because {why}")
        self.counts["queued_total"] += 1
        self.calls.append(call)
        self.wait_again(call, wait)
        self.events.append(FailbackQueued("q", call.name, call.error, wait / 1e9, pending + 1))
        return "queued"

    # The ends of attempts and calls

    def end_attempt(self, call, outcome):
        self.pacings[call.place].ended(call.began, self.now, outcome)
        self.begin_ready(call.place)

    def end(self, call, counter, reason=None):
        """End a call; `close` returns it if there is a reason."""
        if reason is not None and self.closes_at is not None:
            self.to_return.append(call.failed_call(self.now, reason))
        if call in self.calls:
            self.calls.remove(call)
            self.cancel_timeout(call)
            if call in self.ready[call.place]:
                self.ready[call.place].remove(call)
            self.counts[counter] += 1
        call.state = DONE

    def fail(self, call, failure):
        """What the hook gets, if the call is given up; otherwise None."""
        call.attempts -= failure.least is not None
        wait, waited_s = self.decide(call, failure), (self.now - call.started) / 1e9
        attempt = "q", call.name, call.attempts, waited_s, failure.error
        call.error, outcome, failed = failure.error, failure.outcome, None
        if isinstance(wait, int):
            self.wait_again(call, wait)
            self.events.append(FailbackAttemptFailed(*attempt, wait / 1e9))
        else:
            outcome = outcome if wait == NO_ATTEMPTS else Outcome.UNKNOWN
            self.events.append(FailbackGaveUp(*attempt, wait))
            if self.rules.has_hook:
                failed = call.failed_call(self.now, wait)
                call.state = ENDING
                self.hooks.append(call)
            else:
                self.end(call, "gave_up", wait)
        self.end_attempt(call, outcome)
        return failed

    def end_hook(self, call, error):
        self.hooks.remove(call)
        if error is not None:
            self.events.append(DeadLetterFailed("q", call.name, error))
        self.end(call, "gave_up")

    def succeed(self, call):
        waited_s = (self.now - call.started) / 1e9
        self.events.append(FailbackDelivered("q", call.name, call.attempts, waited_s))
        self.end(call, "redelivered")
        self.end_attempt(call, Outcome.DELIVERED)

    def lose(self, call):
        self.report_lost([call], LOOP_CLOSED)
        self.end(call, "lost", LOOP_CLOSED)
        self.late.append(call)
        self.end_attempt(call, Outcome.UNKNOWN)

    def report_lost(self, calls, reason):
        lost = [call.failed_call(self.now, reason) for call in calls]
        if lost:
            names = tuple(dict.fromkeys(call.function for call in lost))
            oldest_s = max(call.waited_s for call in lost)
            self.events.append(FailbackLost("q", names, len(lost), oldest_s, reason))
        return lost

    # All calls

    def flush(self):
        for call in self.in_state(WAITING):
            self.is_due(call)

    def close(self, drain):
        self.closes_at = self.now + drain
        if drain:
            self.flush()

    def end_close(self, reason):
        during = f"{reason}, during an attempt, which may still succeed"
        lost = self.report_lost(self.in_state(WAITING), reason)
        lost += self.report_lost(self.in_state(RUNNING), during)
        self.late += self.in_state(RUNNING)
        returned, self.to_return = self.to_return + lost, []
        for call in list(self.calls):
            self.end(call, "gave_up" if call.state is ENDING else "lost")
        return returned


class Driver:
    """A queue and its reference, to which the same happens."""

    def __init__(self, rules):
        self.rules = rules
        self.begin()
        add_sink(self.record)

    def begin(self):
        """Begin with an empty queue."""
        self.timer = ManualTimer(DeadlineHeap())
        self.reference = Reference(self.rules)
        self.queue = FailbackQueue(self.rules.policy(), self.timer)
        self.channels = {"channel": ChannelKey(), "other channel": ChannelKey()}
        self.attempts = {}  # the last one of each call
        self.begun, self.events = [], []
        self.waiters = []

    def record(self, event):
        if getattr(event, "name", None) == "q":
            self.events.append(event)

    def close(self):
        remove_sink(self.record)
        self.queue.end_close()
        self.timer.stop()

    def start(self, attempt):
        """An attempt begins."""
        (number,) = attempt.call.saved.args
        self.attempts[number] = attempt
        self.begun.append(number)

    # Steps

    def first_attempt_fails(self, failure, took_s, place):
        started = self.reference.now - to_ns(took_s)
        call = Call(next(self.reference.numbers), place, started, failure.error)
        channel = self.channels.get(place)
        function = push if channel is None else KeptDelivery(call.name, channel, TIMEOUT_S)
        saved = SavedCall.save(function, (call.number,), {})
        queued = QueuedCall(saved, failure.error, started, self.start)
        result = self.reference.add(call, failure)
        if not isinstance(result, Exception):
            assert self.queue.enqueue(queued) == result
            return
        with pytest.raises(type(result)) as raised:
            self.queue.enqueue(queued)
        assert str(raised.value) == str(result)
        assert raised.value.__cause__ is failure.error

    def running(self):
        """The calls with an attempt; if there is none, the waiting calls are flushed."""
        if not self.reference.in_state(RUNNING):
            self.flush()
        return self.reference.in_state(RUNNING)

    def one_running(self, which):
        running = self.running()
        return running and [running[which % len(running)]]

    def attempt_fails(self, which, failure):
        for call in self.one_running(which):
            self.fail(call, failure)

    def all_attempts_fail(self, failure):
        for call in self.running():
            self.fail(call, failure)

    def fail(self, call, failure):
        failed = self.reference.fail(call, failure)
        hook = self.attempts[call.number].failed(failure.error)
        assert (None if hook is None else hook()) == failed

    def attempt_succeeds(self, which):
        for call in self.one_running(which):
            self.reference.succeed(call)
            self.attempts[call.number].succeeded()

    def loop_is_closed(self, which):
        for call in self.one_running(which):
            self.reference.lose(call)
            self.attempts[call.number].lost(LOOP_CLOSED)

    def hook_ends(self, error):
        for call in self.reference.hooks[:1]:
            self.reference.end_hook(call, error)
            is_interrupted = isinstance(error, KeyboardInterrupt)
            expected = pytest.raises(KeyboardInterrupt) if is_interrupted else nullcontext()
            with expected, self.attempts[call.number].dead_letter():
                Mock(side_effect=error)()

    def time_passes(self, seconds):
        self.reference.advance(self.reference.now + to_ns(seconds))
        self.timer.advance(seconds)

    def next_timeout_expires(self):
        if self.reference.timeouts:
            at = min(self.reference.timeouts)[0]
            self.time_passes(max(0, at - self.reference.now) / 1e9)

    def flush(self):
        self.reference.flush()
        assert self.queue.begin_flush(None) == math.inf

    def end(self, drain_s):
        """Close the queue, without `close` if the process ends; or end the drain."""
        if self.reference.closes_at is not None:
            assert self.queue.end_close() == self.reference.end_close("closed")
        elif drain_s is None:
            self.reference.close(0)
            self.reference.end_close("the program ended before close()")
            self.queue.end_at_exit()
        else:
            self.reference.close(to_ns(drain_s))
            assert self.queue.begin_close(drain_s) == drain_s
            assert self.queue.begin_close(60) is None

    def follow(self):
        """After the end of the queue attempts and hooks may still end. Begin with another queue."""
        self.first_attempt_fails(GONE, 0, "function")
        for is_delivered, call in zip(itertools.cycle([True, False]), self.reference.late):
            attempt = self.attempts[call.number]
            if is_delivered:  # it is worth an event, though the call is counted already
                waited_s = (self.reference.now - call.started) / 1e9
                event = FailbackDelivered("q", call.name, call.attempts, waited_s)
                self.reference.events.append(event)
                attempt.succeeded()
            else:
                assert attempt.failed(GONE.error) is None
                attempt.lost(LOOP_CLOSED)
        while self.reference.hooks:
            self.hook_ends(None)
        assert self.queue.end_close() == self.reference.end_close("closed")
        self.check()
        self.begin()

    def check(self):
        queue, reference = self.queue, self.reference
        assert self.begun == [call.number for call in reference.begun]
        assert self.events == reference.events
        for record in (self.begun, self.events, reference.begun, reference.events):
            record.clear()
        assert queue.stats() == FailbackStats(**reference.counts, pending=len(reference.calls))
        assert queue.entries() == [self.entry(call) for call in reference.calls]
        assert self.timer.pending == len(reference.timeouts)
        is_empty = not reference.calls
        assert {waiter.done() for waiter in self.waiters} <= {is_empty}
        self.waiters = [] if is_empty else [*self.waiters, queue.calls.when_empty()]
        queue.calls.when_empty().cancel()

    def entry(self, call):
        now = self.reference.now
        next_s = max(0, call.due - now) / 1e9 if call.state is WAITING else None
        return QueueEntry(call.name, (now - call.started) / 1e9, call.attempts, next_s, call.error)


STEPS = {
    Driver.next_timeout_expires: [],
    Driver.first_attempt_fails: [[*[GONE] * 20, *FAILURES], [0, 0, 3], [*PLACES]],
    Driver.attempt_fails: [range(3), FAILURES],
    Driver.all_attempts_fail: [FAILURES],
    Driver.attempt_succeeds: [range(3)],
    Driver.loop_is_closed: [range(3)],
    Driver.hook_ends: [[None, ValueError("no disk"), KeyboardInterrupt()]],
    Driver.time_passes: [[0.0, 0.02, 1.0, 2.5, 12.0]],
    Driver.flush: [],
    Driver.end: [[None, 0.0, 0.01, 8.0, 8.0, 100.0]],
}
"""What happens, with the values of the arguments."""

WEIGHTS = [6, 10, 4, 2, 2, 1, 2, 2, 1, 1]


@settings(max_examples=settings.default.max_examples * 2 // 5)
@given(seed=st.integers(0, 2**32))
def test_a_queue_does_what_the_reference_does(seed):
    """Random steps, of which a state machine of Hypothesis would leave out half in each example."""
    random = Random(seed)
    rules = Rules(**{name: random.choice(values) for name, values in RULES.items()})
    with closing(Driver(rules)) as driver:
        for method in random.choices([*STEPS], WEIGHTS, k=60):
            arguments = [random.choice(values) for values in STEPS[method]]
            note(f"{method.__name__}{(*arguments,)}")
            method(driver, *arguments)
            driver.check()
            if driver.reference.closes_at is not None and not driver.reference.calls:
                driver.follow()
