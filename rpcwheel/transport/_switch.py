"""The connections of a channel for threads: calls come and go, and one takes another's place.

The lock guards the `Links` and is held for a few steps only: nothing that blocks, and nothing of
the user's or of gRPC's, runs under it. A second one, `_making`, keeps a channel from being closed
while a multi-callable of it is made: grpcio 1.85 crashes there. Channels are closed by workers, as
gRPC waits then until its own thread has told the end of every call.
"""

from __future__ import annotations

import threading
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import grpc

from rpcwheel._concurrency.executor import EXECUTOR
from rpcwheel._grpc.connectivity import end_calls, state_below, wait_unpolled
from rpcwheel.durations import NEVER
from rpcwheel.errors import ConfigurationError
from rpcwheel.observe import CallbackFailed, ConnectionReplaced, emit
from rpcwheel.timer.clock import clock_of

from ._drain import timeout_on
from ._subscriptions import Subscriptions
from .core import Links

if TYPE_CHECKING:
    from collections.abc import Callable

    from rpcwheel.backoff import Backoff
    from rpcwheel.timer import Timeout
    from rpcwheel.timer.api import Timer

    from .core import Link

    AnyLink: TypeAlias = Link[grpc.Channel]

__all__ = ["Switch"]

CLOSED: Final = "Cannot invoke RPC on closed channel!"
"""What grpc says to who makes a call on a closed channel."""

READY: Final = grpc.ChannelConnectivity.READY

MOST_MEMBERS: Final = 512
"""Multi-callables that are kept of a link, beside those that members of stubs keep themselves."""


class Switch:
    """The links of one channel. Thread-safe."""

    def __init__(
        self,
        target: str,
        connect: Callable[[], grpc.Channel],
        backoff: Backoff,
        timer: Timer | None,
    ) -> None:
        self.target = target
        self._connect = connect
        self._timer = timer
        self._lock = threading.RLock()  # for a call that ends by garbage collection, anywhere
        self._making = threading.RLock()
        self.jobs: Final = object()  # by which the workers know the jobs of this channel
        self._drains: dict[AnyLink, Timeout] = {}
        self._closers: list[Callable[[], object]] = []
        self.links: Links[grpc.Channel] = Links(connect(), clock_of(timer), backoff)
        self.subscriptions = Subscriptions(target, self.links)

    # Calls

    def enter(self) -> AnyLink:
        """The link for a call that begins now; `leave` is to follow.

        Raises:
            ValueError: The channel is closed or retired; in the words of grpc.
        """
        with self._lock:
            links = self.links
            if links.closed or links.retired:  # `refuses`; each function is paid for by every call
                raise ValueError(CLOSED)
            link = links.active
            link.calls += 1  # `Links.enter`
            links.calls += 1
            return link

    def active(self) -> AnyLink:
        """The link for what is no call of the user's; that of a retired channel while it drains.

        Raises:
            ValueError: It is closed; in the words of grpc.
        """
        link = self.links.active
        if self.links.closed or (self.links.retired and link.ended):
            raise ValueError(CLOSED)
        return link

    def leave(self, link: AnyLink) -> None:
        """A call on `link` has ended. Any thread."""
        with self._lock:
            links = self.links
            if link is links.active and not links.retired:
                link.calls -= 1  # `Links.leave`
                links.calls -= 1
                return
            over = links.leave(link)
        if over:
            self._retire(link)

    def make(self, link: AnyLink, key: Any, recipe: Callable[[AnyLink], Any]) -> Any:
        """Make a multi-callable of a link's channel, or give the one made before.

        Args:
            link: Whose.
            key: What it is known by.
            recipe: Makes it.

        Raises:
            ValueError: The link was closed meanwhile; in the words of grpc.
        """
        known = link.members.get(key)
        if known is not None:
            return known[0]
        with self._making:
            if link.ended:
                raise ValueError(CLOSED)
            made = recipe(link)
        if len(link.members) >= MOST_MEMBERS:  # of functions made anew for each call
            link.members.clear()
        link.members[key] = made, recipe  # what the key is made of must live as long
        return made

    def has_moved(self, link: AnyLink) -> bool:
        """Whether a call that `link` does not take is to try again.

        `enter` knows another link for it, or says that the channel is closed.
        """
        return link.ended or link is not self.links.active

    # The connection

    def replace(self, reason: str, drain_ns: int, *, force: bool) -> bool:
        """See `ReconnectingChannel.replace`."""
        seen = self.links.active
        if self.links.refuses or (not force and self.links.wait_ns() > 0):
            return False
        rest_ns = self.links.rest_ns()  # the user's, as `_connect` is: not under the lock
        channel = self._connect()
        with self._lock:
            calls = self.links.active.calls
            swapped = None
            if any(link.channel is channel for link in self.links.opened()):
                raise ConfigurationError("connect must make a new channel each time")
            if self._may_replace(seen, force=force):
                swapped = self.links.replace(channel, drain_ns, reason, rest_ns)
        if swapped is None:
            channel.close()
            return False
        old, over = swapped
        if over:
            self._retire(old)
        elif drain_ns != NEVER:
            self._end_later(old, drain_ns)
        if old.wanted:
            state_below(channel, try_to_connect=True)
        self.subscriptions.follow()
        emit(ConnectionReplaced(self.target, number=old.number + 1, reason=reason, calls=calls))
        return True

    def _may_replace(self, seen: AnyLink, *, force: bool) -> bool:
        """Whether `seen` is still the one to replace, now that there is a channel for it."""
        return not self.links.refuses and (force or self.links.active is seen)

    def _end_later(self, link: AnyLink, drain_ns: int) -> None:
        """Give the calls on `link` their time to drain."""
        expire = partial(_expire, weakref.ref(self), link)
        timeout = timeout_on(self._timer, expire, drain_ns)
        if timeout is None:
            self.expire(link)  # or they might go on for ever
            return
        obsolete: Timeout | None = timeout
        with self._lock:
            if not link.ended:
                obsolete = self._drains.get(link)
                self._drains[link] = timeout
        if obsolete is not None:
            obsolete.cancel()

    def expire(self, link: AnyLink) -> None:
        """The time of `link` to drain is over: its calls are ended."""
        with self._lock:
            over = self.links.expire(link)
        if over:
            self._retire(link)

    def _retire(self, link: AnyLink) -> None:
        """Have a link closed that takes no more calls."""
        with self._lock:
            timeout = self._drains.pop(link, None)
        if timeout is not None:
            timeout.cancel()
        EXECUTOR.submit(self.jobs, partial(self._end, link))

    def _end(self, link: AnyLink) -> None:
        self.subscriptions.follow()
        with self._making:  # whoever makes something of it has begun before it was ended
            pass
        wait_unpolled(link.channel)  # to close it would wait as long anyway
        try:
            end_calls(link.channel, link.details)
        finally:
            if self.links.is_spent:
                self.close()

    def retire(self, drain_ns: int, reason: str) -> None:
        """See `ReconnectingChannel.retire`."""
        with self._lock:
            over, shorter = self.links.retire(drain_ns, reason)
        for link in over:
            self._retire(link)
        for link in shorter:
            self._end_later(link, drain_ns)

    def close(self) -> None:
        """See `ReconnectingChannel.close`."""
        with self._lock:
            links = self.links.close()
            timeouts, self._drains = list(self._drains.values()), {}
            closers, self._closers = self._closers, []
        for timeout in timeouts:
            timeout.cancel()
        self.subscriptions.close()
        try:
            for closer in closers:
                self._tell(closer)
        finally:  # whatever a callback raises, be it `SystemExit`
            with self._making:
                pass
            wait_unpolled(*(link.channel for link in links))
            for link in links:
                link.channel.close()

    def on_close(self, callback: Callable[[], object]) -> Callable[[], None]:
        """See `ReconnectingChannel.on_close`."""
        with self._lock:
            closed = self.links.closed
            if not closed:
                self._closers.append(callback)
        if closed:
            self._tell(callback)
        return partial(_forget, weakref.ref(self), callback)

    def forget(self, callback: Callable[[], object]) -> None:
        with self._lock:
            if callback in self._closers:
                self._closers.remove(callback)

    def _tell(self, callback: Callable[[], object]) -> None:
        try:
            callback()
        except Exception as error:  # noqa: BLE001 - told as an event; the others must be told too
            emit(CallbackFailed(subject=self.target, callback=repr(callback), error=error))

    # What is known of it

    def state(self, *, try_to_connect: bool = False) -> grpc.ChannelConnectivity | None:
        """The state of the active link, None if it can't be known."""
        if self.links.closed:
            return grpc.ChannelConnectivity.SHUTDOWN
        while True:
            link = self.links.active
            state = state_below(link.channel, try_to_connect=try_to_connect)
            link.wanted = state is not READY and (link.wanted or try_to_connect)
            if state is not grpc.ChannelConnectivity.SHUTDOWN or link is self.links.active:
                return state


def _forget(switch: weakref.ref[Switch], callback: Callable[[], object]) -> None:
    """What who is told of the end holds keeps no channel alive."""
    alive = switch()
    if alive is not None:
        alive.forget(callback)


def _expire(switch: weakref.ref[Switch], link: AnyLink, _: Timeout) -> None:
    """On the timer's thread, which holds no channel alive."""
    alive = switch()
    if alive is not None:
        EXECUTOR.submit(alive.jobs, partial(alive.expire, link))
