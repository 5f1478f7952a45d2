"""Subscriptions to the state of a `grpc` channel, across reconnects.

gRPC runs a thread that polls for the state while there is a subscription. It reports the state of
the active transport, and a worker thread calls the subscribers, one at a time and in the order of
the changes. States of transports that are no longer active are ignored.

When the interpreter exits, the polling thread is stopped at any point, and gRPC would wait for it
forever when the garbage collector closes the channel. So from then on no transport is watched, and
the exit waits until the polling threads have ended.
"""

from __future__ import annotations

import atexit
import threading
import weakref
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from rpcwheel._concurrency.callbacks import run_callback, weak_callback
from rpcwheel._concurrency.notifications import NotificationQueue
from rpcwheel._grpc.connectivity import wait_for_polling_end
from rpcwheel.events import CallbackFailed, emit

if TYPE_CHECKING:
    from collections.abc import Callable

    import grpc

    from .state import ConnectionManager, Transport

    State: TypeAlias = grpc.ChannelConnectivity
    Callback: TypeAlias = Callable[[State], object]
    SyncTransport: TypeAlias = Transport[grpc.Channel]

__all__ = ["Subscriptions"]


class _Subscription:
    __slots__ = ("callback", "last", "removed")

    def __init__(self, callback: Callback) -> None:
        self.callback = callback
        self.last: State | None = None
        self.removed = False


class Subscriptions:
    """The subscribers to one channel's state. Thread-safe."""

    def __init__(self, target: str, connections: ConnectionManager[SyncTransport]) -> None:
        self._target = target
        self._connections = connections
        self._lock = threading.RLock()
        self._all: list[_Subscription] = []
        self._closed = False
        self._connects = False
        self._watched: tuple[SyncTransport, Callback] | None = None
        self._state: State | None = None
        self._notifications = NotificationQueue()

    def add(self, callback: Callback, *, try_to_connect: bool) -> None:
        """Call `callback(state)` now, and at each change."""
        with self._lock:
            if self._closed:
                return
            subscription = _Subscription(callback)
            self._all.append(subscription)
            self._connects |= try_to_connect
            if self._watched is None:
                try:
                    self._follow()
                except BaseException:  # a channel of another type that does not support it
                    self._all.remove(subscription)
                    raise
                return
            if try_to_connect:
                transport, watch = self._watched  # gRPC connects only by a subscription
                transport.channel.unsubscribe(watch)
                transport.channel.subscribe(watch, try_to_connect=True)
            if self._state is not None:
                self._report(subscription, self._state)

    def remove(self, callback: Callback) -> None:
        """Remove it once, if it was added more than once; an unknown one is not an error."""
        with self._lock:
            for subscription in self._all:
                if subscription.callback == callback:
                    self._all.remove(subscription)
                    subscription.removed = True
                    break
            if not self._all:
                self._connects = False
        self.follow()

    def close(self) -> None:
        """Call no subscriber any more."""
        with self._lock:
            self._closed = True
            for subscription in self._all:
                subscription.removed = True
            self._all.clear()
        self.follow()

    def follow(self) -> None:
        """Watch the active transport, and no other one, if there are subscriptions.

        If a channel from `connect` can't be watched, that is a `CallbackFailed` event. The next
        transport is tried again.
        """
        try:
            self._follow()
        except Exception as error:  # noqa: BLE001 - reported as an event
            emit(CallbackFailed(self._target, callback="subscribe", error=error))

    def _follow(self) -> None:
        with self._lock:
            active = self._connections.active
            is_wanted = self._all and not active.ended  # ended: the channel is drained
            wanted = active if is_wanted and _exit.allows(self, active) else None
            watched = self._watched
            if (None if watched is None else watched[0]) is wanted:
                return
            if watched is not None:
                self._watched = self._state = None
                watched[0].channel.unsubscribe(watched[1])
            if wanted is not None:
                watch = weak_callback(self.changed, wanted.number)
                self._watched = wanted, watch
                try:
                    wanted.channel.subscribe(watch, try_to_connect=self._connects)
                except BaseException:
                    self._watched = None
                    raise

    def changed(self, number: int, state: State) -> None:
        """Internal: the connection with this number has this state now. On gRPC's thread."""
        with self._lock:
            watched = self._watched
            if watched is None or watched[0].number != number:
                return
            if watched[0] is not self._connections.active:
                return
            self._state = state
            for subscription in self._all:
                self._report(subscription, state)

    def _report(self, subscription: _Subscription, state: State) -> None:
        if subscription.last is not state:
            subscription.last = state
            self._notifications.submit(partial(self._call, subscription, state))

    def _call(self, subscription: _Subscription, state: State) -> None:
        if not subscription.removed:
            run_callback(self._target, subscription.callback, state, catch=BaseException)


class _Exit:
    """Ends gRPC's polling threads when the interpreter exits."""

    def __init__(self) -> None:
        self._exiting = False
        self._lock = threading.RLock()
        self._all: weakref.WeakSet[Subscriptions] = weakref.WeakSet()
        self._watched: weakref.WeakSet[SyncTransport] = weakref.WeakSet()
        atexit.register(self.begin)

    def allows(self, subscriptions: Subscriptions, transport: SyncTransport) -> bool:
        """Whether a transport may be watched: a thread polls for its state until a while after.

        Refers to both weakly.
        """
        with self._lock:
            if not self._exiting:
                self._all.add(subscriptions)
                self._watched.add(transport)
            return not self._exiting

    def begin(self) -> None:
        """Watch no transport any more, and wait until no polling thread is left."""
        with self._lock:
            self._exiting = True
            everyone, transports = tuple(self._all), tuple(self._watched)
        for subscriptions in everyone:
            subscriptions.follow()
        wait_for_polling_end(*(transport.channel for transport in transports))


_exit = _Exit()
