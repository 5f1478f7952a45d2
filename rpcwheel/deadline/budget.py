"""How many retries a target gets, so that those who retry don't bury a server that is down.

Finagle's and Envoy's rule: at most a share of the recent calls, and a small number always. Pure:
time comes in. Each method is a straight line for CPython (no call while a figure is between two
states), so any thread may use it without a lock.
"""

from __future__ import annotations

from typing import Final

__all__ = ["RetryBudget"]

WINDOW: Final = 10
"""Seconds that count as recent."""

SLOT_NS: Final = 1_000_000_000


class RetryBudget:
    """The calls and retries of one target in the last ten seconds."""

    __slots__ = ("_calls", "_newest", "_reserve", "_retries", "_share", "_slots")

    def __init__(self, share: float, reserve: int) -> None:
        """Begin with nothing counted.

        Args:
            share: How many of the calls may be retries: 0.2 is one for every five calls.
            reserve: How many retries are allowed in any case.
        """
        self._share = share
        self._reserve = reserve
        self._slots: list[list[int]] = [[0, 0] for _ in range(WINDOW)]  # calls, retries
        self._newest = 0
        self._calls = self._retries = 0

    def call(self, now_ns: int) -> None:
        """Count a call (not its retries)."""
        second = now_ns // SLOT_NS
        if second != self._newest:
            self._move(second)
        self._slots[second % WINDOW][0] += 1
        self._calls += 1

    def take(self, now_ns: int) -> bool:
        """Count a retry, if there is one left; False if not."""
        second = now_ns // SLOT_NS
        if second != self._newest:
            self._move(second)
        if self._retries >= max(self._reserve, self._share * self._calls):
            return False
        self._slots[second % WINDOW][1] += 1
        self._retries += 1
        return True

    def _move(self, second: int) -> None:
        """Forget what is older than the window."""
        passed = second - self._newest
        if passed <= 0:
            return
        for step in range(1, min(passed, WINDOW) + 1):
            slot = self._slots[(self._newest + step) % WINDOW]
            self._calls -= slot[0]
            self._retries -= slot[1]
            slot[0] = slot[1] = 0
        self._newest = second
