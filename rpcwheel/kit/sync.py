"""The kit for `grpc`: its policies in front of your channels and servers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

from rpcwheel.failback.sync import FailbackInvoker
from rpcwheel.interceptors.sync import (
    Queues,
    client_interceptors,
    intercept_channel,
    server_interceptors,
)

from .base import KitBase

if TYPE_CHECKING:
    import grpc

    from rpcwheel.durations import Duration
    from rpcwheel.failback.entry import FailedCall

__all__ = ["Kit"]


class Kit(KitBase[Queues]):
    """Deadlines, retries, failsafe and failback for your own channels and servers.

    One kit serves any number of channels and servers; `rpcwheel.aio.Kit` is that of `grpc.aio`.
    Close it at the end: calls may be queued. Thread-safe; a context manager that closes.

    Example::

        with rpcwheel.Kit(timeout=2.0, retry=RetryPolicy(on={"UNAVAILABLE"})) as kit:
            channel = kit.intercept_channel(grpc.insecure_channel("127.0.0.1:50051"))
            server = grpc.server(pool, interceptors=kit.server_interceptors())
    """

    def _make_queues(self) -> Queues:
        for policy in (self._policy, *self._policy.methods.values()):
            if policy.failback is not None:
                FailbackInvoker(policy.failback)  # refuses now what no thread could carry out
        return Queues(self._timer)

    def client_interceptors(self) -> list[Any]:
        """Make the interceptors for one channel: `grpc.intercept_channel(channel, *these)`.

        Call it once for each channel: each call makes a new budget of retries, which is that of one
        target. The queues of failback are the kit's.
        """
        return client_interceptors(self._policy, timer=self._timer, queues=self._queues)

    def server_interceptors(self) -> list[grpc.ServerInterceptor]:
        """Make the interceptors for a server: `grpc.server(pool, interceptors=these)`."""
        return server_interceptors(self._policy, timer=self._timer)

    def intercept_channel(self, channel: grpc.Channel) -> grpc.Channel:
        """Put the policies in front of a channel, which stays yours to close."""
        return intercept_channel(channel, self._policy, timer=self._timer, queues=self._queues)

    def flush(self, timeout: Duration | None = None) -> bool:
        """Try every parked call now, and wait until none is pending; True if none is.

        Args:
            timeout: Seconds to wait at most; None waits until all are delivered or given up.
        """
        return self._queues.flush(timeout)

    def close(self, drain: Duration = 5.0) -> list[FailedCall]:
        """Park no more calls, try to deliver those that are, and report the others.

        Calls go on to work, but one that failback would park raises `FailbackClosed`. Idempotent.
        Channels and servers are not closed: they are yours. Close the kit before the channels: it
        delivers through them. `with kit:` closes too, but drops the list.

        Args:
            drain: Seconds to go on trying. 0: not at all.

        Returns:
            The calls that were still waiting and were not delivered, oldest first; [] if nothing
            was. Calls given up earlier went to `dead_letter`, the log and an event; `stats()` has
            their number, `abandoned`.
        """
        return self._queues.close(drain)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
