"""Subscriptions to the state of a balanced channel of `grpc`.

gRPC's own subscriptions need a thread for each subchannel. Here a worker reads the states five
times a second, and after known changes, while there are subscribers. It calls them one after the
other.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final

from rpcwheel._concurrency.callbacks import run_callback, weak_callback
from rpcwheel._concurrency.executor import SerialExecutor
from rpcwheel.errors import TimerError
from rpcwheel.events import CallbackFailed, emit
from rpcwheel.timer import shared_timer

if TYPE_CHECKING:
    from collections.abc import Callable

    import grpc

    from rpcwheel.timer import Timeout
    from rpcwheel.timer.api import Timer

    State = grpc.ChannelConnectivity
    Callback = Callable[[State], object]

POLL_INTERVAL_S: Final = 0.2
"""How often the state is read while there are subscribers."""


class _BalancerSubscription:
    __slots__ = ("callback", "connects", "last")

    def __init__(self, callback: Callback, *, connects: bool) -> None:
        self.callback = callback
        self.connects = connects
        self.last: State | None = None


class BalancerSubscriptions:
    """The subscribers to one channel's state. Thread-safe."""

    def __init__(self, name: str, get_state: Callable[[bool], State], timer: Timer | None) -> None:
        """Make a list without subscribers.

        Args:
            name: The name of the channel.
            get_state: Returns the state; `get_state(True)` also connects subchannels.
            timer: The timer that schedules the reads; None for `shared_timer()`.
        """
        self._name = name
        self._get_state = get_state
        self._timer = timer
        self._lock = threading.RLock()
        self._subscriptions: list[_BalancerSubscription] = []
        self._timeout: Timeout | None = None
        self._closed = False
        self._worker = SerialExecutor(limit=1)  # one read serves all that wait

    def add(self, callback: Callback, *, try_to_connect: bool) -> None:
        """Call `callback(state)` soon and after each change, on a worker."""
        with self._lock:
            if self._closed:
                return
            self._subscriptions.append(_BalancerSubscription(callback, connects=try_to_connect))
        self.read_soon()

    def remove(self, callback: Callback) -> None:
        """Remove one subscription of this callback; an unknown callback is not an error."""
        with self._lock:
            for subscription in self._subscriptions:
                if subscription.callback == callback:
                    self._subscriptions.remove(subscription)
                    break
            timeout = None if self._subscriptions else self._timeout
            self._timeout = self._timeout if self._subscriptions else None
        if timeout is not None:
            timeout.cancel()

    def close(self) -> None:
        """Remove all callbacks."""
        with self._lock:
            self._closed = True
            self._subscriptions = []
            timeout, self._timeout = self._timeout, None
        if timeout is not None:
            timeout.cancel()

    def read_soon(self) -> None:
        """Read the state on a worker, because it may have changed."""
        if self._subscriptions:
            self._worker.submit(self._read)

    def _read(self) -> None:
        """Read the state and schedule the next read. Runs on a worker, never twice at once."""
        self._report()
        self._read_later()

    def _report(self) -> None:
        with self._lock:
            connects = any(subscription.connects for subscription in self._subscriptions)
        try:
            state = self._get_state(connects)
        except Exception as error:  # noqa: BLE001 - of a channel that `connect` made
            emit(CallbackFailed(self._name, "get_state", error))
            return
        with self._lock:
            changed = [
                subscription
                for subscription in self._subscriptions
                if subscription.last is not state
            ]
            for subscription in changed:
                subscription.last = state
        for subscription in changed:
            run_callback(self._name, subscription.callback, state, catch=BaseException)

    def _read_later(self) -> None:
        with self._lock:
            if not self._subscriptions or self._timeout is not None:
                return
        on_timeout = weak_callback(self._on_timeout)
        try:
            timer = shared_timer() if self._timer is None else self._timer
            timeout: Timeout | None = timer.new_timeout(on_timeout, POLL_INTERVAL_S)
        except (TimerError, RuntimeError) as error:  # stopped, full, or no thread can be started
            emit(CallbackFailed(self._name, "the timer of subscriptions", error))
            return
        with self._lock:
            if self._subscriptions and self._timeout is None:
                self._timeout, timeout = timeout, None
        if timeout is not None:
            timeout.cancel()

    def _on_timeout(self, _: Timeout) -> None:
        with self._lock:
            self._timeout = None
        self.read_soon()
