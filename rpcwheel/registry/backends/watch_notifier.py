"""Calls a watcher with what its backend finds, in order, one call at a time."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from rpcwheel._concurrency.callbacks import run_callback
from rpcwheel._concurrency.notifications import NotificationQueue

if TYPE_CHECKING:
    from collections.abc import Callable

    from rpcwheel.registry.backend import View, Watcher

__all__ = ["WatchNotifier"]


class WatchNotifier:
    """The notifications of one watcher, and the `Watch` of a backend that needs no other.

    `add` may be called under the backend's lock, and calls nobody. `start`, under no lock, calls
    the watcher on this thread, unless another thread does so already; then that one goes on. A view
    with the same records as the one before is left out, unless contact was lost in between.
    """

    def __init__(
        self, watcher: Watcher, closed: Callable[[WatchNotifier], object] | None = None
    ) -> None:
        """`closed(self)` is called when the watch is closed."""
        self._watcher = watcher
        self._on_close = closed
        self._queue = NotificationQueue(run=lambda job: job())
        self._last: View | None = None  # since contact was lost
        self.closed = False

    def add(self, news: View | str) -> None:
        """Add a view, or the reason why contact was lost. Not by two threads at once."""
        if isinstance(news, str):
            self._last = None
            self._queue.add(partial(self._call, self._watcher.suspect, news))
        elif self._last is None or self._last.records != news.records:
            self._last = news
            self._queue.add(partial(self._call, self._watcher.saw, news))

    def start(self) -> None:
        """Call the watcher with what was added."""
        self._queue.start()

    def close(self) -> None:
        """Call the watcher no more. Idempotent; any thread."""
        closed, self.closed = self.closed, True
        if not closed and self._on_close is not None:
            self._on_close(self)

    def _call(self, method: Callable[..., object], news: View | str) -> None:
        if not self.closed:
            run_callback("registry", method, news, name=repr(self._watcher))
