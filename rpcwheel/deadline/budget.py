"""How many retries a target gets, so that those who retry don't bury a server that is down.

Finagle's and Envoy's rule: at most a share of the recent calls, and a small number always. Pure:
time comes in.

Any thread may use it, and there is no lock: nothing is kept but one slot for each recent second,
which knows its second, so there are no sums that could go astray. A count that is lost because two
threads wrote at once (only where there is no GIL) is forgotten with its slot. A retry is counted
first and judged then: threads that ask at the same moment get one too few at worst, never one too
many.
"""

from __future__ import annotations

from typing import Final

__all__ = ["RetryBudget"]

WINDOW: Final = 10
"""Seconds that count as recent, the one that runs included."""

SLOT_NS: Final = 1_000_000_000

SECOND, CALLS, RETRIES = range(3)


class RetryBudget:
    """The calls and retries of one target in the last ten seconds."""

    __slots__ = ("_reserve", "_share", "_slots")

    def __init__(self, share: float, reserve: int) -> None:
        """Begin with nothing counted.

        Args:
            share: How many of the calls may be retries: 0.2 is one for every five calls.
            reserve: How many retries are allowed in any case.
        """
        self._share = share
        self._reserve = reserve
        self._slots: list[list[int]] = [[0, 0, 0] for _ in range(WINDOW)]

    def call(self, now_ns: int) -> None:
        """Count a call (not its retries)."""
        self._slot(now_ns // SLOT_NS)[CALLS] += 1

    def take(self, now_ns: int) -> bool:
        """Count a retry, if there is one left; False if not."""
        second = now_ns // SLOT_NS
        slot = self._slot(second)
        slot[RETRIES] += 1
        recent = [one for one in self._slots if one[SECOND] > second - WINDOW]
        retries = sum(one[RETRIES] for one in recent)
        if retries <= max(self._reserve, self._share * sum(one[CALLS] for one in recent)):
            return True
        slot[RETRIES] -= 1
        return False

    def _slot(self, second: int) -> list[int]:
        """Where to count what happens now; what its place held ten seconds ago is forgotten.

        A thread that read the clock long ago counts in the newer slot that it finds.
        """
        slot = self._slots[second % WINDOW]
        if slot[SECOND] < second:
            slot = self._slots[second % WINDOW] = [second, 0, 0]
        return slot
