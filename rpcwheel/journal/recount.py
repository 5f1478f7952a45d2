"""`Recount`: decides when calls must be counted before another one is stored.

`max_pending` limits the calls of all processes together. To count them in each transaction would
take too long (0.1 s for a million), and a counter in the engine would let PostgreSQL store the
calls of one process after the other. So a process may store an eighth of the free places that it
has seen, for a short time, and then counts again.
"""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

ROOM_SHARE: Final = 8
"""The part of the free places that may be used before the next count."""

TIME_SHARE: Final = 100
"""A count is used this many times as long as it took: counting takes 1 % of the time."""


class Recount:
    """The last count, and what was stored since. For one thread at a time."""

    def __init__(self) -> None:
        self._counted: Counter[str] = Counter()
        self._since: Counter[str] = Counter()
        self._began_s = self._end_s = 0.0

    def is_needed(self, queue: str, limit: int) -> bool:
        """Whether to count before a call of the queue is stored."""
        room = limit - self._counted[queue]
        is_used = self._since[queue] * ROOM_SHARE >= room > 0
        return is_used or time.monotonic() >= self._end_s

    def begin(self) -> None:
        """Note that the calls are being counted."""
        self._began_s = time.monotonic()

    def end(self, stored: Mapping[str, int]) -> None:
        """Note the calls of each queue that were counted since `begin`."""
        now_s = time.monotonic()
        self._counted = Counter(stored)
        self._since.clear()
        self._end_s = now_s + TIME_SHARE * (now_s - self._began_s)

    def add(self, queue: str) -> None:
        """Note that a call was stored."""
        self._since[queue] += 1
