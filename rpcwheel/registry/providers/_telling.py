"""Tells a watcher what there is, in the order in which it came to be, one call at a time."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from rpcwheel.observe import CallbackFailed, emit

if TYPE_CHECKING:
    from collections.abc import Callable

    from rpcwheel.registry.provider import View, Watcher

__all__ = ["Telling"]


class Telling:
    """The news for one watcher. Thread-safe; itself the `Watch` of a provider that needs no more.

    `note` takes news, under whatever lock the provider has, and calls nobody; `tell`, under none,
    passes on what was noted. If another thread is at it already, that one does it. Of views in a
    row only the last is told, and it only if it differs from what was told before, or if the
    watcher was made suspicious meanwhile.
    """

    def __init__(self, watcher: Watcher, closed: Callable[[Telling], object] | None = None) -> None:
        """Take note of the watcher; `closed` is called when it is to be told no more."""
        self._watcher = watcher
        self._on_close = closed
        self._lock = threading.Lock()  # never held during a call of anybody
        self._view: View | None = None  # to be told
        self._doubt: str | None = None  # to be told before it
        self._told: View | None = None
        self._telling = False
        self._closed = False

    @property
    def closed(self) -> bool:
        """Whether nothing is told any more."""
        return self._closed

    def note(self, news: View | str) -> None:
        """Take a view, or the reason to be suspicious, which makes an older view void."""
        with self._lock:
            if isinstance(news, str):
                self._doubt, self._view, self._told = self._doubt or news, None, None
            else:
                self._view = news

    def tell(self) -> None:
        """Pass on what was noted. Never raises."""
        while (news := self._next()) is not None:
            try:
                if isinstance(news, str):
                    self._watcher.suspect(news)
                else:
                    self._watcher.saw(news)
            except Exception as error:  # noqa: BLE001 - one watcher must not stop the others
                emit(CallbackFailed(subject="registry", callback=repr(self._watcher), error=error))
            finally:
                with self._lock:
                    self._telling = False

    def close(self) -> None:
        """Tell nothing from now on. Idempotent; any thread."""
        with self._lock:
            closed, self._closed = self._closed, True
        if not closed and self._on_close is not None:
            self._on_close(self)

    def _next(self) -> View | str | None:
        """What to tell now; None if nothing, or if another thread tells it."""
        with self._lock:
            if self._telling or self._closed:
                return None
            if self._doubt is not None:
                news: View | str
                news, self._doubt = self._doubt, None
            elif self._view is None or self._is_known(self._view):
                return None
            else:
                news = self._told = self._view
                self._view = None
            self._telling = True
            return news

    def _is_known(self, view: View) -> bool:
        return self._told is not None and self._told.records == view.records
