"""The audit (`queue.check()`) finds what is broken: a check that never fails proves nothing."""

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
        queue.check()  # each test mends what it broke


def check_fails_while(owner, attribute, value, queue, says):
    before = getattr(owner, attribute)
    setattr(owner, attribute, value)
    with pytest.raises(AssertionError, match=says):
        queue.check()
    setattr(owner, attribute, before)


def test_the_audit_of_a_wheel_finds_each_kind_of_damage(filed):
    queue, (first, second, third) = filed
    slot = first._prev
    for owner, attribute, value, says in (
        (queue, "_gone", queue._gone + 1, "3 timeouts are filed, 2 counted"),
        (third, "_deadline_ns", 1, "is filed late"),
        (second, "_prev", third, "broken list"),
        (first, "_state", 1, "is filed"),
        (first, "_state", 2, "is filed"),
        (queue, "_cursor", 10**6, "before cursor"),
        (slot, "bound", 10**7, "bound"),
    ):
        check_fails_while(owner, attribute, value, queue, says)


def test_a_missing_bit_of_the_hierarchical_wheel_is_found():
    queue = HierarchicalWheel(0.001)
    with ManualTimer(queue) as timer:
        level = timer.new_timeout(print, 0.005)._prev.level
        check_fails_while(level, "occupied", 0, queue, "no bit")


def test_an_entry_lost_from_the_heap_is_found():
    queue = DeadlineHeap()
    with ManualTimer(queue) as timer:
        timer.new_timeout(print, 1.0)
        check_fails_while(queue, "_entries", [], queue, "0 timeouts are filed, 1 counted")
