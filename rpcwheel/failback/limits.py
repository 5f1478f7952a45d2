"""Limits of what a worker takes from a journal: attempts a second, and calls due by a time.

A call that is not taken can be taken by another worker. So a limit delays no call longer than
needed: calls are taken only if they can begin within the horizon.
"""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from rpcwheel.durations import to_ns, to_seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rpcwheel.journal.backend import Route, StoredCall


class Rates:
    """Attempts a second for each of many targets, evenly spaced. Thread-safe."""

    def __init__(self, per_s: float) -> None:
        """Begin with no attempt.

        Args:
            per_s: Attempts a second for each target; above zero.
        """
        self._gap_ns = to_ns(1.0 / per_s)
        self._lock = threading.Lock()
        self._next_ns: dict[str, int] = {}

    def room(self, target: str, now_ns: int, within_ns: int) -> int:
        """Return how many attempts can begin within this time."""
        with self._lock:
            left_ns = within_ns - max(0, self._next_ns.get(target, 0) - now_ns)
        return left_ns // self._gap_ns + 1 if left_ns >= 0 else 0

    def reserve(self, target: str, now_ns: int) -> int:
        """Return after how many nanoseconds the next attempt may begin, which then counts."""
        with self._lock:
            start_ns = max(now_ns, self._next_ns.get(target, 0))
            self._next_ns[target] = start_ns + self._gap_ns
        return start_ns - now_ns


class TakeLimits:
    """What one queue takes. Used by one thread at a time."""

    def __init__(self, rates: Rates | None = None, *, due_by_ns: int | None = None) -> None:
        """Set the limits.

        Args:
            rates: Shared by the queues of a worker; None: no limit.
            due_by_ns: Only calls that are due by this time of the monotonic clock are taken.
        """
        self._rates = rates
        self._due_by_ns = due_by_ns
        self.found_none = False
        """Whether the journal had no such call when it was asked last."""

    def take(
        self,
        take: Callable[[Sequence[Route], float], list[StoredCall]],
        routes: Sequence[Route],
        within_s: float,
    ) -> list[StoredCall]:
        """Take calls by `take(routes, within_s)`; those that must wait are due later."""
        self.found_none = False
        now_ns = time.monotonic_ns()
        allowed = [self._limited(route, now_ns, to_ns(within_s)) for route in routes]
        if self._due_by_ns is not None:
            within_s = min(within_s, to_seconds(self._due_by_ns - now_ns))
        asked = [route for route in allowed if route.limit > 0]
        taken = take(asked, within_s) if asked else []
        self.found_none = not taken and len(asked) == len(routes)
        return taken if self._rates is None else [self._delayed(call, now_ns) for call in taken]

    def _limited(self, route: Route, now_ns: int, within_ns: int) -> Route:
        if self._rates is None:
            return route
        room = self._rates.room(route.target or route.queue, now_ns, within_ns)
        return replace(route, limit=min(route.limit, room))

    def _delayed(self, call: StoredCall, now_ns: int) -> StoredCall:
        if self._rates is None:
            return call
        delay_ns = self._rates.reserve(call.target or call.queue, now_ns)
        return replace(call, due_s=max(call.due_s, to_seconds(delay_ns)))
