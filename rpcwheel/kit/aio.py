"""The kit for `grpc.aio`: the twin of `sync.py`, with the same names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

from rpcwheel.interceptors.aio import (
    Queues,
    client_interceptors,
    intercept_channel,
    server_interceptors,
)

from .base import KitBase

if TYPE_CHECKING:
    import grpc.aio

    from rpcwheel.durations import Duration
    from rpcwheel.failback.entry import FailedCall

__all__ = ["Kit"]


class Kit(KitBase[Queues]):
    """Deadlines, retries, failsafe and failback for your own channels and servers of `grpc.aio`.

    As `rpcwheel.Kit`, with coroutines where it waits; an async context manager that closes.

    Example::

        async with rpcwheel.aio.Kit(timeout=2.0) as kit:
            channel = kit.intercept_channel(grpc.aio.insecure_channel("127.0.0.1:50051"))
            server = grpc.aio.server(interceptors=kit.server_interceptors())
    """

    def _make_queues(self) -> Queues:
        return Queues(self._timer)

    def client_interceptors(self) -> list[Any]:
        """Make those of one channel: `grpc.aio.insecure_channel(target, interceptors=these)`.

        Call it once for each channel, as in the sync twin.
        """
        return client_interceptors(self._policy, timer=self._timer, queues=self._queues)

    def server_interceptors(self) -> list[grpc.aio.ServerInterceptor]:
        """Make the interceptors for a server: `grpc.aio.server(interceptors=these)`."""
        return server_interceptors(self._policy, timer=self._timer)

    def intercept_channel(self, channel: grpc.aio.Channel) -> grpc.aio.Channel:
        """Put the policies in front of a channel that exists already, and stays yours to close."""
        return intercept_channel(channel, self._policy, timer=self._timer, queues=self._queues)

    async def flush(self, timeout: Duration | None = None) -> bool:  # noqa: ASYNC109 - as the twin
        """Try every parked call now, and wait until none is pending; as in the sync twin."""
        return await self._queues.flush(timeout)

    async def close(self, drain: Duration = 5.0) -> list[FailedCall]:
        """Park no more calls, try to deliver those that are, and report the others; as the twin.

        [] if nothing was still waiting; calls given up earlier went to `dead_letter`, the log and
        an event.
        """
        return await self._queues.close(drain)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
