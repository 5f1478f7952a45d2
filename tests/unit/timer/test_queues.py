"""Model-based tests of all queues, in both forms.

The model is a dict and `min()`. All queues get the same operations. Each has its own model, since
the position of a rescheduled timeout within its tick is not defined. Times are chosen near the
limits of slots and levels.
"""

from __future__ import annotations

import contextlib
import weakref
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule

from fixtures.leaks import no_garbage_collector
from fixtures.timers import make_timeout
from rpcwheel.durations import MAX_NS, NEVER
from rpcwheel.timer.queue import Form, load_form


def forms() -> list[Form]:
    """The pure form, and the native one if it was built."""
    found = [load_form("pure")]
    with contextlib.suppress(ImportError):
        found.append(load_form("native"))
    return found


FORMS = forms()
KINDS = ("HierarchicalWheel", "SparseWheel", "HashedWheel", "DeadlineHeap")


def make_queue(form: Form, kind: str, tick_ns: int = 1_000_000, slots: int = 8) -> Any:
    """Make a queue. The tick of a heap is always a nanosecond."""
    if kind == "DeadlineHeap":
        return form.DeadlineHeap()
    tick = tick_ns / 1e9
    if kind == "HashedWheel":
        return form.HashedWheel(tick, slots)
    return getattr(form, kind)(tick)


@dataclass(eq=False)
class Entry:
    """One timeout in the model of one queue."""

    timeout: Any
    deadline_ns: int
    number: int
    put_off: bool = False
    state: str = "pending"


@dataclass
class Subject:
    """A queue and its model."""

    form: Form
    kind: str
    queue: Any
    tick_ns: int
    cursor: int = 0
    entries: list[Entry] = field(default_factory=list)

    def key(self, entry: Entry) -> int:
        """The tick at which an entry is due, at the earliest now."""
        if entry.deadline_ns == NEVER:
            return NEVER
        return max(-(-entry.deadline_ns // self.tick_ns), self.cursor)

    def pending(self) -> list[Entry]:
        return [entry for entry in self.entries if entry.state == "pending"]

    def fired(self, entry: Entry, target: int) -> None:
        """Check that this timeout was due next, and note that it fired."""
        pending = self.pending()
        assert entry in pending, f"{self}: fired twice, or after a cancel"
        key = self.key(entry)
        assert key <= target, "early"
        assert key == min(map(self.key, pending)), "out of order"
        if not entry.put_off:
            earlier = [e for e in pending if self.key(e) == key and e.number < entry.number]
            assert all(e.put_off for e in earlier), "not first in, first out"
        entry.state = "expired"
        assert entry.timeout.expired()

    def advance(self, now_ns: int, limit: int) -> None:
        target = now_ns // self.tick_ns
        by_id = {id(entry.timeout): entry for entry in self.entries}
        due = self.queue.advance(now_ns, limit)
        assert len(due) <= limit
        for timeout in due:
            entry = by_id[id(timeout)]
            self.fired(entry, target)
            self.cursor = max(self.cursor, self.key(entry))
        if len(due) < limit:
            self.cursor = max(self.cursor, target)
            left = [e for e in self.pending() if self.key(e) <= target]
            assert not left, f"late: {left}"
            assert self.queue.next_wake() > now_ns or not self.pending()


TICKS = [1, 1_000, 1_000_000, 100_000_000]
ORIGINS = [0, 12_345, 200 * 86_400 * 10**9 + 1, 2**53 - 1, 2**53 + 1, 2**60 + 7]
edge_ticks = st.one_of(
    st.integers(-2, 130),
    st.builds(
        lambda k, level, off: k * 64**level + off,
        st.integers(1, 65),
        st.integers(0, 6),
        st.sampled_from([-1, 0, 1]),
    ),
    st.builds(lambda k, off: k * 8 + off, st.integers(0, 40), st.sampled_from([-1, 0, 1])),
    st.sampled_from([2**30 - 10, 2**30, 2**36 - 1, 2**36, 2**36 + 1, 2**53 - 1, 2**53 + 1]),
)
delays = st.tuples(edge_ticks, st.sampled_from([-1, 0, 1]))


class Queues(RuleBasedStateMachine):
    """Eight queues (four without a compiler) with the same operations."""

    timeouts = Bundle("timeouts")

    @initialize(
        tick_ns=st.sampled_from(TICKS),
        origin=st.sampled_from(ORIGINS),
        slots=st.sampled_from([1, 4, 8, 64, 100]),
    )
    def start(self, tick_ns: int, origin: int, slots: int) -> None:
        kinds = KINDS if tick_ns == 1 else KINDS[:3]
        self.now = origin
        self.tick_ns = tick_ns
        self.count = 0
        self.subjects = [
            Subject(form, kind, make_queue(form, kind, tick_ns, slots), tick_ns)
            for form in FORMS
            for kind in kinds
        ]
        for subject in self.subjects:
            subject.advance(origin, NEVER)

    def add(self, deadline_ns: int) -> int:
        for subject in self.subjects:
            timeout = make_timeout(subject.form, subject.queue, deadline_ns)
            assert subject.queue.schedule(timeout)
            subject.entries.append(Entry(timeout, deadline_ns, self.count))
        self.count += 1
        return self.count - 1

    def at(self, delay: tuple[int, int]) -> int:
        ticks, offset = delay
        return max(0, min(self.now + ticks * self.tick_ns + offset, MAX_NS))

    @rule(target=timeouts, delay=delays)
    def schedule(self, delay: tuple[int, int]) -> int:
        return self.add(self.at(delay))

    @rule(target=timeouts, deadline=st.sampled_from([0, 1, MAX_NS - 1, MAX_NS, NEVER]))
    def schedule_extreme(self, deadline: int) -> int:
        return self.add(deadline)

    @rule(number=timeouts)
    def cancel(self, number: int) -> None:
        for subject in self.subjects:
            entry = subject.entries[number]
            won = entry.timeout.cancel()
            assert won == (entry.state == "pending")
            assert entry.timeout.task is None or not won
            if won:
                entry.state = "cancelled"
                assert entry.timeout.cancelled()

    @rule(number=timeouts, delay=st.one_of(delays, st.none()))
    def reschedule(self, number: int, delay: tuple[int, int] | None) -> None:
        deadline_ns = NEVER if delay is None else self.at(delay)
        for subject in self.subjects:
            entry = subject.entries[number]
            won = subject.queue.reschedule(entry.timeout, deadline_ns)
            assert won == (entry.state == "pending")
            if won:
                entry.deadline_ns, entry.put_off = deadline_ns, True

    @rule(delay=delays, limit=st.sampled_from([0, 1, 2, 3, NEVER, NEVER]))
    def advance(self, delay: tuple[int, int], limit: int) -> None:
        self.now = max(self.now, self.at(delay))
        for subject in self.subjects:
            subject.advance(self.now, limit)

    @rule()
    def advance_to_the_next_wake(self) -> None:
        wake = min(subject.queue.next_wake() for subject in self.subjects)
        if wake <= MAX_NS:
            self.now = max(self.now, wake)
            for subject in self.subjects:
                subject.advance(self.now, NEVER)

    @rule(back=st.integers(1, 10**12))
    def go_back_in_time(self, back: int) -> None:
        earlier = max(0, self.now - back)
        for subject in self.subjects:
            if earlier // self.tick_ns < subject.cursor:
                assert subject.queue.advance(earlier) == []

    @rule()
    def drain(self) -> None:
        for subject in self.subjects:
            drained = subject.queue.drain()
            pending = subject.pending()
            assert {id(t) for t in drained} == {id(e.timeout) for e in pending}
            deadlines = [t._deadline_ns for t in drained]
            assert deadlines == sorted(deadlines)
            assert all(t.cancelled() and t.task is print for t in drained)
            for entry in pending:
                entry.state = "cancelled"

    @invariant()
    def agrees(self) -> None:
        for subject in self.subjects:
            subject.queue.check()
            pending = subject.pending()
            assert len(subject.queue) == len(pending)
            assert not any(e.timeout.cancelled() or e.timeout.expired() for e in pending)
            finite = [subject.key(e) for e in pending if e.deadline_ns != NEVER]
            wake = subject.queue.next_wake()
            assert wake <= min(finite, default=NEVER) * subject.tick_ns
            assert finite or any(e.put_off for e in pending) or wake == NEVER


TestQueues = Queues.TestCase
TestQueues.settings = settings(
    max_examples=150,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@pytest.fixture(params=[(f, k) for f in FORMS for k in KINDS], ids=lambda p: f"{p[0].name}-{p[1]}")
def made(request: pytest.FixtureRequest) -> tuple[Form, Any]:
    """Each queue in each form, with ticks of a millisecond (the heap: a nanosecond)."""
    form, kind = request.param
    return form, make_queue(form, kind)


def put(form: Form, queue: Any, *deadlines_ns: int) -> list[Any]:
    timeouts = [make_timeout(form, queue, deadline_ns) for deadline_ns in deadlines_ns]
    assert all(queue.schedule(timeout) for timeout in timeouts)
    return timeouts


def test_next_wake_is_exact_after_a_timeout_in_the_far_future(made: tuple[Form, Any]) -> None:
    form, queue = made  # as in tokio 8334, where a slot of the top level hid earlier timeouts
    millisecond = 10**6
    now = (2**30 - 10) * millisecond
    queue.advance(now)
    far, near = put(form, queue, MAX_NS, now + 15 * millisecond)
    assert queue.next_wake() == now + 15 * millisecond
    assert queue.advance(now + 15 * millisecond) == [near]
    assert not far.expired()


def test_the_cost_of_a_long_wait_does_not_depend_on_the_ticks(made: tuple[Form, Any]) -> None:
    form, queue = made
    queue.advance(10**18)
    timeouts = put(form, queue, *(10**18 + i * 10**9 for i in range(50)))
    assert (
        queue.advance(10**18 + 315 * 10**15) == timeouts
    )  # a loop over all ticks would take hours


def test_a_cancelled_timeout_releases_its_task_without_the_garbage_collector(
    made: tuple[Form, Any],
) -> None:
    form, queue = made

    class Task:
        def __call__(self, timeout: object) -> None: ...

    with no_garbage_collector():
        task = Task()
        gone = weakref.ref(task)
        timeout = make_timeout(form, queue, 10**9, task)
        queue.schedule(timeout)
        del task
        assert gone() is not None
        assert timeout.cancel()
        assert gone() is None


def test_a_finalizer_may_schedule_while_its_task_is_released(made: tuple[Form, Any]) -> None:
    form, queue = made

    class Task:
        def __del__(self) -> None:
            put(form, queue, 2 * 10**9)

    timeouts = [make_timeout(form, queue, 10**9 + i, Task()) for i in range(100)]
    for timeout in timeouts:
        queue.schedule(timeout)
    for timeout in timeouts:
        assert timeout.cancel()
        queue.check()
    assert len(queue) == 100


def test_a_timeout_due_at_once_does_not_wait_for_those_of_later_rounds(
    made: tuple[Form, Any],
) -> None:
    form, queue = made
    put(form, queue, 2 * 10**6, *([10 * 10**6] * 1_000))  # one slot of a `HashedWheel` with 8
    queue.advance(2 * 10**6)
    (due,) = put(form, queue, 10**6)
    assert queue.pop(2 * 10**6) is due


def test_slots_of_cancelled_timeouts_are_removed(made: tuple[Form, Any]) -> None:
    form, queue = made
    for start, at_once in ((10, 1), (10_000, 2_000), (20_000, 1)):
        for first in range(start, start + 4_000, at_once):
            deadlines = ((first + index) * 10**6 for index in range(at_once))
            for timeout in put(form, queue, *deadlines):
                timeout.cancel()
        queue.check()
        if at_once == 1:
            kept = len(getattr(queue, "_by_tick", ())) + len(getattr(queue, "_entries", ()))
            assert kept < 200
        if start == 10:
            assert len(getattr(queue, "_tick_of", ())) < 200
