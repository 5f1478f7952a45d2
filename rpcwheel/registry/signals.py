"""SIGTERM and SIGINT for whoever serves: one handler for all servers of the process.

Python runs a handler on the main thread between any two instructions, perhaps while that thread
holds a lock. So what is told here must take none: it only puts a word into a `SimpleQueue`, or
hands over with `call_soon_threadsafe`.

The handlers are there as long as somebody wants to be told, and those of before come back
afterwards; a handler can be set on the main thread only. A signal that was ignored stays ignored,
and one whose handler is not Python's is left alone, as it could not be put back.
"""

from __future__ import annotations

import os
import signal
import threading
from typing import TYPE_CHECKING, Final, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    Told: TypeAlias = Callable[[str], object]

__all__ = ["SIGNALS", "Signals", "may_handle", "of_a_loop"]

ENDS: Final = (signal.SIGTERM, signal.SIGINT)


def may_handle() -> bool:
    """Whether handlers can be set here: on the main thread of the process."""
    return threading.current_thread() is threading.main_thread()


def of_a_loop() -> str:
    """The name of a signal for which asyncio's `loop.add_signal_handler` has set a handler; or "".

    Such a handler is called whatever `signal.signal` sets, as the signal's number goes into a pipe
    that the loop reads. It is known by what asyncio sets for it; uvloop's can't be told.
    """
    for number in ENDS:
        name = getattr(signal.getsignal(number), "__name__", "")
        if name == "_sighandler_noop":
            return number.name
    return ""


class Signals:
    """Who is told of the signals that end a process."""

    def __init__(self) -> None:
        self._told: tuple[Told, ...] = ()
        self._before: dict[signal.Signals, object] = {}

    def add(self, told: Told) -> None:
        """Call `told(name)` at each signal, on the main thread; it takes no lock and never raises.

        On the main thread; elsewhere nothing is done.
        """
        if not may_handle():
            return
        self._told = (*self._told, told)
        for number in ENDS:
            before = signal.getsignal(number)
            if number not in self._before and before not in {None, signal.SIG_IGN}:
                self._before[number] = before
                signal.signal(number, self._came)

    def remove(self, told: Told) -> None:
        """Call it no more. Idempotent.

        Off the main thread the handlers stay, and the next signal puts those of before back.
        """
        self._told = tuple(
            one for one in self._told if one != told
        )  # bound methods are equal, not the same
        if not self._told and may_handle():
            self._put_back()

    def forget(self) -> None:
        """In a forked child, whose servers are the parent's: nobody is told."""
        self._told = ()
        if may_handle():
            self._put_back()

    def _put_back(self) -> None:
        for number, before in self._before.items():
            if signal.getsignal(number) == self._came:  # else somebody set another meanwhile
                signal.signal(number, before)  # type: ignore[arg-type]  # what getsignal() gave
        self._before.clear()

    def _came(self, number: int, _: FrameType | None) -> None:
        if not self._told:
            self._put_back()
            signal.raise_signal(number)
            return
        name = signal.Signals(number).name
        for told in self._told:
            told(name)


SIGNALS: Final = Signals()
"""Those of this process."""

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=SIGNALS.forget)
