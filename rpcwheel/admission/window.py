"""Sliding windows: how many of the last attempts have failed, and how many were slow. No I/O.

A `CountWindow` has a number of attempts, a `TimeWindow` those of a length of time. Both keep sums,
so an attempt costs the same whatever the size of the window. `LostTogether` finds failures
that have one cause. The caller holds a lock.
"""

from __future__ import annotations

from collections import deque
from typing import Final

SLOTS: Final = 10
"""Into how many slots a `TimeWindow` divides its length."""

LOST: Final = "UNAVAILABLE"
"""The status of an attempt whose connection broke."""

LOST_TOGETHER_NS: Final = 1_000_000_000
"""In this time all attempts on a broken connection end; a process may have thousands."""

QUIET_NS: Final = 2_000_000_000
"""The time without an UNAVAILABLE before a connection breaks. If some calls always fail, each
counts."""

FORGOTTEN_NS: Final = 60_000_000_000
"""The same if no attempt has succeeded since."""


class CountWindow:
    """The outcomes of the last attempts, up to a number of them.

    At any time, a finalizer or signal handler of users may record another attempt on the same
    thread.
    """

    def __init__(self, size: int) -> None:
        """Make an empty window for this number of attempts."""
        self._size = size
        self.clear()

    def clear(self) -> None:
        """Forget all attempts."""
        # Of each attempt, whether it failed, and whether it was slow; None: neither.
        self._outcomes: deque[tuple[bool, bool] | None] = deque()
        self.failures = 0
        """How many of the attempts have failed."""
        self.slow = 0
        """How many of the attempts were slow."""

    @property
    def calls(self) -> int:
        """How many attempts are in the window."""
        return len(self._outcomes)

    def record(self, now_ns: int, failed: bool, slow: bool) -> None:
        """Add an attempt that has ended, in place of the oldest one if the window is full."""
        outcomes = self._outcomes
        if failed or slow:
            self.failures += failed
            self.slow += slow
            outcomes.append((failed, slow))
        else:
            outcomes.append(None)
        if len(outcomes) > self._size:
            oldest = outcomes.popleft()
            if oldest is not None:
                self.failures -= oldest[0]
                self.slow -= oldest[1]


class TimeWindow:
    """The outcomes of the attempts of the last time.

    It moves by a tenth of its length (`SLOTS`) at a time, when it is used: so it always has the
    attempts of the last nine tenths. If a time is earlier than that of another attempt, because a
    thread has waited for the lock, its attempt counts as of the later time.
    """

    def __init__(self, length_ns: int) -> None:
        """Make an empty window of this length."""
        self._slot_ns = max(1, length_ns // SLOTS)
        self.clear()

    def clear(self) -> None:
        """Forget all attempts."""
        self._end_ns = 0  # of the current slot
        # The numbers of attempts, failures and slow attempts in the slots before it.
        self._slots = deque([(0, 0, 0)] * (SLOTS - 1), maxlen=SLOTS - 1)
        self.calls = 0
        """How many attempts are in the window, since it was last moved."""
        self.failures = 0
        """How many of the attempts have failed."""
        self.slow = 0
        """How many of the attempts were slow."""

    def record(self, now_ns: int, failed: bool, slow: bool) -> None:
        """Add an attempt that has ended."""
        if now_ns >= self._end_ns:
            self.move(now_ns)
        self.calls += 1
        if failed:
            self.failures += 1
        if slow:
            self.slow += 1

    def move(self, now_ns: int) -> None:
        """Forget the attempts that are too old at this time."""
        if now_ns < self._end_ns:
            return
        ended = (now_ns - self._end_ns) // self._slot_ns + 1
        self._end_ns += ended * self._slot_ns
        calls, failures, slow = self._before()
        self._slots.append((self.calls - calls, self.failures - failures, self.slow - slow))
        self._slots.extend([(0, 0, 0)] * min(ended - 1, SLOTS - 1))
        self.calls, self.failures, self.slow = self._before()

    def _before(self) -> tuple[int, ...]:
        return tuple(map(sum, zip(*self._slots, strict=True)))


class LostTogether:
    """Finds the attempts that fail at the same time, because their connection broke.

    They count as one failure: further attempts may be sent to another server, or to the same one
    after its restart. Otherwise one server of many would open the breaker of all.
    """

    def __init__(self) -> None:
        self._first_ns = self._last_ns = -FORGOTTEN_NS
        self.has_worked = True
        """Whether an attempt has succeeded that began after the connection broke."""

    def note_success(self, began_ns: int) -> None:
        """Note an attempt that works."""
        if began_ns >= self._first_ns:
            self.has_worked = True

    def note_failure(self, code: str, began_ns: int, now_ns: int) -> bool:
        """Note an attempt that fails now.

        Returns:
            Whether its connection broke together with that of a failure before. An attempt that
            began later counts: if it fails too, no server can be reached.
        """
        if code != LOST:
            return False
        quiet_ns, self._last_ns = now_ns - self._last_ns, now_ns
        if quiet_ns >= (QUIET_NS if self.has_worked else FORGOTTEN_NS):
            self._first_ns, self.has_worked = now_ns, False
            return False
        return began_ns < self._first_ns and now_ns < self._first_ns + LOST_TOGETHER_NS
