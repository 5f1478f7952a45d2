"""Who is told that a channel is closed."""

from __future__ import annotations

import threading
import weakref
from functools import partial
from typing import TYPE_CHECKING

from rpcwheel.observe import CallbackFailed, emit

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Closers", "told"]


class Closers:
    """Callbacks for one end. Thread-safe."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.RLock()  # for what ends by the collector
        self._over = False
        self._all: list[Callable[[], object]] = []

    def add(self, callback: Callable[[], object]) -> Callable[[], None]:
        """Call it at the end, at once if that is past; gives what to call to have it forgotten."""
        with self._lock:
            over = self._over
            if not over:
                self._all.append(callback)
        if over:
            told(self._name, callback)
        return partial(_forget, weakref.ref(self), callback)

    def forget(self, callback: Callable[[], object]) -> None:
        """Do not call it."""
        with self._lock:
            if callback in self._all:
                self._all.remove(callback)

    def tell(self) -> None:
        """This is the end. A second time, nothing."""
        with self._lock:
            self._over = True
            callbacks, self._all = self._all, []
        for callback in callbacks:
            told(self._name, callback)


def told(name: str, job: Callable[[], object], listener: object = None) -> None:
    """Call what is the user's; what it raises is an event.

    Args:
        name: Of the channel.
        job: What to call.
        listener: What to name, if not `job`.
    """
    try:
        job()
    except Exception as error:  # noqa: BLE001 - told as an event; the others must be told too
        emit(CallbackFailed(subject=name, callback=repr(listener or job), error=error))


def _forget(closers: weakref.ref[Closers], callback: Callable[[], object]) -> None:
    """What who is told of the end holds keeps no channel alive."""
    alive = closers()
    if alive is not None:
        alive.forget(callback)
