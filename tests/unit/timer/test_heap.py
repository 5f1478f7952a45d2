"""`DeadlineHeap`: the clean-up of dead entries, and switches to another thread at given moments.

Only the pure form can be interrupted by a test; the compiled form has the same source.
"""

from __future__ import annotations

import itertools
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from fixtures.waiting import WAIT_S
from rpcwheel.timer import _heap
from rpcwheel.timer.queue import load_form

PURE = load_form("pure")
MS = 1_000_000
NEVER = (1 << 63) - 1


@pytest.fixture
def queue() -> Any:
    return PURE.DeadlineHeap()


def start(queue: Any, at_ms: int) -> Any:
    """Start a timeout; the clock is at 0."""
    timeout = PURE.Timeout()
    timeout._task = print
    timeout._deadline_ns = at_ms * MS
    timeout._timer_state = PURE.TimerState(queue, lambda: None, True)
    assert queue.schedule(timeout)
    return timeout


def size(queue: Any) -> int:
    return len(queue._entries) + len(queue._old)


def clean_up_all(queue: Any) -> None:
    """Look at each entry at least once."""
    for _ in range(2 + 2 * size(queue) // _heap.STEPS):
        queue._clean_up()
    queue.check()


def interrupt_add(queue: Any, function: Callable[[], object]) -> None:
    """Call a function in the middle of the next `_add`."""

    def numbers() -> Iterator[int]:
        queue._numbers = itertools.count(1000)
        function()
        queue._numbers = itertools.count(3000)
        yield 2000

    queue._numbers = numbers()


@pytest.mark.skipif(not hasattr(signal, "SIGVTALRM"), reason="no such signals here")
def test_timeouts_started_by_signals_during_the_clean_up_do_not_start_it_without_end(
    queue: Any,
) -> None:
    for at in range(20_000):
        start(queue, 500 + at)
    before = signal.signal(signal.SIGVTALRM, lambda *_: start(queue, 2000).cancel())
    signal.setitimer(signal.ITIMER_VIRTUAL, 0.001, 0.001)
    try:
        for _ in range(40_000):
            start(queue, 3000).cancel()
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
    queue.check()
    assert len(queue) == 20_000


@pytest.mark.parametrize("call", ["start", "pop", "next_wake"])
def test_one_call_removes_a_bounded_number_of_entries(queue: Any, call: str) -> None:
    timeouts = [start(queue, at) for at in range(1500)]
    for timeout in timeouts[:1350]:
        timeout.cancel()
    calls = {
        "start": lambda: start(queue, 9000),
        "pop": lambda: queue.pop(1349 * MS),
        "next_wake": queue.next_wake,
    }
    for _ in range(1800 // _heap.STEPS):
        before = size(queue)
        calls[call]()
        assert before - size(queue) <= _heap.STEPS
        queue.check()
    assert size(queue) < 2 * len(queue) + _heap.EXTRA + _heap.STEPS
    assert queue.advance(1350 * MS) == timeouts[1350:1351]


def test_started_and_cancelled_timeouts_in_the_far_future_do_not_accumulate(queue: Any) -> None:
    for at in range(500):
        start(queue, 10**6 + at)
    for at in range(20_000):
        start(queue, 10**7 + at).cancel()
        assert size(queue) <= 2.2 * 501 + 100
    queue.check()


def test_entries_of_rescheduled_timeouts_do_not_accumulate(queue: Any) -> None:
    timeouts = [start(queue, 10**6) for _ in range(10)]
    for step in range(2000):
        for timeout in timeouts:
            for deadline_ns in (NEVER, (10**6 - step) * MS, 10**7 * MS, 10**6 * MS):
                assert queue.reschedule(timeout, deadline_ns)
        assert size(queue) <= 2.2 * 10 + 100
    queue.check()
    assert len(queue.advance(10**6 * MS)) == 10
    clean_up_all(queue)
    assert size(queue) == 0


@pytest.mark.parametrize("call", ["pop", "next_wake"])
def test_dead_entries_of_a_rescheduled_timeout_are_removed_from_the_head(
    queue: Any, call: str
) -> None:
    timeout = start(queue, 200)
    for deadline in (100, 300, 250):
        queue.reschedule(timeout, deadline * MS)
    assert size(queue) == 3
    if call == "pop":
        assert queue.pop(249 * MS) is None
        assert size(queue) == 1
    assert queue.next_wake() == 250 * MS
    assert size(queue) == 1


def test_timeouts_expire_in_order_while_the_heap_is_cleaned_up(queue: Any) -> None:
    kept = [start(queue, at) for at in range(300, 0, -1)]
    fired = []
    for now in range(1, 301):
        queue._clean_up()
        assert queue.next_wake() == now * MS
        fired += queue.advance(now * MS)
        assert fired == kept[: -now - 1 : -1]
        queue.check()


@pytest.mark.parametrize("deadlines", [(40, 20), (40, 100), (90, 110)])
def test_the_last_of_two_concurrent_reschedules_counts(
    queue: Any, deadlines: tuple[int, int]
) -> None:
    first, second = deadlines
    timeout = start(queue, 200)
    assert queue.reschedule(timeout, 120 * MS)
    assert queue.reschedule(timeout, 130 * MS)  # a write
    interrupt_add(queue, lambda: queue.reschedule(timeout, second * MS))
    assert queue.reschedule(timeout, first * MS)
    clean_up_all(queue)
    assert queue.advance((second - 1) * MS) == []
    assert queue.next_wake() <= second * MS
    assert queue.advance(second * MS) == [timeout]


def test_a_timeout_rescheduled_earlier_while_its_entry_is_replaced_is_found(queue: Any) -> None:
    timeout = start(queue, 20)
    assert queue.reschedule(timeout, 90 * MS)  # a write: its entry is still at 20
    interrupt_add(queue, lambda: queue.reschedule(timeout, 40 * MS))
    assert queue.pop(20 * MS) is None
    clean_up_all(queue)
    assert queue.next_wake() == 40 * MS
    assert queue.advance(50 * MS) == [timeout]


def interrupt_after_call(
    number: int, work: Callable[[], object], other: Callable[[], object]
) -> bool:
    """Run `work`, and `other` after a given number of calls in it; False if it makes fewer."""
    left = [number]

    def after(frame: Any, event: str, _: object) -> None:
        if event in {"c_return", "return"} and "timer" in frame.f_code.co_filename:
            left[0] -= 1
            if left[0] == 0:
                other()

    sys.setprofile(after)
    try:
        work()
    finally:
        sys.setprofile(None)
    return left[0] <= 0


ANY_THREAD = ["start", "earlier", "later", "cancel", "clean up"]
TIMER = ["next_wake", "pop", "drain"]  # only the timer calls them, one at a time


@pytest.mark.parametrize(
    ("work", "other"),
    [
        (work, other)
        for work in [*ANY_THREAD, *TIMER]
        for other in [*ANY_THREAD, *TIMER]
        if not (work in TIMER and other in TIMER)
        and (work, other) != ("drain", "start")  # the timer closes the queue before
    ],
)
def test_no_timeout_is_lost_wherever_threads_switch(work: str, other: str) -> None:
    """CPython switches threads only after a call; here it does so after each call in turn."""
    for number in itertools.count(1):
        queue = PURE.DeadlineHeap()
        for at in range(40):
            start(queue, 30 + at).cancel()
        timeouts = [start(queue, at) for at in (90, 50, 20, 10)]
        for _ in range(2):
            queue._clean_up()
        assert queue._old
        ended: list[Any] = []
        calls = calls_on(queue, timeouts, ended)
        if not interrupt_after_call(number, calls[work], calls[other]):
            assert number > 1
            return
        queue.check()
        ended += queue.advance(100 * MS)
        assert set(ended) == set(timeouts), f"after call {number}"
        assert len(ended) == len(timeouts), f"after call {number}"
        deadlines = [timeout.deadline for timeout in ended]
        assert deadlines == sorted(deadlines) or "drain" in {work, other}


def calls_on(queue: Any, timeouts: list[Any], ended: list[Any]) -> dict[str, Callable[[], object]]:
    chosen = timeouts[1]  # at 50 ms
    return {
        "start": lambda: timeouts.append(start(queue, 40)),
        "earlier": lambda: queue.reschedule(chosen, 12 * MS),
        "later": lambda: queue.reschedule(chosen, 60 * MS),
        "cancel": lambda: chosen.cancel() and timeouts.remove(chosen),
        "clean up": lambda: [queue._clean_up() for _ in range(8)],
        "next_wake": queue.next_wake,
        "pop": lambda: ended.extend(queue.advance(15 * MS)),
        "drain": lambda: ended.extend(queue.drain()),
    }


@pytest.mark.parametrize("added", ["rescheduled", "new"])
def test_an_entry_added_while_the_next_wakeup_is_computed_is_seen(
    monkeypatch: pytest.MonkeyPatch, added: str
) -> None:
    """The timer reads the heap before the entry is added, and ends its computation afterwards."""
    read, is_added = threading.Event(), threading.Event()

    class Heap(PURE.DeadlineHeap):  # type: ignore[name-defined,misc]
        def next_wake(self) -> int:
            wake_ns: int = super().next_wake()
            if not read.is_set():
                read.set()
                is_added.wait(WAIT_S)
            return wake_ns

    queue = Heap()
    state = PURE.TimerState(queue, object, manual=True)
    timeout = start(queue, 5000)
    timer = threading.Thread(target=state.arm)
    push = _heap.heappush

    def push_after_the_reading(heap: list[Any], entry: Any) -> None:
        if not read.is_set():
            timer.start()
            assert read.wait(WAIT_S)
        push(heap, entry)

    monkeypatch.setattr(_heap, "heappush", push_after_the_reading)
    if added == "new":
        start(queue, 20)
    else:
        assert queue.reschedule(timeout, 20 * MS)
    is_added.set()
    timer.join(WAIT_S)
    assert state.armed_ns == 20 * MS
