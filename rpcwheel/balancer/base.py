"""What the balanced channels of both worlds have in common."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Generic

from .subchannels import READY, S

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import grpc

    from rpcwheel.instance import ServiceInstance

    from .subchannels import SubchannelPool

__all__ = ["BalancedChannelBase"]


class BalancedChannelBase(Generic[S]):
    """The instances, the subchannels and the state of a balanced channel."""

    _title: ClassVar[str]
    _pool: SubchannelPool[S]

    def update(self, instances: Iterable[ServiceInstance]) -> None:
        """Set the servers; changes only what differs. Any thread; on a closed channel, nothing.

        A change of weight, zone, status or metadata keeps a subchannel; one of host, port or
        protocol makes another. One whose instance is gone gets no new calls; calls in flight have
        `policy.drain_timeout` seconds. If all are gone, those that still answer are kept, with
        `policy.self_preservation`.

        Raises:
            TypeError: One is no `ServiceInstance`; nothing has changed.
        """
        self._pool.update(tuple(instances))

    def report_error(self, error: str, *, wait: bool = False) -> None:
        """Report why the instances can't be known; nothing if they are. Any thread.

        Args:
            error: For the status of calls, which end with UNAVAILABLE now instead of waiting for
                `update`.
            wait: Whether they go on waiting, and the error is for those that have waited too long.
        """
        self._pool.report_error(error, wait=wait)

    def add_listener(
        self, on_subchannel: Callable[[S], object], on_removed: Callable[[S], object]
    ) -> None:
        """Internal: call these as `on_subchannel` and `on_removed` of the constructor.

        The first also with each subchannel that has a channel by now.
        """
        self._pool.add_listener(on_subchannel, on_removed)

    @property
    def subchannels(self) -> tuple[S, ...]:
        """In the order of their ids; without those whose instance is gone."""
        return self._pool.subchannels

    @property
    def name(self) -> str:
        """Of the service."""
        return self._pool.name

    @property
    def target(self) -> str:
        """The name of the service: for code that asks a channel for its target."""
        return self._pool.name

    @property
    def calls(self) -> int:
        """How many calls are in flight, also on subchannels whose instance is gone."""
        return sum(one.calls for one in (*self._pool.subchannels, *self._pool.leaving))

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._pool.closing

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        """The best state of any subchannel, as gRPC's round_robin has it; SHUTDOWN once closed.

        CONNECTING until the instances are known; TRANSIENT_FAILURE if there are none.

        Args:
            try_to_connect: Whether to connect those that are IDLE, if none is READY.
        """
        state = self._pool.whole_state()
        if try_to_connect and state is not READY:
            self._pool.connect(self._pool.subchannels)
        return state

    def on_close(self, callback: Callable[[], object]) -> Callable[[], None]:
        """Call `callback()` once when the channel is closed, before its calls are ended.

        On the thread that closes it, or on the loop; now if it is closed. If it raises, that is
        the event `CallbackFailed`.

        Returns:
            A function that removes the callback.
        """
        return self._pool.close_callbacks.add(callback)

    def __repr__(self) -> str:
        subchannels = self.subchannels
        unhealthy = sum(not one.healthy for one in subchannels)
        state = (
            "closed" if self.closed else f"{len(subchannels)} subchannels, {unhealthy} unhealthy"
        )
        return f"<{self._title} {self.name!r}, {state}, calls in flight: {self.calls}>"
