"""Interceptors and channels with policies for `grpc.aio`; `sync.py` has the same for `grpc`.

There are two ways to apply policies to a channel::

    channel = intercept_channel(grpc.aio.insecure_channel(target), policy)
    channel = grpc.aio.insecure_channel(target, interceptors=client_interceptors(policy))

The first costs less, because grpc.aio runs interceptors in a task for each call. The second is for
a position between other interceptors.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Self

from rpcwheel._grpc.aio_relay import immediately
from rpcwheel.durations import to_ns
from rpcwheel.failback.aio import FailbackInvoker

from .aio_client import InterceptedChannel, interceptors_of
from .aio_server import server_interceptors
from .queues import FailbackQueuesBase, client_state

if TYPE_CHECKING:
    import grpc

    from rpcwheel.call.policy import CallPolicy
    from rpcwheel.durations import Duration
    from rpcwheel.failback.queued_call import FailedCall
    from rpcwheel.timer.api import Timer

__all__ = ["FailbackQueues", "client_interceptors", "intercept_channel", "server_interceptors"]


class FailbackQueues(FailbackQueuesBase[FailbackInvoker]):
    """The failback queues of the calls of one or more clients; an async context that closes.

    Example::

        async with FailbackQueues() as queues:
            channel = intercept_channel(grpc.aio.insecure_channel(target), policy, queues=queues)
            ...
    """

    def __init__(self, timer: Timer | None = None) -> None:
        """Begin without a queue.

        Args:
            timer: Any rpcwheel timer; None takes `shared_timer()`.
        """
        super().__init__(partial(FailbackInvoker, timer=timer))

    async def flush(self, timeout: Duration | None = None) -> bool:  # noqa: ASYNC109 - as for grpc
        """Try every queued call now, and wait until nothing is pending; as for `grpc`."""
        if timeout is not None:
            to_ns(timeout, what="timeout")
        queues = list(self._named.values())
        return all(await asyncio.gather(*(queue.flush(timeout) for queue in queues)))

    async def close(self, drain_timeout: Duration = 5.0) -> list[FailedCall]:
        """Queue no more calls, try to deliver the queued ones, and report the others.

        As for `grpc`: returns the calls that were queued and were not delivered in that time.
        All queues at the same time.
        """
        to_ns(drain_timeout, what="drain_timeout")
        with self._lock:
            self._closed = True
        queues = list(self._named.values())
        reports = await asyncio.gather(*(queue.close(drain_timeout) for queue in queues))
        return [call for report in reports for call in report]

    def _end(self, queue: FailbackInvoker) -> None:
        immediately(queue.close(0))  # an empty queue has nothing to wait for

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def client_interceptors(
    policy: CallPolicy, *, timer: Timer | None = None, queues: FailbackQueues | None = None
) -> list[grpc.aio.ClientInterceptor]:
    """Make the interceptors for one channel: `grpc.aio.insecure_channel(..., interceptors=...)`.

    The first interceptor of a channel is the outermost. Put these after interceptors that should
    see a call once, and before those that should see each attempt (fresh tokens, metrics).

    Args:
        policy: The policies of all methods.
        timer: Any rpcwheel timer; None for `shared_timer()`.
        queues: The queues of failback; None for new ones, which exist until the process ends.

    Returns:
        Four objects, one for each kind of call, because grpc.aio uses an object for one kind only.
        They share one retry budget, so make new ones for a channel to another target.
    """
    return interceptors_of(client_state(policy, timer, queues, FailbackQueues))


def intercept_channel(
    channel: grpc.aio.Channel,
    policy: CallPolicy,
    *,
    timer: Timer | None = None,
    queues: FailbackQueues | None = None,
) -> grpc.aio.Channel:
    """Apply policies to a channel; arguments as of `client_interceptors`.

    Returns:
        A channel whose calls follow the policies. Closing it closes `channel`.

    Raises:
        TypeError: `channel` is not a channel of grpc.aio.
    """
    return InterceptedChannel(channel, client_state(policy, timer, queues, FailbackQueues))
