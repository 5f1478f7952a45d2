"""Calls of user callbacks, and callbacks that keep no object alive."""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING

from rpcwheel.events import CallbackFailed, emit

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["CloseCallbacks", "run_callback", "weak_callback"]


def run_callback(
    subject: str,
    callback: Callable[..., object],
    *args: object,
    name: str = "",
    catch: type[BaseException] = Exception,
) -> None:
    """Call `callback(*args)`; an exception becomes a `CallbackFailed` event.

    Args:
        subject: Of the event.
        callback: User code.
        *args: Its arguments.
        name: The callback's name in the event; "": its repr.
        catch: What becomes an event. `BaseException` on threads of our own; on a user's thread
            `SystemExit` and `KeyboardInterrupt` are the user's.
    """
    try:
        callback(*args)
    except catch as error:
        emit(CallbackFailed(subject, name or repr(callback), error))


def weak_callback(method: Callable[..., object], *args: object) -> Callable[..., None]:
    """Return a function that calls a bound method as long as its object lives.

    For timers, gRPC's threads and close callbacks, which must not keep a channel alive.

    Args:
        method: A bound method.
        *args: Arguments before those of the call.
    """
    reference = weakref.WeakMethod(method)

    def call(*more: object) -> None:
        alive = reference()
        if alive is not None:
            alive(*args, *more)

    return call


class CloseCallbacks:
    """The callbacks that a channel calls once, when it is closed. Thread-safe."""

    def __init__(self, subject: str) -> None:
        """`subject` is that of the `CallbackFailed` events."""
        self._subject = subject
        self._lock = threading.RLock()  # finalizers close channels anywhere
        self._closed = False
        self._callbacks: list[Callable[[], object]] = []

    def add(self, callback: Callable[[], object]) -> Callable[[], None]:
        """Call `callback()` on close, or at once after it; returns a function that removes it."""
        with self._lock:
            closed = self._closed
            if not closed:
                self._callbacks.append(callback)
        if closed:
            run_callback(self._subject, callback)
        return weak_callback(self._remove, callback)

    def run(self) -> None:
        """Call all of them, on this thread; a second time, none."""
        with self._lock:
            self._closed = True
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            run_callback(self._subject, callback)

    def _remove(self, callback: Callable[[], object]) -> None:
        with self._lock:
            if callback in self._callbacks:
                self._callbacks.remove(callback)
