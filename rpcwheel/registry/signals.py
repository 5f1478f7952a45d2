"""Handlers of SIGTERM and SIGINT for the servers of this process.

Python runs a signal handler on the main thread between any two instructions, perhaps while that
thread holds a lock. So a callback must not take a lock; `SimpleQueue.put` does not.

The handlers are installed as long as there are callbacks; afterwards the previous ones are
restored. Both is possible on the main thread only. A signal that was ignored stays ignored, and a
signal whose handler is not Python's is left alone, as that handler could not be restored.
"""

from __future__ import annotations

import signal
import threading
from typing import TYPE_CHECKING, Final, TypeAlias

from rpcwheel._concurrency.executor import reset_after_fork

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    Callback: TypeAlias = Callable[[str], object]

__all__ = ["SIGNAL_HANDLERS", "SignalHandlers", "is_main_thread", "signal_handled_by_loop"]

TERMINATION_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


def is_main_thread() -> bool:
    """Whether this is the main thread, on which signal handlers can be set."""
    return threading.current_thread() is threading.main_thread()


def signal_handled_by_loop() -> str:
    """The name of a signal that has a handler of asyncio's `loop.add_signal_handler`; or "".

    Such a handler is called whatever `signal.signal` sets, because the signal's number goes into a
    pipe that the loop reads. It is recognized by the function that asyncio sets for it; handlers of
    uvloop can't be detected.
    """
    for number in TERMINATION_SIGNALS:
        name = getattr(signal.getsignal(number), "__name__", "")
        if name == "_sighandler_noop":
            return number.name
    return ""


class SignalHandlers:
    """The callbacks for signals that end a process."""

    def __init__(self) -> None:
        self._callbacks: tuple[Callback, ...] = ()
        self._previous: dict[signal.Signals, object] = {}

    def add(self, callback: Callback) -> None:
        """Call `callback(name)` at each signal, on the main thread; it must not lock or raise.

        On another thread than the main one this does nothing.
        """
        if not is_main_thread():
            return
        self._callbacks = (*self._callbacks, callback)
        for number in TERMINATION_SIGNALS:
            previous = signal.getsignal(number)
            if number not in self._previous and previous not in {None, signal.SIG_IGN}:
                self._previous[number] = previous
                signal.signal(number, self._handle)

    def remove(self, callback: Callback) -> None:
        """Call it no more. Idempotent.

        On another thread than the main one the handlers stay, and the next signal restores the
        previous ones.
        """
        self._callbacks = tuple(
            one for one in self._callbacks if one != callback
        )  # bound methods are equal, not identical
        if not self._callbacks and is_main_thread():
            self._restore()

    def reset(self) -> None:
        """Remove all callbacks in a forked child, as the servers are the parent's."""
        self._callbacks = ()
        if is_main_thread():
            self._restore()

    def _restore(self) -> None:
        for number, previous in self._previous.items():
            if signal.getsignal(number) == self._handle:  # else it was replaced meanwhile
                signal.signal(number, previous)  # type: ignore[arg-type]  # what getsignal() gave
        self._previous.clear()

    def _handle(self, number: int, _: FrameType | None) -> None:
        if not self._callbacks:
            self._restore()
            signal.raise_signal(number)
            return
        name = signal.Signals(number).name
        for callback in self._callbacks:
            callback(name)


SIGNAL_HANDLERS: Final = SignalHandlers()
"""Those of this process."""

reset_after_fork(SIGNAL_HANDLERS)
