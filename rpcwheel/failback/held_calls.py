"""The calls of a queue that are in the memory of this process, and the counts of all its calls."""

from __future__ import annotations

import threading
from collections import Counter
from concurrent.futures import Future
from dataclasses import dataclass, fields
from itertools import islice
from typing import TYPE_CHECKING, Final

from rpcwheel.errors import FailbackClosed, FailbackFull

from .queued_call import QueuedCallState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from .queued_call import QueuedCall, QueueEntry

AFTER_CLOSE: Final = "it came after close(), or at the end of the program"


@dataclass(frozen=True, slots=True)
class FailbackStats:
    """Counts of calls and attempts; a consistent snapshot.

    `calls == succeeded + failed + queued_total + dropped + rejected`, and
    `queued_total == redelivered + gave_up + lost + pending`. With a journal the second does not
    hold: other processes may deliver the calls of this one, and this one those of others.
    """

    calls: int = 0
    """Calls whose first attempt has ended."""
    succeeded: int = 0
    """Calls of functions whose first attempt succeeded; 0 in a kit, whose queues only see calls
    that have failed."""
    failed: int = 0
    """Calls whose first attempt failed with an error that `retry_on` does not name, or was
    canceled; callers got that error."""
    queued_total: int = 0
    """Calls whose first attempt failed and that were queued."""
    dropped: int = 0
    """Calls that failed while the queue was full and were dropped (`overflow="drop"`)."""
    rejected: int = 0
    """Calls that failed and were not queued; callers got `FailbackFull` or `FailbackClosed`."""
    attempts: int = 0
    """Attempts of queued calls, also those that were not sent; the first attempts are not among
    them."""
    redelivered: int = 0
    """Queued calls that succeeded."""
    gave_up: int = 0
    """Queued calls that had no attempts left, or failed with an error that `retry_on` does not
    name."""
    lost: int = 0
    """Queued calls that ended without being delivered: at `close`, at the end of the process, or
    because their timer was stopped or their event loop was closed."""
    pending: int = 0
    """Calls that are queued now, those with a running attempt included."""


class HeldCalls:
    """The calls of one queue in the memory. Thread-safe.

    They and the counts change under `lock`, so that `stats` is consistent. It is reentrant, because
    a finalizer can run at any allocation and may make a call that fails.
    """

    def __init__(self, now_ns: Callable[[], int], limit: int) -> None:
        """Begin without a call.

        Args:
            now_ns: The clock of their times.
            limit: How many calls there are if `append` refuses another one.
        """
        self._now_ns = now_ns
        self._limit = limit
        self.closes_at_ns: int | None = None
        """When the drain of `close` ends or has ended; None while the queue is open."""
        self.on_empty: Callable[[], object] | None = None
        """Called when the last call has left; must not block."""
        self._calls: dict[QueuedCall, None] = {}  # in the order in which they were queued
        self.reset()

    def reset(self) -> None:
        """Begin without a call, in a forked child."""
        for call in self:
            call.state, call.timeout = QueuedCallState.DONE, None
        self.lock = threading.RLock()
        self._calls = {}
        self._by_target: Counter[str] = Counter()
        self.counts = dict.fromkeys((field.name for field in fields(FailbackStats)), 0)
        self._waiters: list[Future[None]] = []

    def __len__(self) -> int:
        return len(self._calls)

    def __iter__(self) -> Iterator[QueuedCall]:
        """Iterate over the calls of now: a finalizer may add one meanwhile."""
        return iter(list(self._calls))

    @property
    def closed(self) -> bool:
        """Whether the queue takes no more calls."""
        return self.closes_at_ns is not None

    def close(self, at_ns: int) -> bool:
        """Take no more calls, and drain until a time; False if that was done before."""
        with self.lock:
            was_open = self.closes_at_ns is None
            if was_open:
                self.closes_at_ns = at_ns
            return was_open

    def append(self, call: QueuedCall) -> None:
        """Accept a failed call, and count it.

        Raises:
            FailbackFull, FailbackClosed: It is not accepted; the message says why.
        """
        with self.lock:  # so that no call is added after `close` has reported the others
            if self.closed:
                raise FailbackClosed(AFTER_CLOSE)
            count = len(self._calls)
            if count >= self._limit:
                raise FailbackFull(
                    f"max_pending ({count}) calls are queued already; raise max_pending, or "
                    'drop such calls with overflow="drop"'
                )
            self.add(call)
            self.count("queued_total")

    def add(self, call: QueuedCall) -> None:
        """Add a call, under the lock."""
        self._calls[call] = None
        if call.stored is not None:
            self._by_target[call.stored.target] += 1

    def remove(self, call: QueuedCall) -> bool:
        """Take a call out, under the lock; False if it has left already."""
        if call.state is QueuedCallState.DONE:
            return False
        call.leave()
        del self._calls[call]
        if call.stored is not None:
            target = call.stored.target
            self._by_target[target] -= 1
            if not self._by_target[target]:
                del self._by_target[target]
        timeout, call.timeout = call.timeout, None
        if timeout is not None:
            timeout.cancel()
        return True

    def in_state(self, state: QueuedCallState) -> list[QueuedCall]:
        """List the calls in a state."""
        with self.lock:
            return [call for call in self if call.state is state]

    def count_of(self, target: str) -> int:
        """Return how many calls of a target were taken from a journal."""
        return self._by_target[target]

    def entries(self, limit: int | None = None) -> list[QueueEntry]:
        """Describe the calls, oldest first, at most `limit` of them."""
        with self.lock:
            now_ns = self._now_ns()
            return [call.entry(now_ns) for call in islice(self, limit)]

    def count(self, counter: str) -> None:
        """Count a call whose first attempt has ended."""
        with self.lock:
            self.counts["calls"] += 1
            self.counts[counter] += 1

    def stats(self) -> FailbackStats:
        """Get the counts so far."""
        with self.lock:
            return FailbackStats(**self.counts | {"pending": len(self._calls)})

    def when_empty(self) -> Future[None]:
        """Get a future that is done as soon as there is no call. Cancel it after use."""
        future: Future[None] = Future()
        with self.lock:
            self._waiters = [waiter for waiter in self._waiters if not waiter.cancelled()]
            self._waiters.append(future)
        self.notify_if_empty()
        return future

    def notify_if_empty(self) -> None:
        """End the waits of `when_empty` if there is no call. Call it without the lock."""
        with self.lock:
            if self._calls:
                return
            waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if waiter.set_running_or_notify_cancel():
                waiter.set_result(None)
        if self.on_empty is not None:
            self.on_empty()
