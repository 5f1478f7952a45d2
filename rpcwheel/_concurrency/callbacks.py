"""User callbacks: what they are, calls that report exceptions, and weak references to them."""

from __future__ import annotations

import contextlib
import threading
import weakref
from typing import TYPE_CHECKING

from rpcwheel.errors import check_callback
from rpcwheel.events import CallbackFailed, emit

if TYPE_CHECKING:
    from collections.abc import Callable


def run_callback(
    subject: str,
    callback: Callable[..., object],
    *args: object,
    name: str = "",
    catch: type[BaseException] = Exception,
) -> None:
    """Call `callback(*args)`; an exception becomes a `CallbackFailed` event.

    Args:
        subject: The subject of the event.
        callback: User code.
        *args: Its arguments.
        name: The callback's name in the event; "": `callable_name(callback)`.
        catch: Which exceptions become an event: `BaseException` on rpcwheel's threads; on a user's
            thread `SystemExit` and `KeyboardInterrupt` are raised.
    """
    try:
        callback(*args)
    except catch as error:
        emit(CallbackFailed(subject, name or callable_name(callback), error))


def callable_name(function: object) -> str:
    """Return where a function or an object's class is defined, such as `shop.orders.Push.run`.

    For events. It contains no address, so that the rate limit of the log treats equal callbacks
    alike.
    """
    with contextlib.suppress(Exception):  # the `__getattr__` of a user's class
        named = function if hasattr(function, "__qualname__") else getattr(function, "func", None)
        named = named if hasattr(named, "__qualname__") else type(function)
        return f"{named.__module__}.{named.__qualname__}"
    return type(function).__name__


def weak_callback(method: Callable[..., object], *args: object) -> Callable[..., None]:
    """Return a function that calls a bound method as long as the method's object exists.

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
        """Create an empty set; `CallbackFailed` events name `subject`."""
        self._subject = subject
        self._lock = threading.RLock()  # a finalizer may close a channel at any point
        self._closed = False
        self._callbacks: list[Callable[[], object]] = []

    def add(self, callback: Callable[[], object]) -> Callable[[], None]:
        """Call `callback()` on close, or now if closed. Returns a function that removes it.

        Raises:
            TypeError: It is not callable, or a coroutine function.
        """
        check_callback(callback, "callback", "callback()")
        with self._lock:
            closed = self._closed
            if not closed:
                self._callbacks.append(callback)
        if closed:
            run_callback(self._subject, callback)
        return weak_callback(self._remove, callback)

    def run(self) -> None:
        """Call all callbacks on this thread. A second `run` calls none."""
        with self._lock:
            self._closed = True
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            run_callback(self._subject, callback)

    def _remove(self, callback: Callable[[], object]) -> None:
        with self._lock:
            if callback in self._callbacks:
                self._callbacks.remove(callback)
