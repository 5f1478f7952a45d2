"""`Outage`: whether the engine of a journal fails, and for how long."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from rpcwheel.events import JournalFailed, JournalRecovered, emit

if TYPE_CHECKING:
    from collections.abc import Callable

    from rpcwheel.errors import JournalError


class Outage:
    """The failures of an engine. Thread-safe. Emits an event for the first, and for the end."""

    def __init__(
        self, url: str, now_ns: Callable[[], int], unstored_results: Callable[[], int]
    ) -> None:
        """Begin without a failure; events have the URL, and how many results wait."""
        self._url = url
        self._now_ns = now_ns
        self._unstored_results = unstored_results
        self._since_ns: int | None = None
        self._refuses_writes = False
        """Whether a request that writes has failed; then one that only reads is no recovery."""
        self.is_over = False
        """Whether the journal was closed: then requests fail because of that."""
        self.reset()

    def reset(self) -> None:
        """Make a lock, also in a forked child.

        A finalizer or signal handler that runs under it may make a call that fails. CPython 3.14
        runs handlers also when `__enter__` has returned. So the lock is reentrant.
        """
        self._lock = threading.RLock()

    @property
    def is_failing(self) -> bool:
        """Whether the last request failed."""
        return self._since_ns is not None

    @property
    def seconds(self) -> float:
        """How long requests have failed; 0 if the last one succeeded."""
        since_ns = self._since_ns
        return 0.0 if since_ns is None else (self._now_ns() - since_ns) / 1e9

    def failed(self, error: JournalError, *, writes: bool = True) -> None:
        """Note that a request has failed."""
        now_ns = self._now_ns()  # outside, because a finalizer may run in it
        with self._lock:
            if self.is_over:
                return
            self._refuses_writes = self._refuses_writes or writes
            is_first = self._since_ns is None
            if is_first:
                self._since_ns = now_ns
        if is_first:
            emit(JournalFailed(self._url, error, self._unstored_results()))

    def succeeded(self, *, writes: bool = True) -> None:
        """Note that a request has succeeded."""
        with self._lock:
            since_ns = self._since_ns
            if since_ns is None or (self._refuses_writes and not writes):
                return
            self._since_ns, self._refuses_writes = None, False
        emit(JournalRecovered(self._url, (self._now_ns() - since_ns) / 1e9))
