"""The lease of the calls that a queue has taken from its journal.

The process measures it by a clock that cannot be set and, on Linux, goes on while the machine is
suspended: no attempt begins after its end. With a `ManualTimer`, that is the clock of the timer if
the journal is in SQLite.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

from rpcwheel.durations import to_ns

if TYPE_CHECKING:
    from collections.abc import Callable

    from rpcwheel.journal.journal import Journal

    from .queued_call import QueuedCall


class Lease:
    """One lease for all taken calls, under the name of a worker.

    It is kept on the journal's `now_ns`, and ends there before it ends in the engine.
    """

    def __init__(
        self, journal: Journal, queue: str, on_late: Callable[[list[int]], object]
    ) -> None:
        """Begin without a call; `on_late` as in `Journal.add_worker`."""
        self._journal = journal
        self._queue = queue
        self._on_late = on_late
        self._length_ns = to_ns(journal.url.lease_s)
        self.begin()

    def begin(self) -> None:
        """Begin another lease: results for the calls of the old one must not be accepted."""
        self.worker = secrets.token_hex(8)
        """The name under which calls are taken."""
        self.ends_ns = 0
        self._journal.add_worker(self.worker, self._queue, self._on_late)

    def is_valid_for(self, call: QueuedCall) -> bool:
        """Whether no other process may have a call."""
        return call.worker == self.worker and self._journal.now_ns() < self.ends_ns

    def extend(self, asked_ns: int) -> None:
        """Note that the engine has prolonged the lease, when it was asked at a time."""
        self.ends_ns = asked_ns + self._length_ns

    def keep(self, *, is_used: bool) -> bool:
        """Renew the lease after a third of it if there are calls. Blocks. False: it has ended.

        Raises:
            JournalError: The engine is not available.
        """
        now_ns = self._journal.now_ns()
        if now_ns < self.ends_ns - self._length_ns * 2 // 3:
            return True
        if now_ns >= self.ends_ns > 0:
            return False
        if is_used:
            # Attempts that were due after its end were refused, and no timeout starts them again.
            if not self._journal.renew(self.worker) or self._journal.now_ns() >= self.ends_ns:
                return False
            self.extend(now_ns)
        return True
