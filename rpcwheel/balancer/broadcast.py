"""`BroadcastChannel` for `grpc`: each unary call goes to all servers at once."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import grpc

from rpcwheel._grpc.calls import CLOSED_DURING_CALL, failure_of, metadata_tuple
from rpcwheel._grpc.connectivity import core_target
from rpcwheel._grpc.finished import FinishedError, FinishedResponse
from rpcwheel._grpc.multicallable import Channel, UnaryUnary
from rpcwheel.errors import ConfigurationError

from .broadcast_base import BroadcastBase, BroadcastFailed, distinct_names
from .channel import BalancedChannel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from .channel import Subchannel, _BalancedMethod


class BroadcastChannel(BroadcastBase, Channel):
    """A channel whose unary calls go to all servers at once, and return a dict of the responses.

    Its keys are the addresses of the servers (`10.0.0.7:50051`), or the targets of the channels if
    it was made of several. If two are the same, the second key is `"10.0.0.7:50051 #2"`, and so on.
    If the call fails on a server, raises `BroadcastFailed`, which has the other responses.

    All subchannels get the call, in any state, including unhealthy and DRAINING ones; those of the
    call's tag, if its servers are Dubbo's. With more
    instances than `BalancerPolicy.subset_size` the channel has subchannels for only some of them;
    set it to None to reach all.

    The calls block; `.future()` and streams are refused. (Dubbo's `broadcast` calls the servers one
    after the other.)
    """

    _modules = "rpcwheel", "rpcwheel.aio"
    _balanced_class = BalancedChannel
    _plain_class = grpc.Channel

    def unary_unary(self, method: str, *args: Any, **options: Any) -> grpc.UnaryUnaryMultiCallable:
        """Make a multicallable."""
        if isinstance(self._channel, BalancedChannel):
            of_all: Any = self._channel.unary_unary(method, *args, **options)
            return _Broadcast(method, partial(_begin_on_subchannels, of_all))
        methods = [channel.unary_unary(method, *args, **options) for channel in self._channel]
        names = distinct_names(map(_target, self._channel))
        return _Broadcast(method, partial(_begin_on_channels, names, methods))

    def subscribe(
        self,
        callback: Callable[[grpc.ChannelConnectivity], None],
        try_to_connect: bool | None = False,
    ) -> None:
        """Subscribe to the state of the `BalancedChannel`.

        Raises:
            ConfigurationError: It was made of several channels.
        """
        self._balanced("subscribe to them").subscribe(callback, try_to_connect)

    def unsubscribe(self, callback: Callable[[grpc.ChannelConnectivity], None]) -> None:
        """End a subscription."""
        if isinstance(self._channel, BalancedChannel):
            self._channel.unsubscribe(callback)

    def close(self) -> None:
        """Do nothing: the given channels stay open."""


class BroadcastFailedRpc(BroadcastFailed, FinishedError):
    """`BroadcastFailed` as a call: grpc passes a failed call to interceptors as its error."""

    def __init__(self, method: str, responses: dict[str, Any], errors: dict[str, Any]) -> None:
        BroadcastFailed.__init__(self, method, responses, errors)
        FinishedError.__init__(self, self.code(), str(self))


class _Broadcast(UnaryUnary):
    """One method of a stub."""

    def __init__(self, method: str, begin: Callable[..., Iterator[tuple[str, Any]]]) -> None:
        self._method = method
        self._begin_all = begin

    def _wait(
        self, name: str, request: Any, timeout: float | None, metadata: Any, *options: Any
    ) -> Any:
        metadata = None if metadata is None else metadata_tuple(metadata)  # may be an iterator
        calls: dict[str, Any] = {}
        responses, errors = {}, {}
        try:
            for server, call in self._begin_all(request, timeout, metadata, *options):
                calls[server] = call  # noqa: PERF403 - if the next one raises, these are canceled
            for server, call in calls.items():
                error = failure_of(call)
                if error is None:
                    responses[server] = call.result()
                else:
                    errors[server] = _as_rpc_error(error)
        finally:
            for call in calls.values():
                call.cancel()  # if the wait was interrupted
        if errors:
            raise BroadcastFailedRpc(self._method, responses, errors)
        return responses if name == "__call__" else (responses, FinishedResponse(responses, ""))

    def _begin(self, *_: Any) -> NoReturn:
        raise ConfigurationError(
            f"{self._method}: a BroadcastChannel has no .future(); its calls block"
        )


def _begin_on_subchannels(
    method: _BalancedMethod, request: Any, timeout: float | None, *options: Any
) -> Iterator[tuple[str, Any]]:
    """Begin a call on each subchannel; waits on this thread until there are subchannels."""
    pool, (metadata, _, wait_for_ready, _) = method.pool, options
    subchannels = pool.subchannels_for(metadata)
    if not subchannels:
        pending = pool.rules.begin(
            method.name, None, metadata, timeout, wait_for_ready, time.monotonic()
        )
        subchannels = pool.waiting.wait_for(pending, pool.try_subchannels)
        timeout = pending.timeout_left_s(time.monotonic())
    names = distinct_names(subchannel.address for subchannel in subchannels)
    for name, subchannel in zip(names, subchannels, strict=True):
        yield name, _begin_on(method, subchannel, request, timeout, options)


def _begin_on(method: _BalancedMethod, subchannel: Subchannel, *arguments: Any) -> Any:
    problem = method.pool.connections.try_connect(subchannel)
    if not problem:
        call = method.begin_on(subchannel, "future", *arguments)
        if call is not None:
            return call
        problem = "its instance was removed"
    return FinishedError(grpc.StatusCode.UNAVAILABLE, problem)


def _begin_on_channels(
    names: Sequence[str], methods: Sequence[Any], *arguments: Any
) -> Iterator[tuple[str, Any]]:
    for name, method in zip(names, methods, strict=True):
        yield name, method.future(*arguments)


def _as_rpc_error(error: BaseException) -> BaseException:
    """Return an error with a status; an interceptor may raise any exception."""
    if isinstance(error, grpc.RpcError) and hasattr(error, "code"):
        return error
    if isinstance(error, grpc.FutureCancelledError):
        return FinishedError(grpc.StatusCode.CANCELLED, CLOSED_DURING_CALL)
    return FinishedError(grpc.StatusCode.UNKNOWN, f"{type(error).__name__}: {error}", error=error)


def _target(channel: grpc.Channel) -> str:
    return getattr(channel, "target", None) or core_target(channel) or "channel"
