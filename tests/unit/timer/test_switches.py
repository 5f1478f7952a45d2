"""No timeout is lost, late or out of order, wherever CPython switches to another thread.

It switches threads only after a call. Here each operation on a queue is interrupted by another one
after each of its calls in turn, by a profile function, in queues in several states. Only the pure
form can be interrupted by a test; the compiled form has the same source.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from typing import Any

import pytest

from rpcwheel.timer.queue import load_form

PURE = load_form("pure")
MS = 1_000_000
NEVER = (1 << 63) - 1
QUEUES: dict[str, Callable[[], Any]] = {
    "hierarchical": lambda: PURE.HierarchicalWheel(0.001),
    "sparse": lambda: PURE.SparseWheel(0.001),
    "hashed": lambda: PURE.HashedWheel(0.001, slots=4),
    "heap": PURE.DeadlineHeap,
}


class Queue:
    """A queue, its timeouts that have not been cancelled, and those that it has returned."""

    def __init__(self, kind: str) -> None:
        self.queue = QUEUES[kind]()
        self.timeouts: list[Any] = []
        self.ended: list[Any] = []
        self.now_ms = 0

    def start(self, at_ms: int) -> Any:
        timeout = PURE.Timeout()
        timeout._task = print
        timeout._deadline_ns = at_ms * MS
        timeout._timer_state = PURE.TimerState(self.queue, lambda: None, True)
        assert self.queue.schedule(timeout)
        self.timeouts.append(timeout)
        return timeout

    def start_and_cancel(self, at_ms: int) -> None:
        self.cancel(self.start(at_ms))

    def cancel(self, timeout: Any) -> None:
        if timeout.cancel():
            self.timeouts.remove(timeout)

    def clean_up(self, times: int = 8) -> None:
        """Only the heap has a clean-up."""
        for _ in range(times):
            getattr(self.queue, "_clean_up", int)()

    def drain(self) -> None:
        self.ended += self.queue.drain()

    def advance(self, now_ms: int) -> None:
        self.now_ms = max(self.now_ms, now_ms)
        self.ended += self.queue.advance(now_ms * MS)


def few(queue: Queue) -> Any:
    queue.start(70)
    return queue.start(20)


def many(queue: Queue) -> Any:
    """With entries of timeouts that were cancelled, and of one that was rescheduled."""
    for at in range(40 if hasattr(queue.queue, "_clean_up") else 5):
        queue.start_and_cancel(30 + at)
    chosen, *_ = [queue.start(at) for at in (50, 90, 20, 10, 50)]
    assert queue.queue.reschedule(queue.start(15), 45 * MS)
    queue.clean_up(times=2)
    assert getattr(queue.queue, "_old", True)  # the clean-up of the heap has begun
    return chosen


def rescheduled(queue: Queue) -> Any:
    chosen = queue.start(20)
    for at in (12, 90, 50):
        assert queue.queue.reschedule(chosen, at * MS)
    return chosen


def in_a_visit(queue: Queue) -> Any:
    """The timer is among the timeouts that are due at 6 ms; others wait in the same slot."""
    timeouts = [queue.start(at) for at in (14, 6, 50, 6, 22, 6)]
    queue.now_ms = 6
    queue.ended.append(queue.queue.pop(6 * MS))
    return timeouts[2]


STATES = {state.__name__: state for state in (few, many, rescheduled, in_a_visit)}
ANY_THREAD: dict[str, Callable[[Queue, Any], object]] = {
    "start": lambda queue, _: queue.start(40),
    "start as first": lambda queue, _: queue.start(8),
    "start in its tick": lambda queue, _: queue.start(50),
    "start and cancel": lambda queue, _: queue.start_and_cancel(9),
    "reschedule earlier": lambda queue, chosen: queue.queue.reschedule(chosen, 12 * MS),
    "reschedule later": lambda queue, chosen: queue.queue.reschedule(chosen, 60 * MS),
    "cancel": lambda queue, chosen: queue.cancel(chosen),
    "clean up": lambda queue, _: queue.clean_up(),
}
TIMER: dict[str, Callable[[Queue, Any], object]] = {  # one at a time
    "next_wake": lambda queue, _: queue.queue.next_wake(),
    "advance": lambda queue, _: queue.advance(15),
    "advance far": lambda queue, _: queue.advance(66),
    "drain": lambda queue, _: queue.drain(),
}
OPERATIONS = ANY_THREAD | TIMER


def interrupt_after_call(
    number: int, work: Callable[[], object], other: Callable[[], object]
) -> bool:
    """Run `work`, and `other` after a given number of calls in it; False if it makes fewer."""
    left = [number]

    def after(frame: Any, event: str, _: object) -> None:
        if event in {"c_return", "return"} and "rpcwheel/timer" in frame.f_code.co_filename:
            left[0] -= 1
            if left[0] == 0:
                other()

    sys.setprofile(after)
    try:
        work()
    finally:
        sys.setprofile(None)
    return left[0] <= 0


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("kind", QUEUES)
@pytest.mark.parametrize("work", OPERATIONS)
def test_no_timeout_is_lost_or_late_wherever_threads_switch(
    work: str, kind: str, state: str
) -> None:
    others = ANY_THREAD if work in TIMER else OPERATIONS
    for other in others:
        if work == "drain" and other.startswith("start"):
            continue  # the timer closes the queue before
        for number in itertools.count(1):
            queue = Queue(kind)
            chosen = STATES[state](queue)
            if not interrupt_after_call(
                number,
                lambda: OPERATIONS[work](queue, chosen),  # noqa: B023 - called at once
                lambda: OPERATIONS[other](queue, chosen),  # noqa: B023
            ):
                assert number > 1 or work == "clean up"
                break
            check(queue, f"{work}, after call {number}: {other}")


def check(queue: Queue, where: str) -> None:
    """Let time pass, and compare what the queue returns with what is due."""
    queue.queue.check()
    pending = {timeout for timeout in queue.timeouts if timeout not in queue.ended}
    deadlines = {max(timeout._deadline_ns // MS, queue.now_ms) for timeout in pending}
    for now_ms in sorted(deadlines | {queue.now_ms}):
        due = {timeout for timeout in pending if timeout._deadline_ns <= now_ms * MS}
        assert queue.queue.next_wake() <= (now_ms * MS if due else NEVER), where
        before = len(queue.ended)
        queue.advance(now_ms)
        assert set(queue.ended[before:]) == due, where
        pending -= due
    assert len(queue.ended) == len(set(queue.ended)) == len(queue.timeouts), where
    queue.queue.check()
