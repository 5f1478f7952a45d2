"""Handlers of SIGTERM and SIGINT for the servers of this process.

Python runs a signal handler on the main thread between any two instructions, perhaps while that
thread holds a lock. So a callback must not take a lock; `SimpleQueue.put` does not.

The handlers are installed as long as there are callbacks; afterwards the previous ones are
restored. Python sets signal handlers on the main thread only. A signal that was ignored stays
ignored, and a signal whose handler is not Python's is left alone, as that handler could not be
restored. If the application has replaced a handler meanwhile, its own stays. It may call the
replaced handler, which calls the handler before it if there are no callbacks.
"""

from __future__ import annotations

import signal
import threading
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Final, TypeAlias

from rpcwheel._concurrency.executor import reset_after_fork

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    Callback: TypeAlias = Callable[[str], object]

TERMINATION_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


def is_main_thread() -> bool:
    """Whether this is the main thread, on which signal handlers can be set."""
    return threading.current_thread() is threading.main_thread()


def signal_handled_by_loop() -> str:
    """The name of a signal that has a handler of `loop.add_signal_handler`; or "".

    A loop gets such a signal through `signal.set_wakeup_fd`, whatever handler `signal.signal` sets
    later. The signal is recognized by the name of the handler that asyncio or uvloop sets for it.
    """
    for number in TERMINATION_SIGNALS:
        name = getattr(signal.getsignal(number), "__name__", "")
        if name in ("_sighandler_noop", "_Loop__sighandler"):
            return number.name
    return ""


class SignalHandlers:
    """The callbacks for signals that end a process."""

    def __init__(self) -> None:
        self._callbacks: dict[Callback, None] = {}
        """In order. Each change is one step: another thread may make one at the same moment."""
        self._installed: dict[signal.Signals, partial[None]] = {}
        """The handlers, `_handle` with the previous handler."""

    def add(self, callback: Callback) -> None:
        """Call `callback(name)` at each signal, on the main thread; it must not lock or raise.

        Does nothing on a thread other than the main thread.
        """
        if not is_main_thread():
            return
        self._callbacks[callback] = None
        for number in TERMINATION_SIGNALS:
            previous = signal.getsignal(number)
            is_replaceable = previous is not None and previous is not signal.SIG_IGN
            if number not in self._installed and is_replaceable:
                self._installed[number] = partial(self._handle, previous)
                signal.signal(number, self._installed[number])

    def remove(self, callback: Callback) -> None:
        """Stop calling `callback`. Idempotent.

        On a thread other than the main thread the handlers stay, and the next signal restores the
        previous ones.
        """
        self._callbacks.pop(callback, None)
        if not self._callbacks and is_main_thread():
            self._restore()

    def reset(self) -> None:
        """Remove all callbacks in a forked child, as the servers are the parent's."""
        self._callbacks.clear()
        if is_main_thread():
            self._restore()

    def _restore(self) -> None:
        for number, handler in tuple(self._installed.items()):  # another signal may clear it
            previous = handler.args[0]
            if signal.getsignal(number) is handler:  # the application may have replaced it
                signal.signal(number, previous)
        self._installed.clear()

    def _handle(self, previous: object, number: int, frame: FrameType | None) -> None:
        if self._callbacks:
            name = signal.Signals(number).name
            for callback in tuple(self._callbacks):
                callback(name)
            return
        self._restore()  # if the last callback was removed on another thread
        if callable(previous):
            previous(number, frame)
        elif signal.getsignal(number) is previous:  # SIG_DFL was restored
            signal.raise_signal(number)


SIGNAL_HANDLERS: Final = SignalHandlers()
"""The callbacks of the servers of this process."""

reset_after_fork(SIGNAL_HANDLERS)


class SignalThread:
    """Calls a function at each signal that ends the process, on a thread that may block."""

    def __init__(self, *, is_wanted: bool) -> None:
        """Create it; it does nothing if it is not wanted."""
        self.is_wanted = is_wanted
        self._names: SimpleQueue[str | None] = SimpleQueue()  # None ends the thread

    def start(self, callback: Callable[[str, int], object]) -> None:
        """Call `callback(name, number_of_earlier_signals)` at each, if this is the main thread.

        Raises:
            RuntimeError: The thread can't be started.
        """
        if self.is_wanted and is_main_thread():
            threading.Thread(
                target=self._run, args=(callback,), name="rpcwheel-signals", daemon=True
            ).start()
            SIGNAL_HANDLERS.add(self._names.put)

    def restore(self) -> None:
        """Remove the handlers, which needs the main thread; `SignalHandlers.remove`. Idempotent."""
        SIGNAL_HANDLERS.remove(self._names.put)

    def end(self) -> None:
        """Remove the handlers, as far as this thread can, and end the thread."""
        self.restore()
        self._names.put(None)

    def _run(self, callback: Callable[[str, int], object]) -> None:
        for earlier, name in enumerate(iter(self._names.get, None)):
            callback(name, earlier)
