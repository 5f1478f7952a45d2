"""Subscriptions to the state of a `grpc` channel, across reconnects.

A transport is a channel of gRPC with its own connection; one transport of a `ReconnectingChannel`
is active. While there are subscribers, the active transport has one gRPC subscription, for which
gRPC runs a thread that polls for the state. A worker thread calls the subscribers, one at a time
and in the order of the changes. States of transports that are no longer active are ignored.

When the interpreter exits, the polling thread is stopped at any point, and gRPC would wait for it
forever when the garbage collector closes the channel. So once the exit has begun, no transport is
watched, and the exit waits until the polling threads have ended.

Locks: `TransportSubscriptions` holds its lock also while it calls `subscribe` and `unsubscribe` of
gRPC. gRPC holds no lock while it calls back, so this cannot deadlock. The locks are reentrant: a
channel from `connect` may call back inside `subscribe`, and a finalizer may unsubscribe at any
point.
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
from rpcwheel.errors import check_callback
from rpcwheel.events import CallbackFailed, emit

if TYPE_CHECKING:
    from collections.abc import Callable

    import grpc

    from .state import Transport, Transports

    State: TypeAlias = grpc.ChannelConnectivity
    Callback: TypeAlias = Callable[[State], object]
    SyncTransport: TypeAlias = Transport[grpc.Channel]


class Subscriber:
    """A callback that takes the state of a channel."""

    __slots__ = ("callback", "connects", "last", "removed")

    def __init__(self, callback: Callback, *, connects: bool) -> None:
        self.callback = callback
        self.connects = connects
        """Whether the channel is to connect if it is IDLE."""
        self.last: State | None = None
        self.removed = False


class StateSubscribers:
    """The subscribers to one channel's state. Thread-safe.

    A worker thread calls them, one at a time and in the order of the changes. The subclass finds
    out the state.
    """

    def __init__(self, target: str) -> None:
        self._target = target
        self._lock = threading.RLock()
        self._subscribers: list[Subscriber] = []
        self._closed = False
        self._notifications = NotificationQueue()

    # --- For subclasses to override ---

    def _added(self, subscriber: Subscriber) -> None:
        """Report the state soon. Called under the lock; if it raises, nothing was added."""
        raise NotImplementedError

    def _removed(self) -> None:
        """Called after subscribers were removed."""
        raise NotImplementedError

    # --- The rest ---

    def add(self, callback: Callback, *, try_to_connect: bool) -> None:
        """Call `callback(state)` soon, with the state and then with each change, on a worker.

        Does nothing after `close`.

        Args:
            callback: Called first when the state is known.
            try_to_connect: Whether the channel connects if it is IDLE.

        Raises:
            TypeError: `callback` is not callable, or a coroutine function.
        """
        check_callback(callback, "callback", "callback(state)")
        subscriber = Subscriber(callback, connects=try_to_connect)
        with self._lock:
            if self._closed:
                return
            self._subscribers.append(subscriber)
            try:
                self._added(subscriber)
            except BaseException:  # no thread, or a channel of another type without `subscribe`
                self._subscribers.remove(subscriber)
                raise

    def remove(self, callback: Callback) -> None:
        """Remove one subscription of this callback; an unknown callback is not an error."""
        with self._lock:
            for subscriber in self._subscribers:
                if subscriber.callback == callback:
                    self._subscribers.remove(subscriber)
                    subscriber.removed = True
                    break
        self._removed()

    def close(self) -> None:
        """Call no subscriber any more."""
        with self._lock:
            self._closed = True
            for subscriber in self._subscribers:
                subscriber.removed = True
            self._subscribers.clear()
        self._removed()

    def _report(self, state: State, *subscribers: Subscriber) -> None:
        """Report the state to these subscribers; without any, to all. Under the lock."""
        for subscriber in subscribers or self._subscribers:
            if subscriber.last is not state:
                subscriber.last = state
                self._notifications.submit(partial(self._call, subscriber, state))

    def _call(self, subscriber: Subscriber, state: State) -> None:
        if not subscriber.removed:
            # On a worker, so also SystemExit becomes an event.
            run_callback(self._target, subscriber.callback, state, catch=BaseException)


class TransportSubscriptions(StateSubscribers):
    """The subscribers to one channel's state, for which gRPC watches the active transport."""

    def __init__(self, target: str, transports: Transports[SyncTransport]) -> None:
        super().__init__(target)
        self._transports = transports
        self._try_to_connect = False
        """Whether a subscriber wants the channel to connect; also used for later transports.

        Stays true until the last subscriber is removed.
        """
        self._watched: SyncTransport | None = None
        """The transport that has the gRPC subscription."""
        self._on_watched_state: Callback = _ignore
        """The callback of that subscription."""
        self._state: State | None = None
        """The last state of the watched transport."""

    def _added(self, subscriber: Subscriber) -> None:
        is_first = len(self._subscribers) == 1
        self._try_to_connect = subscriber.connects or (self._try_to_connect and not is_first)
        watched = self._watched
        self._watch_active_or_raise()
        if watched is None or watched is not self._watched:
            return  # gRPC reports the state soon
        if subscriber.connects:  # gRPC connects only by a subscription
            on_state = weak_callback(self._on_state, watched.number)
            watched.channel.subscribe(on_state, try_to_connect=True)
            watched.channel.unsubscribe(self._on_watched_state)  # not before: gRPC may refuse
            self._on_watched_state = on_state
        if self._state is not None:
            self._report(self._state, subscriber)

    def _removed(self) -> None:
        self.watch_active()

    def watch_active(self) -> None:
        """Watch the active transport, and no other one, if there are subscriptions.

        If a channel from `connect` can't be watched, that is a `CallbackFailed` event. The next
        transport will be tried.
        """
        try:
            self._watch_active_or_raise()
        except Exception as error:  # noqa: BLE001 - reported as an event
            emit(CallbackFailed(self._target, callback="subscribe", error=error))

    def _watch_active_or_raise(self) -> None:
        with self._lock:
            active = self._transports.active
            should_watch = self._subscribers and not active.ended  # ended if the channel drains
            target = active if should_watch and _exit_guard.register(self, active) else None
            if self._watched is target:
                return
            watched, self._watched, self._state = self._watched, None, None
            if watched is not None:
                watched.channel.unsubscribe(self._on_watched_state)
            if target is not None:
                on_state = weak_callback(self._on_state, target.number)
                self._watched, self._on_watched_state = target, on_state
                try:
                    target.channel.subscribe(on_state, try_to_connect=self._try_to_connect)
                except BaseException:
                    self._watched = None
                    raise

    def _on_state(self, number: int, state: State) -> None:
        """The transport with this number has this state now. Called by gRPC's polling thread."""
        with self._lock:
            watched = self._watched
            if watched is None or watched.number != number:
                return
            if watched is not self._transports.active:
                return
            self._state = state
            self._report(state)


def _ignore(_: State) -> None:
    """The callback while no transport is watched."""


class _ExitGuard:
    """Ends gRPC's polling threads when the interpreter exits."""

    def __init__(self) -> None:
        self._exiting = False
        self._lock = threading.RLock()
        self._subscriptions: weakref.WeakSet[TransportSubscriptions] = weakref.WeakSet()
        self._watched: weakref.WeakSet[SyncTransport] = weakref.WeakSet()
        atexit.register(self.stop_watching)

    def register(self, subscriptions: TransportSubscriptions, transport: SyncTransport) -> bool:
        """Remember both weakly before `transport` is watched; False: the interpreter exits.

        gRPC's polling thread ends up to 0.2 s after the subscription, and the exit must wait for
        it. If the result is False, the transport must not be watched.
        """
        with self._lock:
            if not self._exiting:
                self._subscriptions.add(subscriptions)
                self._watched.add(transport)
            return not self._exiting

    def stop_watching(self) -> None:
        """Watch no transport any more, and wait until no polling thread is left."""
        with self._lock:
            self._exiting = True
            everyone, transports = tuple(self._subscriptions), tuple(self._watched)
        for subscriptions in everyone:
            subscriptions.watch_active()
        wait_for_polling_end(*(transport.channel for transport in transports))


_exit_guard = _ExitGuard()
