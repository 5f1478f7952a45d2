"""`DeadlineHeap`: the clean-up of dead entries.

Only the pure form can be interrupted by a test; the compiled form has the same source.
"""

from __future__ import annotations

import signal
from typing import Any

import pytest

from fixtures.timers import MS, PURE, start
from rpcwheel.durations import NEVER
from rpcwheel.timer import _heap


@pytest.fixture
def queue() -> Any:
    return PURE.DeadlineHeap()


def size(queue: Any) -> int:
    return len(queue._entries) + len(queue._old)


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
    for _ in range(2 + 2 * size(queue) // _heap.STEPS):
        queue._clean_up()
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
