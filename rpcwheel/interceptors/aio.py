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
from typing import TYPE_CHECKING, ClassVar, Final

from rpcwheel._concurrency.closing import AsyncClosing
from rpcwheel.durations import to_ns
from rpcwheel.failback.aio import FailbackInvoker, close_all

from .aio_client import InterceptedChannel, interceptors_for
from .aio_server import server_interceptors
from .applying import apply_policies_with, client_state, refuse_journal
from .queues import FailbackQueuesBase

if TYPE_CHECKING:
    import grpc

    from rpcwheel.admission.targets import Breakers
    from rpcwheel.call.failback_policy import FailedCall
    from rpcwheel.call.policy import CallPolicy
    from rpcwheel.durations import Duration
    from rpcwheel.timer.api import Timer

__all__ = ["FailbackQueues", "client_interceptors", "intercept_channel", "server_interceptors"]


class FailbackQueues(FailbackQueuesBase[FailbackInvoker], AsyncClosing):
    """The failback queues of the calls of one or more clients. Thread-safe.

    Failback: a failed call is queued and retried in the background, and its caller gets a default
    response. An `async with` statement closes the queues at its end.

    Example::

        queues = FailbackQueues()
        bare = grpc.aio.insecure_channel(target)
        async with intercept_channel(bare, policy, queues=queues) as channel, queues:
            ...  # at the end the queues are closed first: they deliver through the channel
    """

    _invoker_class: ClassVar[type[FailbackInvoker]] = FailbackInvoker

    async def flush(self, timeout: Duration | None = None) -> bool:  # noqa: ASYNC109 - as for grpc
        """Try every queued call now, and wait until nothing is pending.

        Args:
            timeout: Seconds to wait at most; None waits until all are delivered or given up.

        Returns:
            Whether nothing was pending in the end.

        Raises:
            TypeError, ConfigurationError: `timeout` is no time.
        """
        if timeout is not None:
            to_ns(timeout, subject="timeout")  # raises before any queue is flushed
        invokers = list(self._by_name.values())
        return all(await asyncio.gather(*(invoker.flush(timeout) for invoker in invokers)))

    async def close(self, drain_timeout: Duration = 5.0) -> list[FailedCall]:
        """Queue no more calls, try to deliver the queued ones, and report the others.

        Idempotent. A call that fails from now on raises `FailbackClosed` where it would be queued.

        Args:
            drain_timeout: Seconds to go on trying, all queues at the same time. 0: not at all.

        Returns:
            The queued calls that have not succeeded by then, queue by queue, oldest first; see
            `FailbackInvoker.close`.

        Raises:
            RuntimeError: Called inside an attempt of one of the queues. None is closed then.
            TypeError, ConfigurationError: `drain_timeout` is no time.
        """
        to_ns(drain_timeout, subject="drain_timeout")  # raises before any queue is closed
        self._begin_close()
        try:
            return await close_all(list(self._by_name.values()), drain_timeout)
        finally:
            for channel in self._take_kept():
                await channel.close_kept()


def client_interceptors(
    policy: CallPolicy, *, timer: Timer | None = None, queues: FailbackQueues | None = None
) -> list[grpc.aio.ClientInterceptor]:
    """Make the interceptors for one channel: `grpc.aio.insecure_channel(..., interceptors=...)`.

    The first interceptor of a channel is the outermost. Put these after interceptors that should
    see a call once, and before those that should see each attempt (fresh tokens, metrics).

    Args:
        policy: The policies of all methods.
        timer: Any rpcwheel timer; None for `shared_timer()`.
        queues: The queues of failback. None: new ones, which can't be closed and exist until the
            process ends; give your own to close them.

    Returns:
        Four objects, one for each kind of call, because grpc.aio uses an object for one kind only.
        They share one retry budget, so make new ones for a channel to another target.
    """
    return make_interceptors(policy, timer=timer, queues=queues)


def make_interceptors(
    policy: CallPolicy,
    *,
    timer: Timer | None,
    queues: FailbackQueues | None,
    breakers: Breakers | None = None,
) -> list[grpc.aio.ClientInterceptor]:
    """Make the interceptors for one channel, for `client_interceptors` and kits."""
    state = client_state(
        policy, timer=timer, queues=queues, queues_class=FailbackQueues, breakers=breakers
    )
    refuse_journal(state)
    return interceptors_for(state)


def intercept_channel(
    channel: grpc.aio.Channel,
    policy: CallPolicy,
    *,
    timer: Timer | None = None,
    queues: FailbackQueues | None = None,
) -> grpc.aio.Channel:
    """Apply policies to a channel; arguments as of `client_interceptors`.

    Warns (`RuntimeWarning`) if both the policies and those that the channel already has retry or
    hedge: their attempts multiply.

    Returns:
        A channel whose calls follow the policies. Closing it closes `channel`.

    Raises:
        TypeError: `channel` is not a channel of grpc.aio.
    """
    return apply_policies(channel, policy, timer=timer, queues=queues, stacklevel=3)


apply_policies: Final = partial(apply_policies_with, InterceptedChannel, FailbackQueues)
"""Apply policies to a channel, for `intercept_channel` and kits."""
