"""The state of a channel of many members, told to whoever subscribes to it.

gRPC's own way costs a thread for each member. Here the states are looked at, five times a second
and whenever something is known to have changed, as long as anybody subscribes; it is mostly used by
those who wait for the first connection. A worker looks, and calls the subscribers one after the
other.
"""

from __future__ import annotations

import threading
import weakref
from functools import partial
from typing import TYPE_CHECKING, Final

from rpcwheel._concurrency.executor import EXECUTOR
from rpcwheel.observe import CallbackFailed, emit

from ._timeout import timeout_on

if TYPE_CHECKING:
    from collections.abc import Callable

    import grpc

    from rpcwheel.timer import Timeout
    from rpcwheel.timer.api import Timer

    State = grpc.ChannelConnectivity
    Callback = Callable[[State], object]

__all__ = ["Watch"]

LOOK_NS: Final = 200_000_000


class Watch:
    """Who is told of one channel's state. Thread-safe."""

    def __init__(self, name: str, look: Callable[[bool], State], timer: Timer | None) -> None:
        """Begin with nobody.

        Args:
            name: Of the channel.
            look: Gives the state; `look(True)` has members connect.
            timer: When to look again.
        """
        self._name = name
        self._look = look
        self._timer = timer
        self._lock = threading.RLock()
        self._all: list[tuple[Callback, bool]] = []
        self._told: list[State | None] = []
        self._timeout: Timeout | None = None
        self._looking = self._again = self._closed = False

    def add(self, callback: Callback, *, try_to_connect: bool) -> None:
        """Tell `callback` the state, and each change from now on."""
        with self._lock:
            if self._closed:
                return
            self._all.append((callback, try_to_connect))
            self._told.append(None)
        self.stir()

    def remove(self, callback: Callback) -> None:
        """Tell `callback` no more; once, if it was added more than once."""
        with self._lock:
            for place, (known, _) in enumerate(self._all):
                if known == callback:
                    del self._all[place], self._told[place]
                    break
            idle = None if self._all else self._timeout
            self._timeout = self._timeout if self._all else None
        if idle is not None:
            idle.cancel()

    def close(self) -> None:
        """Tell nobody any more."""
        with self._lock:
            self._closed = True
            self._all, self._told = [], []
            timeout, self._timeout = self._timeout, None
        if timeout is not None:
            timeout.cancel()

    def stir(self) -> None:
        """Look soon: something may have changed."""
        with self._lock:
            if not self._all:
                return
            if self._looking:
                self._again = True
                return
            self._looking = True
        EXECUTOR.submit(self, self._work)

    def _work(self) -> None:
        """On a worker, one at a time."""
        while True:
            self._tell()
            with self._lock:
                if not self._again:
                    self._looking = False
                    break
                self._again = False
        self._later()

    def _tell(self) -> None:
        with self._lock:
            connects = any(connects for _, connects in self._all)
        try:
            state = self._look(connects)
        except Exception as error:  # noqa: BLE001 - the user's `connect`; told as an event
            emit(CallbackFailed(self._name, callback="connect", error=error))
            return
        with self._lock:
            news = [
                one[0] for one, told in zip(self._all, self._told, strict=True) if told != state
            ]
            self._told = [state] * len(self._all)
        for callback in news:
            try:
                callback(state)
            except BaseException as error:  # noqa: BLE001 - the user's; the others must be told
                emit(CallbackFailed(self._name, callback=repr(callback), error=error))

    def _later(self) -> None:
        with self._lock:
            if not self._all or self._timeout is not None:
                return
        timeout = timeout_on(self._timer, partial(_due, weakref.ref(self)), LOOK_NS)
        with self._lock:
            if timeout is not None and self._all and self._timeout is None:
                self._timeout, timeout = timeout, None
        if timeout is not None:
            timeout.cancel()

    def due(self) -> None:
        """The time has come to look."""
        with self._lock:
            self._timeout = None
        self.stir()


def _due(watch: weakref.ref[Watch], _: Timeout) -> None:
    """On the timer's thread, which holds no channel alive."""
    alive = watch()
    if alive is not None:
        alive.due()
