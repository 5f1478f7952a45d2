"""Subscriptions to the state of a balanced channel of `grpc`.

gRPC's own subscriptions need a thread for each subchannel. Here a worker reads the states five
times a second, and after known changes, while there are subscribers.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final

from rpcwheel._concurrency.callbacks import weak_callback
from rpcwheel._concurrency.executor import SerialExecutor, reset_after_fork
from rpcwheel.events import CallbackFailed, emit
from rpcwheel.timer.manual import start_timeout
from rpcwheel.transport.subscriptions import StateSubscribers

if TYPE_CHECKING:
    from collections.abc import Callable

    from rpcwheel.timer import Timeout
    from rpcwheel.timer.api import Timer
    from rpcwheel.transport.subscriptions import State, Subscriber

POLL_INTERVAL_S: Final = 0.2
"""How often the state is read while there are subscribers."""


class BalancerSubscriptions(StateSubscribers):
    """The subscribers to one channel's state, which a worker reads for them. Thread-safe."""

    def __init__(self, name: str, get_state: Callable[[bool], State], timer: Timer | None) -> None:
        """Make a list without subscribers.

        `get_state(True)` also connects subchannels. The timer schedules the reads of the state; it
        is `shared_timer()` if it is None.
        """
        super().__init__(name)
        self._get_state = get_state
        self._timer = timer
        self._timeout: Timeout | None = None
        self._worker = SerialExecutor(limit=1)  # one read serves all that wait
        reset_after_fork(self)

    def reset(self) -> None:
        """Forget the next read in a forked child, whose timers have no timeouts."""
        self._lock = threading.RLock()
        self._timeout = None

    def _added(self, _: Subscriber) -> None:
        self.read_soon()

    def _removed(self) -> None:
        with self._lock:
            timeout = None if self._subscribers else self._timeout
            self._timeout = self._timeout if self._subscribers else None
        if timeout is not None:
            timeout.cancel()

    def read_soon(self) -> None:
        """Read the state on a worker, because it may have changed."""
        if self._subscribers:
            self._worker.submit(self._read)

    def _read(self) -> None:
        """Report the state and schedule the next read. Runs on a worker, never twice at once."""
        with self._lock:
            connects = any(subscriber.connects for subscriber in self._subscribers)
        try:
            state = self._get_state(connects)
        except Exception as error:  # noqa: BLE001 - of a channel that `connect` made
            emit(CallbackFailed(self._target, "get_state", error))
        else:
            with self._lock:
                self._report(state)
        self._read_later()

    def _read_later(self) -> None:
        with self._lock:
            if not self._subscribers or self._timeout is not None:
                return
        on_timeout, name = weak_callback(self._on_timeout), f"read of the state of {self._target}"
        timeout = start_timeout(self._timer, on_timeout, POLL_INTERVAL_S, name)
        with self._lock:
            if self._subscribers and self._timeout is None:
                self._timeout, timeout = timeout, None
        if timeout is not None:
            timeout.cancel()

    def _on_timeout(self, _: Timeout) -> None:
        with self._lock:
            self._timeout = None
        self.read_soon()
