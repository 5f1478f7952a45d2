"""Switches to another thread at any moment, simulated on one thread; bounds of one call.

Only the pure form can be interrupted by a test; the compiled form has the same source.
"""

import itertools
import sys

import pytest

from fixtures.timers import MS, PURE, make_timeout, start
from rpcwheel.durations import NEVER
from rpcwheel.errors import TooManyTimeouts
from rpcwheel.timer import _heap, _sparse

QUEUES = {
    "hierarchical": lambda: PURE.HierarchicalWheel(0.001),
    "sparse": lambda: PURE.SparseWheel(0.001),
    "hashed": lambda: PURE.HashedWheel(0.001, slots=4),
    "heap": PURE.DeadlineHeap,
}


class Timer(PURE.TimerBase):
    """A timer whose queue has timeouts of all kinds: cancelled, put off, near and far."""

    def __init__(self, queue) -> None:
        super().__init__(PURE.TimerState(queue, lambda: self, True), None)
        self.queue = queue
        self.started = []
        self.ended = []
        for at_ms in (9, 30, 9):
            self.cancel(self.start(at_ms))
        for at_ms in (2, 2, 6, 14, 70, 70, 90, 5000):
            self.start(at_ms)
        assert queue.reschedule(self.start(3), 50 * MS)
        self.alone = self.start(61)  # in a slot of a `HashedWheel`
        self.chosen = self.start(62)  # in the slot of most others

    def _wake(self, deadline_ns) -> None:
        """`TimerState.wake` has noted the deadline."""

    def _refuse(self) -> None:
        raise TooManyTimeouts

    def start(self, at_ms):
        try:
            timeout = self.new_timeout(print, at_ms / 1000)
        except TooManyTimeouts:  # the queue is closed
            return None
        self.started.append(timeout)
        return timeout

    def cancel(self, timeout) -> None:
        if timeout.cancel():
            self.ended.append(timeout)

    def drain(self) -> None:
        self.queue.limit(-1)
        self.ended += self.queue.drain()

    def call(self, name) -> None:
        """Do what a thread may do; the last three only the thread of the timer does."""
        if name.startswith("start"):
            self.start(int(name.split()[1]))
        elif name.startswith("reschedule"):
            self.chosen.reschedule(int(name.split()[1]) / 1000)
        elif name == "cancel":
            self.cancel(self.chosen)
        elif name == "cancel alone":
            self.cancel(self.alone)
        elif name == "arm":
            self._timer_state.arm()
        elif name == "pop":
            self.ended += self.queue.advance(70 * MS, 2)
        elif name == "drain":
            self.drain()

    def check(self) -> None:
        """Check that each timeout ends once, in time and in order."""
        queue = self.queue
        queue.check()
        assert self._timer_state.armed_ns <= queue.next_wake()
        assert len(queue) == 0 or queue._capacity >= 0  # not closed
        for until_ns in (20 * MS, 66 * MS, 75 * MS, 5000 * MS):
            cursor_ns = queue._cursor * queue._tick_ns
            now_ns = max(until_ns, cursor_ns)
            due = queue.advance(now_ns)
            keys = [max(timeout._deadline_ns, cursor_ns) for timeout in due]
            assert keys == sorted(keys)
            assert not due or keys[-1] <= now_ns
            self.ended += due
            pending = [timeout for timeout in self.started if timeout._slot >= 0]
            assert len(queue) == len(pending)
            earliest_ns = min((timeout._deadline_ns for timeout in pending), default=NEVER)
            assert now_ns < earliest_ns
            assert queue.next_wake() <= earliest_ns
            queue.check()
        assert sorted(map(id, self.ended)) == sorted(map(id, self.started))


def interrupt_after_call(number, work, other) -> bool:
    """Run `work`, and `other` after so many calls in it; False if it makes fewer."""
    left = [number]

    def after(frame, event, _) -> None:
        of_timer = frame.f_globals["__name__"].startswith("rpcwheel.timer")
        if of_timer and event in {"c_return", "return"}:
            left[0] -= 1
            if left[0] == 0:
                other()

    sys.setprofile(after)
    try:
        work()
    finally:
        sys.setprofile(None)
    return left[0] <= 0


ANY_THREAD = ["start 6", "start 20", "cancel", "reschedule 12"]
OTHERS = [
    *(*ANY_THREAD, "start 1", "start 62", "start 68", "cancel alone"),
    *(f"reschedule {at_ms}" for at_ms in (2, 5, 58, 63, 5000)),
]
OF_TIMER = ["arm", "pop", "drain"]
SEVERAL = ["start 20, arm", "cancel, arm, start 60", "arm, start 90, start 9", "pop, start 6"]


@pytest.mark.parametrize("popped", [0, 1, 4], ids=["unused", "in a slot", "between slots"])
@pytest.mark.parametrize("work", [*ANY_THREAD, *OF_TIMER])
@pytest.mark.parametrize("make", QUEUES.values(), ids=QUEUES)
def test_no_timeout_is_lost_wherever_threads_switch(monkeypatch, make, work, popped):
    """CPython switches threads only after a call; here it does so after each call in turn."""
    monkeypatch.setattr(_heap, "EXTRA", 0)
    for others in OTHERS if work in OF_TIMER else [*OTHERS, *OF_TIMER, *SEVERAL]:
        for number in itertools.count(1):
            timer = Timer(make())
            timer.ended += timer.queue.advance(16 * MS, popped)

            def other(timer=timer, others=others):
                for name in others.split(", "):
                    timer.call(name)

            came = interrupt_after_call(number, lambda timer=timer: timer.call(work), other)
            try:
                timer.check()
            except AssertionError as error:
                raise AssertionError(f"{others} after call {number}") from error
            if not came:
                break
        assert number > 1


# --- Of `SparseWheel`, which creates and removes slots ---


class Look(dict):
    """A dict that calls a function right after the next lookup or iteration."""

    function = None
    call_after_iteration = None

    def __iter__(self):
        yield from list(super().__iter__())
        function, self.call_after_iteration = self.call_after_iteration, None
        if function is not None:
            function()

    def get(self, key, default=None):
        found = super().get(key, default)
        function, self.function = self.function, None
        if function is not None:
            function()
        return found


@pytest.mark.parametrize("used_again", [False, True])
def test_a_slot_removed_by_another_thread_is_not_removed_again(used_again):
    queue = PURE.SparseWheel(0.001)
    start(queue, 20).cancel()
    forget, came = queue._forget, []

    def forget_late(tick, slot):
        queue._forget = forget
        forget(tick, slot)
        if used_again:
            other = start(queue, 90)  # in this slot
            came.append(start(queue, 20))
            other.cancel()
        forget(tick, slot)

    queue._forget = forget_late
    queue.next_wake()
    queue.check()
    assert queue.advance(20 * MS) == came


def test_each_slot_is_used_or_unused_after_two_threads_added_a_tick():
    queue = PURE.SparseWheel(0.001)
    queue._by_tick = look = Look()
    look.function = lambda: start(queue, 20)
    start(queue, 20)
    queue.check()
    assert sorted([*look.values(), *queue._unused]) == list(range(1, len(queue._tick_of)))
    assert len(queue.advance(20 * MS)) == 2


def test_the_heap_of_ticks_is_sorted_again_only_if_it_lacks_ticks_or_has_many_more():
    queue = PURE.SparseWheel(0.001)
    start(queue, 20)
    heap = queue._ticks
    start(queue, 30).cancel()
    assert queue.next_wake() == 20 * MS
    assert queue._ticks is heap


def test_no_tick_is_lost_when_the_heap_of_ticks_is_rebuilt():
    """Another thread adds a slot while the ticks are collected, and removes one."""
    queue = PURE.SparseWheel(0.001)
    start(queue, 5000)
    start(queue, 9000).cancel()
    queue._by_tick = look = Look(queue._by_tick)
    queue._ticks.clear()  # fewer than slots: the heap will be rebuilt
    came = []

    look.call_after_iteration = lambda: came.append(start(queue, 20))  # which removes 9000
    queue.next_wake()
    assert queue.next_wake() == 20 * MS
    queue.check()
    assert queue.advance(50 * MS) == came


def test_an_earlier_tick_added_while_an_unused_one_is_removed_is_kept():
    queue = PURE.SparseWheel(0.001)
    queue._by_tick = look = Look(queue._by_tick)
    start(queue, 20).cancel()
    queue._forget(20, queue._by_tick[20])  # by another thread
    start(queue, 90)
    came = []
    look.function = lambda: came.append(start(queue, 10))
    assert queue.next_wake() == 10 * MS
    queue.check()
    assert queue.advance(10 * MS) == came


def test_a_timeout_in_a_slot_whose_tick_is_not_yet_in_the_heap_is_found(monkeypatch):
    """The thread that added the slot is slow, and its timeout is refused, so it wakes no timer."""
    queue = PURE.SparseWheel(0.001)
    start(queue, 5000)
    start(queue, 9000).cancel()  # its tick outlives its slot, so that ticks are no fewer than slots
    push, came, wakes = _sparse.heappush, [], []

    def push_late(ticks, tick):
        if not wakes:
            wakes.append(0)
            came.append(start(queue, 20))
            wakes[0] = queue.next_wake()
        push(ticks, tick)

    monkeypatch.setattr(_sparse, "heappush", push_late)
    queue.limit(2)
    assert not queue.schedule(make_timeout(PURE, queue, 20 * MS))
    assert wakes == [20 * MS]
    queue.check()
    assert queue.advance(50 * MS) == came


def test_a_slot_that_is_removed_and_used_again_for_its_tick_is_in_the_heap(monkeypatch):
    """It happens after the first thread has added the tick to the heap."""
    queue = PURE.SparseWheel(0.001)
    start(queue, 5000)
    start(queue, 9000).cancel()
    queue._forget(9000, queue._by_tick[9000])  # the heap has more ticks than there are slots
    push, waiting, came = _sparse.heappush, [None], []

    def push_early(ticks, tick):
        push(ticks, tick)
        if waiting:
            waiting.clear()
            queue._forget(20, queue._by_tick[20])
            assert queue.next_wake() == 5000 * MS  # removes the tick
            queue._new_slot(20)  # by a third thread, which has not yet added the tick

    monkeypatch.setattr(_sparse, "heappush", push_early)
    came.append(start(queue, 20))
    assert queue.next_wake() == 20 * MS
    queue.check()
    assert queue.advance(20 * MS) == came


def test_one_pop_moves_at_most_a_bounded_number_of_timeouts():
    wheel, put_off = PURE.HierarchicalWheel(0.001), PURE.SparseWheel(0.001)
    one_level = PURE.HierarchicalWheel(0.001)
    for _ in range(2000):
        start(wheel, 400_000)
        put_off.reschedule(start(put_off, 1000), 5000 * MS)
        one_level.reschedule(start(one_level, 20), 50 * MS)
    for queue, now in ((wheel, 400_000 * MS), (put_off, 1000 * MS), (one_level, 20 * MS)):
        moved = []
        while len(queue) and queue.next_wake() <= now:
            before = queue._moved
            queue.pop(now)
            moved.append(queue._moved - before)
        assert sum(moved) >= 2000
        assert max(moved) <= 256


def test_one_pop_passes_by_at_most_a_bounded_number_of_timeouts():
    queue = PURE.HashedWheel(0.001, slots=4)
    due, *later = (start(queue, at_ms) for at_ms in (2, *[6] * 1000))  # one slot
    assert queue.pop(2 * MS) is due
    assert queue.pop(2 * MS) is None
    assert queue._mark._next is later[256]
    assert queue.advance(6 * MS) == later


def test_an_empty_slot_of_a_ring_is_looked_at_once():
    queue = PURE.HashedWheel(0.001, slots=4)
    start(queue, 2).cancel()
    assert queue.next_wake() == NEVER
    assert not any(queue._occupied)


def test_a_timeout_whose_timer_is_gone_can_be_rescheduled():
    timeout = start(PURE.SparseWheel(0.001), 20)
    assert timeout.timer is None
    assert timeout.reschedule(0.001)
