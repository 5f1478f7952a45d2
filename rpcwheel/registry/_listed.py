"""The one member of a channel with `balance="core"`: a list of addresses, swapped on change.

What is made of which instances `listing.py` says. Names are resolved here, as grpc takes none in a
list, and the channel of the new list is connected before it takes the place of the old one.
"""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, Any, Final

import grpc

from rpcwheel._concurrency.executor import SerialExecutor
from rpcwheel.cluster.arguments import credentials_for
from rpcwheel.durations import NEVER
from rpcwheel.instance import ServiceInstance
from rpcwheel.observe import emit

from .alarm import Alarm
from .listing import PLAIN, LeftOut, Listing, one_protocol, protocol_of, spread, wanted_of
from .places import addresses_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from rpcwheel.cluster._fleet import Member
    from rpcwheel.cluster.sync import ClusterChannel
    from rpcwheel.errors import TimerError
    from rpcwheel.timer.api import Timer

    Options = list[tuple[str, Any]]

__all__ = ["Listed"]

WARM_S: Final = 1.0
"""How long the channel of a new list may take to connect, before it is used as it is."""

CHANGED: Final = "its addresses have changed"


class Listed:
    """What a channel of one list is made of, and is made of anew. Thread-safe."""

    def __init__(
        self,
        name: str,
        registry: str,
        *,
        credentials: grpc.ChannelCredentials | None,
        compression: grpc.Compression | None,
        timer: Timer | None,
    ) -> None:
        self._name = name
        self._credentials = credentials
        self._compression = compression
        self._lock = threading.RLock()
        self._core = Listing()
        self._left_out = LeftOut(registry, name)
        self._alarm = Alarm(timer, self._rang, _not_told)
        self._row = SerialExecutor()
        self._channel: Callable[[], ClusterChannel | None] = _nobody
        self._using = "", ""  # the target and the protocol
        self._options: Options = []
        self._warm: grpc.Channel | None = None
        self._closed = False

    def connect(self, _: ServiceInstance, options: Options) -> grpc.Channel:
        """Give the channel of the list, for the one member; the one that is warm, if one is."""
        warm, self._warm = self._warm, None
        if warm is not None:
            return warm
        self._options = options
        return self._make()

    def show(self, channel: ClusterChannel, instances: list[ServiceInstance]) -> None:
        """Take note of what the registry says. On a worker."""
        usable, others = one_protocol(instances, credentials=self._credentials is not None)
        for told in self._left_out.news(others, PLAIN):
            emit(told)
        wanted, excused = wanted_of(usable)
        with self._lock:
            self._channel = weakref.ref(channel)
            protocol = protocol_of(usable, credentials=self._credentials is not None)
            self._core.saw(wanted, excused, self._alarm.now_ns(), protocol)
            self._sleep()
            due = self._core.next_wake_ns <= self._alarm.now_ns()
        if due:
            self._row.submit(self._step)

    def close(self) -> None:
        """Change nothing any more. Idempotent."""
        with self._lock:
            self._closed = True
            self._alarm.clear()

    def _sleep(self) -> None:
        """Wake up when something is to be done. Under the lock."""
        self._alarm.clear()
        wake_ns = self._core.next_wake_ns
        if not self._closed and self._alarm.now_ns() < wake_ns != NEVER:
            self._alarm.wake(wake_ns)

    def _rang(self) -> None:
        """On the timer's thread."""
        with self._lock:
            self._alarm.rang()
        self._row.submit(self._step)

    def _step(self) -> None:
        """Have the list in use that is wanted. On a worker; one at a time."""
        with self._lock:
            places = None if self._closed else self._core.step(self._alarm.now_ns())
            protocol = self._core.protocol
        channel = self._channel()
        if places is None or channel is None:
            return
        found = addresses_of(sorted(places))
        for told in self._left_out.news(found.left_out, f"it has no {found.family} address"):
            emit(told)
        using = found.target, protocol
        if not found.target:
            channel.update([])
            return
        members = channel.members
        if not members:
            self._using = using
            channel.update([ServiceInstance(service=self._name, host=self._name, port=1)])
        elif using != self._using:
            inner = _channel_of(members[0])  # or a call might make one of the old list just now
            self._using = using
            if inner is not None:
                self._swap(inner)

    def _swap(self, inner: Any) -> None:
        """Calls in flight take as long as they take: most are on servers that stay."""
        if inner.is_idle():  # nobody calls: so nobody need be connected
            inner.reconnect(CHANGED, force=True)
            return
        warm = self._make()
        used = False
        try:
            ready = grpc.channel_ready_future(warm)
            try:
                ready.result(WARM_S)
            except grpc.FutureTimeoutError:
                ready.cancel()
            self._warm = warm
            used = inner.reconnect(CHANGED, force=True)
        finally:
            self._warm = None
            if not used:  # it is closed
                warm.close()

    def _make(self) -> grpc.Channel:
        target, protocol = self._using
        credentials = credentials_for(protocol, self._credentials)
        options = spread(self._options)
        made: grpc.Channel = (
            grpc.insecure_channel(target, options, self._compression)
            if credentials is None
            else grpc.secure_channel(target, credentials, options, self._compression)
        )
        return made


def _nobody() -> None:
    """There is no channel yet."""


def _channel_of(member: Member) -> Any:
    """Made if there is none; None if the member is gone, as all has been closed meanwhile."""
    try:
        return member.channel
    except ValueError:
        return None


def _not_told(_: TimerError) -> None:
    """The list stays as it is until the next change."""
