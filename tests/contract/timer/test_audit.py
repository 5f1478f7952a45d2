"""The audit finds what is broken: a check that never fails proves nothing."""

import pytest

from rpcwheel.timer import DeadlineHeap, HashedWheel, HierarchicalWheel, ManualTimer, SparseWheel


@pytest.fixture(params=[HierarchicalWheel, SparseWheel, HashedWheel])
def filed(request):
    """A wheel, sound, with three timeouts in it."""
    queue = request.param(0.001)
    with ManualTimer(queue) as timer:
        timeouts = [timer.new_timeout(print, 0.5 + n) for n in (0, 0, 7)]
        queue.check()
        yield queue, timeouts


def breaks(queue, says):
    with pytest.raises(AssertionError, match=says):
        queue.check()


def test_a_wrong_count_is_found(filed):
    queue, _ = filed
    queue._gone += 1
    breaks(queue, "3 timeouts are filed, 2 counted")
    queue._gone -= 1


def test_a_timeout_filed_after_its_deadline_is_found(filed):
    queue, timeouts = filed
    before = timeouts[2]._deadline_ns
    timeouts[2]._deadline_ns = 1
    breaks(queue, "is filed late")
    timeouts[2]._deadline_ns = before


def test_a_broken_list_is_found(filed):
    queue, timeouts = filed
    before = timeouts[1]._prev
    timeouts[1]._prev = timeouts[2]
    breaks(queue, "broken list")
    timeouts[1]._prev = before


def test_an_ended_timeout_that_is_still_filed_is_found(filed):
    queue, timeouts = filed
    for state in (1, 2):
        timeouts[0]._state = state
        breaks(queue, "is filed")
    timeouts[0]._state = 0


def test_a_tick_before_the_cursor_is_found(filed):
    queue, _ = filed
    queue._cursor = 10**6
    breaks(queue, "before cursor")
    queue._cursor = 0


def test_a_slot_that_would_be_visited_too_late_is_found(filed):
    queue, timeouts = filed
    slot = timeouts[0]._prev
    before, slot.bound = slot.bound, 10**7
    breaks(queue, "bound")
    slot.bound = before


def test_a_missing_bit_is_found():
    queue = HierarchicalWheel(0.001)
    with ManualTimer(queue) as timer:
        level = timer.new_timeout(print, 0.005)._prev.level
        level.occupied, before = 0, level.occupied
        breaks(queue, "no bit")
        level.occupied = before


def test_an_entry_lost_from_the_heap_is_found():
    queue = DeadlineHeap()
    with ManualTimer(queue) as timer:
        timer.new_timeout(print, 1.0)
        kept, queue._entries = queue._entries, []
        breaks(queue, "0 timeouts are filed, 1 counted")
        queue._entries = kept
