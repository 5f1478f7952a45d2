"""The part that the balanced channels of both worlds have in common."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Generic

from rpcwheel.errors import public_name, safe_repr

from .subchannel import READY, S

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import grpc

    from rpcwheel.instance import ServiceInstance

    from .subchannels import SubchannelPool


@public_name("BalancedChannel")
class BalancedChannelBase(Generic[S]):
    """The instances, the subchannels and the state of a balanced channel."""

    _title: ClassVar[str]
    _pool: SubchannelPool[S]
    target_is_service: ClassVar[bool] = True
    """For `rpcwheel._grpc.connectivity.has_address`."""

    def update(self, instances: Iterable[ServiceInstance]) -> None:
        """Set the instances; changes only what differs. Any thread. Ignored on a closed channel.

        A subchannel is kept if the weight, zone, status or metadata of its instance change, and
        replaced if host, port or protocol change. A subchannel whose instance was removed gets no
        new calls; calls in flight have `policy.drain_timeout` seconds. If all instances are
        removed, `policy.self_preservation` keeps those that still answer.

        Raises:
            TypeError: An element is not a `ServiceInstance`; nothing has changed.
        """
        self._pool.update(tuple(instances))

    def report_error(self, error: str, *, wait: bool = False) -> None:
        """Report why the instances are not known. Ignored if they are known. Any thread.

        Args:
            error: For the status of calls. Waiting calls end with UNAVAILABLE now.
            wait: Whether calls continue to wait, and only calls that have waited too long get the
                error.
        """
        self._pool.report_error(error, wait=wait)

    def add_listener(
        self, on_subchannel: Callable[[S], object], on_removed: Callable[[S], object]
    ) -> None:
        """Add callbacks like `on_subchannel` and `on_removed` of the constructor.

        `on_subchannel` is also called with each subchannel that has a channel already.
        """
        self._pool.connections.add_listener(on_subchannel, on_removed)

    @property
    def subchannels(self) -> tuple[S, ...]:
        """The subchannels in the order of their ids, without those whose instance was removed."""
        return self._pool.subchannels

    @property
    def name(self) -> str:
        """The name of the service."""
        return self._pool.name

    @property
    def target(self) -> str:
        """The name of the service, for code that reads the target of a channel."""
        return self._pool.name

    @property
    def calls(self) -> int:
        """The number of calls in flight, also on subchannels whose instance was removed."""
        return self._pool.calls

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._pool.closing

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        """Return the best state of all subchannels, as gRPC's round_robin does.

        CONNECTING until the instances are known, TRANSIENT_FAILURE if there are none, SHUTDOWN if
        the channel is closed.

        Args:
            try_to_connect: Whether to connect IDLE subchannels if none is READY.
        """
        state = self._pool.whole_state()
        if try_to_connect and state is not READY:
            self._pool.connections.connect(self._pool.subchannels)
        return state

    def on_close(self, callback: Callable[[], object]) -> Callable[[], None]:
        """Call `callback()` once when the channel is closed, before its calls are ended.

        Runs on the thread that closes the channel, or on the loop; now if the channel is closed. If
        it raises, the event `CallbackFailed` is emitted.

        Returns:
            A function that removes the callback.

        Raises:
            TypeError: It is not callable.
        """
        return self._pool.close_callbacks.add(callback)

    @safe_repr
    def __repr__(self) -> str:
        subchannels = self.subchannels
        unhealthy = sum(not subchannel.healthy for subchannel in subchannels)
        state = (
            "closed" if self.closed else f"{len(subchannels)} subchannels, {unhealthy} unhealthy"
        )
        return f"<{self._title} {self.name!r}, {state}, calls in flight: {self.calls}>"
