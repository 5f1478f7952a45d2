"""Switches to another thread at given moments, simulated on one thread.

Only the pure form can be interrupted by a test; the compiled form has the same source.
"""

import sys
from collections.abc import Callable

import pytest

from rpcwheel.timer import _sparse
from rpcwheel.timer.queue import load_form

PURE = load_form("pure")
MS = 1_000_000
NEVER = (1 << 63) - 1


class CallsAfter:
    """Calls a function right after the next call of a given method."""

    METHODS = (
        "_earliest",
        "_find",
        "_first",
        "_move_cursor",
        "_pass_by",
        "_slot",
        "next_wake",
    )

    def call_after(self, method: str, function: Callable[[], object]) -> None:
        self.waiting = {method: function}

    def __getattribute__(self, name: str):
        found = super().__getattribute__(name)
        if name not in CallsAfter.METHODS:
            return found

        def called(*args):
            result = found(*args)
            function = self.__dict__.get("waiting", {}).pop(name, None)
            if function is not None:
                function()
            return result

        return called


class Hierarchical(CallsAfter, PURE.HierarchicalWheel):
    search = "_find"


class Sparse(CallsAfter, PURE.SparseWheel):
    search = "_first"


class Hashed(CallsAfter, PURE.HashedWheel):
    search = "_earliest"


@pytest.fixture(params=[Hierarchical, Sparse, Hashed])
def queue(request):
    return request.param(0.001)


def new(queue, at_ms):
    timeout = PURE.Timeout()
    timeout._task = print
    timeout._deadline_ns = at_ms * MS
    timeout._timer_state = PURE.TimerState(queue, lambda: None, True)
    return timeout


def put(queue, at_ms):
    timeout = new(queue, at_ms)
    assert queue.schedule(timeout)
    return timeout


@pytest.mark.parametrize("far", [None, 200])
def test_a_timeout_added_between_the_search_and_the_cursor_move_is_found(queue, far):
    if far is not None:
        put(queue, far)
    near = []
    queue.call_after(queue.search, lambda: near.append(put(queue, 20)))
    assert queue.pop(50 * MS) is near[0]
    queue.check()


def test_a_timeout_added_before_the_one_that_was_found_fires_first(queue):
    second, first = put(queue, 30), []
    queue.call_after(queue.search, lambda: first.append(put(queue, 20)))
    assert queue.advance(50 * MS) == [*first, second]
    queue.check()


def test_a_timeout_rescheduled_earlier_after_the_search_is_found(queue):
    timeout = put(queue, 5000)
    queue.call_after(queue.search, lambda: queue.reschedule(timeout, 20 * MS))
    assert queue.pop(50 * MS) is timeout
    queue.check()


def test_a_timeout_cancelled_after_the_search_is_not_returned(queue):
    timeout = put(queue, 20)
    queue.call_after(queue.search, timeout.cancel)
    assert queue.pop(50 * MS) is None
    queue.check()


def test_a_slot_is_computed_again_if_the_cursor_moved(queue):
    for at in (70, 1000, 20):
        timeout = new(queue, at)
        queue.call_after("_slot", lambda: queue.pop(66 * MS))
        assert queue.schedule(timeout)
        queue.check()
    assert len(queue.advance(1000 * MS)) == 3


def test_a_deadline_changed_while_the_timeout_is_added_is_used(queue):
    timeout = put(queue, 500)
    queue.call_after("_slot", lambda: queue.reschedule(timeout, 10 * MS))
    assert queue.reschedule(timeout, 300 * MS)
    queue.check()
    assert queue.next_wake() <= 10 * MS
    assert queue.advance(10 * MS) == [timeout]


def test_a_timeout_cancelled_while_it_is_moved_stays_cancelled(queue):
    timeout = put(queue, 500)
    queue.call_after("_slot", timeout.cancel)
    assert not timeout.reschedule(0.3)
    queue.check()
    assert queue.advance(1000 * MS) == []


def test_a_timeout_of_a_closed_queue_is_not_moved(queue):
    """`drain` would not see it if it were moved to a slot that was empty when `drain` began."""
    timeout = put(queue, 500)
    queue.limit(-1)
    assert not timeout.reschedule(0.3)
    assert queue.drain() == [timeout]


def test_a_slot_removed_while_it_is_chosen_is_created_again():
    queue = Sparse(0.001)
    old = put(queue, 20)

    def clean_away():
        old.cancel()
        assert queue.next_wake() == NEVER

    queue.call_after("_slot", clean_away)
    timeout = put(queue, 20)
    queue.check()
    assert queue.advance(20 * MS) == [timeout]


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
    queue = Sparse(0.001)
    put(queue, 20).cancel()
    forget, came = queue._forget, []

    def forget_late(tick, slot):
        queue._forget = forget
        forget(tick, slot)
        if used_again:
            other = put(queue, 90)  # in this slot
            came.append(put(queue, 20))
            other.cancel()
        forget(tick, slot)

    queue._forget = forget_late
    queue.next_wake()
    queue.check()
    assert queue.advance(20 * MS) == came


def test_each_slot_is_used_or_unused_after_two_threads_added_a_tick():
    queue = Sparse(0.001)
    queue._by_tick = look = Look()
    look.function = lambda: put(queue, 20)
    put(queue, 20)
    queue.check()
    assert sorted([*look.values(), *queue._unused]) == list(range(1, len(queue._tick_of)))
    assert len(queue.advance(20 * MS)) == 2


def test_the_heap_of_ticks_is_sorted_again_only_if_it_lacks_ticks_or_has_many_more():
    queue = Sparse(0.001)
    put(queue, 20)
    heap = queue._ticks
    put(queue, 30).cancel()
    assert queue.next_wake() == 20 * MS
    assert queue._ticks is heap


def test_no_tick_is_lost_when_the_heap_of_ticks_is_rebuilt():
    """Another thread adds a slot while the ticks are collected, and removes one."""
    queue = Sparse(0.001)
    put(queue, 5000)
    put(queue, 9000).cancel()
    queue._by_tick = look = Look(queue._by_tick)
    queue._ticks.clear()  # fewer than slots: the heap will be rebuilt
    came = []

    look.call_after_iteration = lambda: came.append(put(queue, 20))  # which removes 9000
    queue.next_wake()
    assert queue.next_wake() == 20 * MS
    queue.check()
    assert queue.advance(50 * MS) == came


def test_an_earlier_tick_added_while_an_unused_one_is_removed_is_kept():
    queue = Sparse(0.001)
    queue._by_tick = look = Look(queue._by_tick)
    put(queue, 20).cancel()
    queue._forget(20, queue._by_tick[20])  # by another thread
    put(queue, 90)
    came = []
    look.function = lambda: came.append(put(queue, 10))
    assert queue.next_wake() == 10 * MS
    queue.check()
    assert queue.advance(10 * MS) == came


def test_a_timeout_in_a_slot_whose_tick_is_not_yet_in_the_heap_is_found(monkeypatch):
    """The thread that added the slot is slow, and its timeout is refused, so it wakes no timer."""
    queue = Sparse(0.001)
    put(queue, 5000)
    put(queue, 9000).cancel()  # its tick outlives its slot, so that ticks are no fewer than slots
    push, came, wakes = _sparse.heappush, [], []

    def push_late(ticks, tick):
        if not wakes:
            wakes.append(0)
            came.append(put(queue, 20))
            wakes[0] = queue.next_wake()
        push(ticks, tick)

    monkeypatch.setattr(_sparse, "heappush", push_late)
    queue.limit(2)
    assert not queue.schedule(new(queue, 20))
    assert wakes == [20 * MS]
    queue.check()
    assert queue.advance(50 * MS) == came


def test_a_slot_that_is_removed_and_used_again_for_its_tick_is_in_the_heap(monkeypatch):
    """It happens after the first thread has added the tick to the heap."""
    queue = Sparse(0.001)
    put(queue, 5000)
    put(queue, 9000).cancel()
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
    came.append(put(queue, 20))
    assert queue.next_wake() == 20 * MS
    queue.check()
    assert queue.advance(20 * MS) == came


def test_a_timeout_added_while_the_next_wakeup_is_computed_is_not_missed(queue):
    state = PURE.TimerState(queue, lambda: None, True)
    put(queue, 5000)
    queue.call_after("next_wake", lambda: put(queue, 20))
    assert state.arm() == 20 * MS
    assert state.armed_ns == 20 * MS
    pulled = put(queue, 6000)
    queue.call_after("next_wake", lambda: queue.reschedule(pulled, 10 * MS))
    assert state.arm() == 10 * MS


def test_one_pop_moves_at_most_a_bounded_number_of_timeouts():
    wheel, put_off = PURE.HierarchicalWheel(0.001), PURE.SparseWheel(0.001)
    one_level = PURE.HierarchicalWheel(0.001)
    for _ in range(2000):
        put(wheel, 400_000)
        put_off.reschedule(put(put_off, 1000), 5000 * MS)
        one_level.reschedule(put(one_level, 20), 50 * MS)
    for queue, now in ((wheel, 400_000 * MS), (put_off, 1000 * MS), (one_level, 20 * MS)):
        moved = []
        while len(queue) and queue.next_wake() <= now:
            before = queue._moved
            queue.pop(now)
            moved.append(queue._moved - before)
        assert sum(moved) >= 2000
        assert max(moved) <= 256


def same_slot(queue, *rounds):
    """Timeouts of one slot of a `HashedWheel`, in these rounds, after the one that is due first."""
    return [put(queue, 2 + number * 4) for number in rounds]


def test_one_pop_passes_by_at_most_a_bounded_number_of_timeouts():
    queue = PURE.HashedWheel(0.001, slots=4)
    due, *later = same_slot(queue, 0, *[1] * 1000)
    assert queue.pop(2 * MS) is due
    assert queue.pop(2 * MS) is None
    assert queue._mark._next is later[256]
    assert queue.advance(6 * MS) == later


def test_an_empty_slot_of_a_ring_is_looked_at_once():
    queue = PURE.HashedWheel(0.001, slots=4)
    put(queue, 2).cancel()
    assert queue.next_wake() == NEVER
    assert not any(queue._occupied)


def test_a_visit_of_a_slot_passes_by_the_timeouts_of_later_rounds_once():
    queue = PURE.HashedWheel(0.001, slots=4)
    later = same_slot(queue, 5, 7, 5)
    due = same_slot(queue, 0)
    assert queue.advance(2 * MS) == due
    assert queue.next_wake() == 22 * MS
    queue.check()
    assert queue.advance(22 * MS) == [later[0], later[2]]
    assert queue.advance(30 * MS) == [later[1]]


@pytest.mark.parametrize("removed", [0, 1, 2])
def test_a_visit_ends_although_a_timeout_that_was_passed_by_is_removed(removed):
    queue = PURE.HashedWheel(0.001, slots=4)
    later = same_slot(queue, 3, 4, 5)
    due = same_slot(queue, 0, 0)
    assert queue.pop(2 * MS) is due[0]
    later.pop(removed).cancel()
    assert queue.pop(2 * MS) is due[1]
    assert queue.pop(2 * MS) is None
    queue.check()
    assert queue.next_wake() == (14 * MS if removed == 0 else later[0]._deadline_ns)
    assert queue.advance(100 * MS) == later


def test_timeouts_that_are_added_during_a_visit_fire_in_their_order():
    queue = PURE.HashedWheel(0.001, slots=4)
    later = same_slot(queue, 3)
    due = same_slot(queue, 0, 0)
    assert queue.pop(2 * MS) is due[0]
    now, next_round = put(queue, 1), put(queue, 6)
    moved = put(queue, 50)
    assert queue.reschedule(moved, 18 * MS)  # into the slot that is visited
    assert queue.advance(2 * MS) == [due[1], now]
    queue.check()
    assert queue.next_wake() == 6 * MS
    assert queue.advance(100 * MS) == [next_round, *later, moved]


def test_an_equal_delay_added_during_a_visit_is_due_in_its_own_round():
    queue = Hashed(0.001, slots=4)
    timer = PURE.TimerBase(PURE.TimerState(queue, lambda: None, True), None)
    due, later = put(queue, 2), put(queue, 10)
    added = []
    queue.call_after("_move_cursor", lambda: added.append(timer.new_timeout(print, 0.006)))
    assert queue.pop(2 * MS) is due
    added.pop().cancel()
    queue.call_after("_pass_by", lambda: added.append(timer.new_timeout(print, 0.006)))
    assert queue.pop(2 * MS) is None
    queue.check()
    assert queue.next_wake() == 6 * MS
    assert queue.advance(10 * MS) == [*added, later]


def test_a_timeout_added_while_the_bound_of_a_visited_slot_is_computed_is_not_late():
    """With a trace function, so that it is added after each call of `_pass_by`, one at a time."""
    for call in range(10):
        queue = PURE.HashedWheel(0.001, slots=4)
        same_slot(queue, 5, 0)
        came, calls = [], []

        def trace(frame, event, _, queue=queue, came=came, calls=calls, call=call):
            if frame.f_code.co_name == "_pass_by" and event in {"c_return", "return"}:
                calls.append(event)
                if len(calls) == call + 1:
                    came.append(put(queue, 6))

        sys.setprofile(trace)
        try:
            assert len(queue.advance(2 * MS)) == 1
        finally:
            sys.setprofile(None)
        queue.check()
        assert queue.next_wake() == (6 if came else 22) * MS
        if not came:
            return


@pytest.mark.parametrize("passed", [0, 1, 2])
def test_timeouts_of_one_tick_fire_in_their_order_although_one_came_during_a_visit(passed):
    """Some of the older ones have been passed by, and one of those is removed."""
    queue = PURE.HashedWheel(0.001, slots=4)
    old = []
    for number in range(4):
        if number == passed:
            due = [put(queue, 2), put(queue, 2)]
        old.append(put(queue, 6))
    assert queue.pop(2 * MS) is due[0]
    old.pop(0).cancel()
    new = put(queue, 6)
    assert queue.advance(2 * MS) == due[1:]
    queue.check()
    assert queue.advance(6 * MS) == [*old, new]


def test_a_wheel_can_be_drained_during_a_visit():
    queue = PURE.HashedWheel(0.001, slots=4)
    later = same_slot(queue, 3)
    due = same_slot(queue, 0, 0)
    assert queue.pop(2 * MS) is due[0]
    assert queue.drain() == [due[1], *later]
    queue.check()
    assert len(queue) == 0
