"""Calls a watcher with what its backend finds, one call at a time."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from rpcwheel._concurrency.callbacks import run_callback
from rpcwheel._concurrency.executor import SerialExecutor
from rpcwheel.registry.backend import View

if TYPE_CHECKING:
    from collections.abc import Callable

    from rpcwheel.registry.backend import Watcher


class WatchNotifier:
    """The notifications of one watcher, and a `Watch` for backends that need no other.

    `add` does not call the watcher, so a lock may be held. `start`, without locks, calls
    the watcher on this thread, unless another thread is already calling it; then that one goes on.

    A view with the same records as the last one that the watcher got is left out, unless contact
    was lost in between. A loss of contact is left out if there was no view since the last one.

    `View.changed` of an added view is relative to the view that was added before. The watcher gets
    it relative to the view that it got before: exactly the ids that differ, or None.
    """

    def __init__(
        self, watcher: Watcher, closed: Callable[[WatchNotifier], object] | None = None
    ) -> None:
        """Create a notifier; `closed(self)` is called when the watch is closed."""
        self._watcher = watcher
        self._on_close = closed
        self._executor = SerialExecutor(run=lambda job: job())
        self._last: View | str | None = None  # what the watcher got last
        self.closed = False

    def add(self, news: View | str) -> None:
        """Add a view, or the reason why contact was lost. Not by two threads at once."""
        self._executor.add(partial(self._call, news))

    def start(self) -> None:
        """Call the watcher with the added items."""
        self._executor.start()

    def close(self) -> None:
        """Call the watcher no more. Idempotent; any thread."""
        closed, self.closed = self.closed, True
        if not closed and self._on_close is not None:
            self._on_close(self)

    def _call(self, news: View | str) -> None:
        if self.closed:
            return
        if isinstance(news, str):
            if not isinstance(self._last, str):
                self._last = news
                run_callback("registry", self._watcher.on_contact_lost, news)
        elif view := _relative(news, self._last):
            self._last = view
            run_callback("registry", self._watcher.on_view, view)


def _relative(view: View, previous: View | str | None) -> View | None:
    """Return the view with exactly the ids that changed; None if its records are the same."""
    if not isinstance(previous, View):
        return view if view.changed is None else View(view.records, view.revision)
    if view.changed is None:
        return None if view.records == previous.records else view
    old, new = previous.records, view.records
    changed = frozenset(key for key in view.changed if old.get(key) != new.get(key))
    return View(new, view.revision, changed) if changed else None
