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
    for owner, attribute, value, message in (
        (queue, "_removed", queue._removed + 1, "3 timeouts are in slots, 2 counted"),
        (third, "_deadline_ns", 1, "is after"),
        (second, "_prev", third, "broken list"),
        (first, "_slot", -1, "is in slot"),
        (first, "_slot", third._slot, "is in slot"),
        (queue, "_cursor", 10**6, "slot|bound"),
    ):
        check_fails_while(owner, attribute, value, queue, message)


@pytest.mark.parametrize("make", [HierarchicalWheel, HashedWheel])
def test_check_of_a_wheel_finds_a_timeout_in_a_wrong_slot(make):
    queue = make(0.001)
    with ManualTimer(queue) as timer:
        timeout = timer.new_timeout(print, 0.005)
        queue._heads[timeout._slot] = None
        timeout._slot += 1
        queue._heads[timeout._slot] = timeout
        with pytest.raises(AssertionError, match=r"bound|no bit"):
            queue.check()
        queue._heads[timeout._slot] = None
        timeout._slot -= 1
        queue._heads[timeout._slot] = timeout


def test_check_of_a_heap_finds_a_missing_entry():
    queue = DeadlineHeap()
    with ManualTimer(queue) as timer:
        timer.new_timeout(print, 1.0)
        check_fails_while(queue, "_entries", [], queue, "0 timeouts have entries, 1 counted")
