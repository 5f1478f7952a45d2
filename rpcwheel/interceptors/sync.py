"""Interceptors and channels with policies for `grpc`, and the queues of failback.

Apply them to existing channels and servers::

    channel = intercept_channel(grpc.insecure_channel(target), policy)
    server = grpc.server(pool, interceptors=server_interceptors())
"""

from __future__ import annotations

import warnings
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Final

from rpcwheel._concurrency.closing import Closing
from rpcwheel.durations import to_ns
from rpcwheel.failback.sync import FailbackInvoker, close_all, flush_all

from .applying import apply_policies_with, client_state, refuse_journal
from .client import InterceptedChannel, interceptors_for
from .queues import FailbackQueuesBase
from .server import server_interceptors

if TYPE_CHECKING:
    import grpc

    from rpcwheel.admission.targets import Breakers
    from rpcwheel.call.failback_policy import FailedCall
    from rpcwheel.call.policy import CallPolicy
    from rpcwheel.durations import Duration
    from rpcwheel.timer.api import Timer

__all__ = ["FailbackQueues", "client_interceptors", "intercept_channel", "server_interceptors"]

HEDGES_FUTURES: Final = (
    "client_interceptors() hedges only calls of .future(), because an interceptor of grpc can't "
    "cancel a blocking attempt; use intercept_channel()"
)


class FailbackQueues(FailbackQueuesBase[FailbackInvoker], Closing):
    """The failback queues of the calls of one or more clients. Thread-safe.

    Failback: a failed call is queued and retried in the background, and its caller gets a default
    response. A `with` statement closes the queues at its end.

    Example::

        queues = FailbackQueues()
        bare = grpc.insecure_channel(target)
        with intercept_channel(bare, policy, queues=queues) as channel, queues:
            ...  # at the end the queues are closed first: they deliver through the channel
    """

    _invoker_class: ClassVar[type[FailbackInvoker]] = FailbackInvoker

    def flush(self, timeout: Duration | None = None) -> bool:
        """Try every queued call now, and wait until nothing is pending.

        Args:
            timeout: Seconds to wait at most; None waits until all are delivered or given up.

        Returns:
            Whether nothing was pending in the end.

        Raises:
            TypeError, ConfigurationError: `timeout` is no time.
        """
        if timeout is not None:
            to_ns(timeout, subject="timeout")
        return flush_all(list(self._by_name.values()), timeout)

    def close(self, drain_timeout: Duration = 5.0) -> list[FailedCall]:
        """Queue no more calls, try to deliver those that are queued, and report the others.

        Idempotent. A call that fails from now on raises `FailbackClosed` where it would be queued.

        Args:
            drain_timeout: Seconds to go on trying, all queues at the same time. 0: not at all.

        Returns:
            The calls that were queued and were not delivered in that time, queue by queue, oldest
            first; see `FailbackInvoker.close`.

        Raises:
            RuntimeError: Called inside an attempt of one of the queues. None is closed then.
            TypeError, ConfigurationError: `drain_timeout` is no time.
        """
        to_ns(drain_timeout, subject="drain_timeout")
        self._begin_close()
        try:
            return close_all(list(self._by_name.values()), drain_timeout)
        finally:
            for channel in self._take_kept():
                channel.close_kept()


def client_interceptors(
    policy: CallPolicy,
    *,
    timer: Timer | None = None,
    queues: FailbackQueues | None = None,
) -> list[grpc.UnaryUnaryClientInterceptor]:
    """Make the interceptors for one channel, to be given to `grpc.intercept_channel`.

    The first interceptor of a channel is the outermost. Put these after interceptors that should
    see a call once, and before those that should see each attempt (fresh tokens, metrics).
    `intercept_channel` costs less, and hedges blocking calls too.

    Args:
        policy: The policies of all methods.
        timer: Any rpcwheel timer; None for `shared_timer()`.
        queues: The queues of failback. None: new ones, which can't be closed and exist until the
            process ends; give your own to close them.

    Returns:
        One object for all four kinds of call. It has one retry budget, so make a new one for a
        channel to another target.
    """
    return make_interceptors(policy, timer=timer, queues=queues, stacklevel=3)


def make_interceptors(
    policy: CallPolicy,
    *,
    timer: Timer | None,
    queues: FailbackQueues | None,
    stacklevel: int,
    breakers: Breakers | None = None,
) -> list[grpc.UnaryUnaryClientInterceptor]:
    """Make the interceptors for one channel, for `client_interceptors` and kits.

    A warning names the frame `stacklevel`; 2 is the caller of this function.
    """
    state = client_state(
        policy, timer=timer, queues=queues, queues_class=FailbackQueues, breakers=breakers
    )
    refuse_journal(state)
    if any(settings.hedging is not None for settings in (policy, *policy.methods.values())):
        warnings.warn(HEDGES_FUTURES, stacklevel=stacklevel)
    return interceptors_for(state)


def intercept_channel(
    channel: grpc.Channel,
    policy: CallPolicy,
    *,
    timer: Timer | None = None,
    queues: FailbackQueues | None = None,
) -> grpc.Channel:
    """Apply policies to a channel; arguments as of `client_interceptors`.

    Warns (`RuntimeWarning`) if both the policies and those that the channel already has retry or
    hedge: their attempts multiply.

    Returns:
        A channel whose calls follow the policies. Closing it closes `channel`.

    Raises:
        TypeError: `channel` is not a channel of grpc.
    """
    return apply_policies(channel, policy, timer=timer, queues=queues, stacklevel=3)


apply_policies: Final = partial(apply_policies_with, InterceptedChannel, FailbackQueues)
"""Apply policies to a channel, for `intercept_channel` and kits."""
