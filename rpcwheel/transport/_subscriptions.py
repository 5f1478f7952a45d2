"""The state of a channel, told to whoever subscribes to it, across replacements of its connection.

gRPC's thread that polls for it runs only while somebody subscribes. It tells us, and a worker calls
the subscribers: one after the other, each change in the order in which it came. Nothing is told of
a connection that is not the active one any more.

At the interpreter's exit that thread is stopped amid its work, and gRPC would wait for ever for it
when the garbage collector closes the channel. So nothing is watched from then on, and the exit
waits until the threads have ended.
"""

from __future__ import annotations

import atexit
import threading
import weakref
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from rpcwheel._concurrency.executor import EXECUTOR
from rpcwheel._grpc.connectivity import wait_unpolled
from rpcwheel.observe import CallbackFailed, emit

if TYPE_CHECKING:
    from collections.abc import Callable

    import grpc

    from .core import Link, Links

    State: TypeAlias = grpc.ChannelConnectivity
    Callback: TypeAlias = Callable[[State], object]

__all__ = ["Subscriptions"]


class _Subscription:
    __slots__ = ("callback", "last", "over")

    def __init__(self, callback: Callback) -> None:
        self.callback = callback
        self.last: State | None = None
        self.over = False


class Subscriptions:
    """Who is told of one channel's state. Thread-safe."""

    def __init__(self, target: str, links: Links[grpc.Channel]) -> None:
        self._target = target
        self._links = links
        self._lock = threading.RLock()
        self._all: list[_Subscription] = []
        self._closed = False
        self._connects = False
        self._watched: tuple[Link[grpc.Channel], Callback] | None = None
        self._state: State | None = None
        self._to_tell: deque[tuple[_Subscription, State]] = deque()
        self._telling = False

    def add(self, callback: Callback, *, try_to_connect: bool) -> None:
        """Tell `callback` the state, and each change from now on."""
        with self._lock:
            if self._closed:
                return
            one = _Subscription(callback)
            self._all.append(one)
            self._connects |= try_to_connect
            if self._watched is None:
                try:
                    self._follow()
                except BaseException:  # a channel of the user's make that can't do it
                    self._all.remove(one)
                    raise
                return
            if try_to_connect:
                link, watch = self._watched  # grpc connects by a subscription only
                link.channel.unsubscribe(watch)
                link.channel.subscribe(watch, try_to_connect=True)
            if self._state is not None:
                self._note(one, self._state)

    def remove(self, callback: Callback) -> None:
        """Tell `callback` no more; once, if it was added more than once. Unknown ones: nothing."""
        with self._lock:
            for one in self._all:
                if one.callback == callback:
                    self._all.remove(one)
                    one.over = True
                    break
            if not self._all:
                self._connects = False
        self.follow()

    def close(self) -> None:
        """Tell nobody any more."""
        with self._lock:
            self._closed = True
            for one in self._all:
                one.over = True
            self._all.clear()
        self.follow()

    def follow(self) -> None:
        """Watch the active link, if anybody wants it, and no other.

        A channel of the user's make that can't be watched is told as `CallbackFailed`; the next one
        is tried again.
        """
        try:
            self._follow()
        except Exception as error:  # noqa: BLE001 - told as an event; the connection goes on
            emit(CallbackFailed(self._target, callback="subscribe", error=error))

    def _follow(self) -> None:
        with self._lock:
            link = self._links.active
            is_wanted = self._all and not link.ended  # ended: the channel is retired
            wanted = link if is_wanted and _exit.allows(self, link) else None
            watched, before = self._watched, None if self._watched is None else self._watched[0]
            if before is wanted:
                return
            if watched is not None:
                self._watched = self._state = None
                watched[0].channel.unsubscribe(watched[1])
            if wanted is not None:
                watch = partial(_seen, weakref.ref(self), wanted.number)
                self._watched = wanted, watch
                try:
                    wanted.channel.subscribe(watch, try_to_connect=self._connects)
                except BaseException:
                    self._watched = None
                    raise

    def seen(self, number: int, state: State) -> None:
        """The link of this number has this state now."""
        with self._lock:
            watched = self._watched
            if watched is None or watched[0].number != number:
                return
            if watched[0] is not self._links.active:
                return
            self._state = state
            for one in self._all:
                self._note(one, state)

    def _note(self, one: _Subscription, state: State) -> None:
        if one.last is state:
            return
        one.last = state
        self._to_tell.append((one, state))
        if not self._telling:
            self._telling = True
            EXECUTOR.submit(self, self._tell)

    def _tell(self) -> None:
        """On a worker, one at a time."""
        while True:
            with self._lock:
                if not self._to_tell:
                    self._telling = False
                    return
                one, state = self._to_tell.popleft()
                if one.over:
                    continue
            try:
                one.callback(state)
            except BaseException as error:  # noqa: BLE001 - the user's; the others must be told
                emit(CallbackFailed(self._target, callback=repr(one.callback), error=error))


def _seen(subscriptions: weakref.ref[Subscriptions], number: int, state: Any) -> None:
    """On gRPC's thread, which holds no channel alive."""
    alive = subscriptions()
    if alive is not None:
        alive.seen(number, state)


class _Exit:
    """Ends gRPC's polling threads at the interpreter's exit."""

    def __init__(self) -> None:
        self._has_come = False
        self._lock = threading.RLock()
        self._all: weakref.WeakSet[Subscriptions] = weakref.WeakSet()
        self._watched: weakref.WeakSet[Link[grpc.Channel]] = weakref.WeakSet()
        atexit.register(self.comes)

    def allows(self, one: Subscriptions, link: Link[grpc.Channel]) -> bool:
        """Whether `link` may be watched; then a thread polls for its state, even for a while after.

        Both are known weakly.
        """
        with self._lock:
            if not self._has_come:
                self._all.add(one)
                self._watched.add(link)
            return not self._has_come

    def comes(self) -> None:
        """Watch nothing any more, and wait until no thread of gRPC's does."""
        with self._lock:
            self._has_come = True
            subscriptions, links = tuple(self._all), tuple(self._watched)
        for one in subscriptions:
            one.follow()
        wait_unpolled(*(link.channel for link in links))


_exit = _Exit()
