"""`queue.check()` finds broken invariants."""

import pytest

from rpcwheel.timer import DeadlineHeap, HashedWheel, HierarchicalWheel, ManualTimer, SparseWheel


@pytest.fixture(params=[HierarchicalWheel, SparseWheel, HashedWheel])
def wheel(request):
    """A wheel with three timeouts, and the timeouts."""
    queue = request.param(0.001)
    with ManualTimer(queue) as timer:
        timeouts = [timer.new_timeout(print, 0.5 + n) for n in (0, 0, 7)]
        queue.check()
        yield queue, timeouts
        queue.check()


def check_fails_while(owner, attribute, value, queue, message):
    before = getattr(owner, attribute)
    setattr(owner, attribute, value)
    with pytest.raises(AssertionError, match=message):
        queue.check()
    setattr(owner, attribute, before)


def test_check_of_a_wheel_finds_each_broken_invariant(wheel):
    queue, (first, second, third) = wheel
    slot = first._prev
    for owner, attribute, value, message in (
        (queue, "_gone", queue._gone + 1, "3 timeouts are in slots, 2 counted"),
        (third, "_deadline_ns", 1, "is late in its slot"),
        (second, "_prev", third, "broken list"),
        (first, "_state", 1, "is in a slot"),
        (first, "_state", 2, "is in a slot"),
        (queue, "_cursor", 10**6, "before cursor"),
        (slot, "bound", 10**7, "bound"),
    ):
        check_fails_while(owner, attribute, value, queue, message)


def test_check_of_a_hierarchical_wheel_finds_a_missing_bit():
    queue = HierarchicalWheel(0.001)
    with ManualTimer(queue) as timer:
        level = timer.new_timeout(print, 0.005)._prev.level
        check_fails_while(level, "occupied", 0, queue, "no bit")


def test_check_of_a_heap_finds_a_missing_entry():
    queue = DeadlineHeap()
    with ManualTimer(queue) as timer:
        timer.new_timeout(print, 1.0)
        check_fails_while(queue, "_entries", [], queue, "0 timeouts have entries, 1 counted")
