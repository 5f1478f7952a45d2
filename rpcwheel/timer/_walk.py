"""What goes through a whole queue: a walk, the drain, the audit. Written once, for both forms.

The invariants of a queue, as the audit has them: what is pending is in exactly one slot, and
nothing else is in any; `len` is their number; a slot's `bound` is at most the tick of each timeout
in it; a slot that holds something has its bit in `occupied`; nothing is filed before the cursor.
"""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rpcwheel.timer._base import Timeout, TimerQueue

__all__ = ["audit", "drain", "walk"]


def walk(queue: TimerQueue) -> list[Timeout]:
    """What is pending, slot by slot; other threads may go on meanwhile."""
    found = []
    for slot in queue._slots():
        timeout: Timeout | None = slot._next
        while timeout is not None and type(timeout) is not type(slot):  # moved: another's anchor
            if not timeout.cancelled() and not timeout.expired():
                found.append(timeout)
            timeout = timeout._next
    return found


def drain(queue: TimerQueue) -> list[Timeout]:
    """Take everything out, cancelled but with its task, by deadline."""
    drained = []
    for slot in queue._slots():
        while (timeout := slot._next) is not slot and timeout is not None:  # None: forgotten
            task = timeout._task
            if timeout.cancel():
                timeout._keep_task(task)
                drained.append(timeout)
    drained.sort(key=attrgetter("_deadline_ns"))
    return drained


def audit(queue: TimerQueue) -> None:
    """Check the invariants of a queue at rest.

    Raises:
        AssertionError: One of them does not hold.
    """
    count = 0
    for slot in queue._slots():
        timeout: Timeout = slot._next
        before: Timeout = slot
        while timeout is not slot:
            tick = timeout._tick
            assert timeout._prev is before, "broken list"
            assert not timeout.cancelled(), f"{timeout!r} is filed"
            assert not timeout.expired(), f"{timeout!r} is filed"
            assert slot.bound <= tick, f"bound {slot.bound} is after {tick}"
            assert queue._cursor <= tick, f"{tick} is before cursor {queue._cursor}"
            late = queue._due(timeout._deadline_ns) < tick and tick != queue._cursor
            assert not late, f"{timeout!r} is filed late, at {tick}"
            queue._check_slot(slot, tick)
            timeout, before = timeout._next, timeout
            count += 1
        assert slot._prev is before, "broken list"
        in_use = slot._next is not slot and slot.bit
        assert not in_use or slot.level.occupied & slot.bit, "a slot in use has no bit"
    assert count == len(queue), f"{count} timeouts are filed, {len(queue)} counted"
