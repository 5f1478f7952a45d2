"""One call on several members at once, on an event loop: the first good answer, or all answers.

Both are views of a channel, or of several: a stub is made of them as of any channel. Unary calls
only: a stub may have other methods, which say so when they are called.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, Self, TypeAlias

import grpc

from rpcwheel._grpc.aio_finished import failed_with, finished_call, status_of
from rpcwheel.errors import ConfigurationError
from rpcwheel.rpc import Kind

from ._aio_channel import ClusterChannel
from ._aio_several import OfChannels, OfCluster, Several, answer_of, cancel_all
from .failed import BroadcastFailed, told_apart
from .member import checked_count

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    Channels: TypeAlias = ClusterChannel | Sequence[grpc.aio.Channel]
    Source: TypeAlias = OfCluster | OfChannels

__all__ = ["BroadcastInvoker", "ForkingInvoker"]


class _Unary(grpc.aio.UnaryUnaryMultiCallable):  # type: ignore[type-arg]  # not in 1.76
    """A method of a stub. The base of both."""

    def __init__(self, source: Source, method: str) -> None:
        self._source = source
        self._method = method

    def __call__(
        self,
        request: Any,
        *,
        timeout: float | None = None,
        metadata: Any = None,
        credentials: grpc.CallCredentials | None = None,
        wait_for_ready: bool | None = None,
        compression: grpc.Compression | None = None,
    ) -> Any:
        options = {
            "timeout": timeout,
            "metadata": metadata,
            "credentials": credentials,
            "wait_for_ready": wait_for_ready,
            "compression": compression,
        }
        several = Several(self._method, self._source, options)
        return several.begin(partial(self._carry_out, several, request))

    @abstractmethod
    async def _carry_out(self, several: Several, request: Any) -> Any: ...


class _Forked(_Unary):
    def __init__(self, source: Source, method: str, forks: int) -> None:
        super().__init__(source, method)
        self._forks = forks

    async def _carry_out(self, several: Several, request: Any) -> Any:
        while True:
            legs, forks = await several.legs(self._forks, request)
            call, error = await _first_of([call for _, call in legs])
            if error is None:
                return call
            if forks is None or forks.heard or not several.options["wait_for_ready"]:
                raise error
            if not await several.source.look_again(several.left_ns()):
                details = status_of(error).details()
                raise failed_with(grpc.StatusCode.DEADLINE_EXCEEDED, details)


class _Broadcast(_Unary):
    async def _carry_out(self, several: Several, request: Any) -> Any:
        legs, _ = await several.legs(None, request)
        answers, errors = {}, {}
        try:
            for target, call in legs:
                answer, error = await answer_of(call)
                if error is None:
                    answers[target] = answer
                else:
                    errors[target] = status_of(error)
        finally:
            cancel_all([call for _, call in legs])
        if errors:
            raise BroadcastFailed(self._method, answers, errors)
        return finished_call(Kind.UNARY_UNARY, grpc.StatusCode.OK, "", result=answers)


async def _first_of(calls: Sequence[Any]) -> tuple[Any, BaseException | None]:
    """The first that has succeeded, or the last that has failed, and its error; ends the others."""
    done: asyncio.Queue[Any] = asyncio.Queue()
    error: BaseException | None = None
    call = None
    try:
        for one in calls:
            one.add_done_callback(partial(_put, done, one))
        for _ in calls:
            call = await done.get()
            _, error = await answer_of(call)
            if error is None:
                break
        return call, error
    finally:
        cancel_all(calls)


def _put(done: asyncio.Queue[Any], call: object, _: object) -> None:
    """By a done-callback; what that gives may be the call below an interceptor's."""
    done.put_nowait(call)


class _View(grpc.aio.Channel):
    """A channel for stubs, over others. Closing it closes none of them."""

    def __init__(self, channel: Channels) -> None:
        self._channels = _checked(channel)

    def _source(self, *given: Any, **options: Any) -> Source:
        if isinstance(self._channels, ClusterChannel):
            return OfCluster(self._channels.unary_unary(*given, **options))
        methods = [channel.unary_unary(*given, **options) for channel in self._channels]
        return OfChannels(told_apart(map(_name, self._channels)), methods)

    def _refuse(self, method: str, *_: Any, **__: Any) -> Any:
        return partial(_refuse, f"{method} streams; {type(self).__name__} is for unary calls")

    unary_stream = stream_unary = stream_stream = _refuse

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        """Tell the state of the channel, if it is one of many members.

        Raises:
            ConfigurationError: There are several, each with a state of its own.
        """
        return self._one().get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        """As `get_state`."""
        await self._one().wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        """As `get_state`."""
        await self._one().channel_ready()

    def _one(self) -> ClusterChannel:
        if isinstance(self._channels, ClusterChannel):
            return self._channels
        raise ConfigurationError("several channels have no one state; ask each")

    async def close(self, grace: float | None = None) -> None:
        """Do nothing: the channels are their owners' to close."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc_val: BaseException | None,
        exc_tb: TracebackType | None,
    ) -> None:
        await self.close()


class ForkingInvoker(_View):
    """Makes each unary call on several members at once; the first good answer is the caller's.

    The other calls are cancelled then. If none succeeds, the last error is the caller's. For calls
    that may be carried out more than once: reads, where an answer must come soon.

    (Dubbo's `forking` leaves the others running, and gives None when the time is over.)
    """

    def __init__(self, channel: Channels, forks: int = 2) -> None:
        """Make the view.

        Args:
            channel: A `ClusterChannel` of `rpcwheel.aio`, whose picker says which members,
                and which gets a call that another one did not get; or channels, taken in turn.
            forks: How many at once; all that any call may go to, if those are fewer.

        Raises:
            TypeError, ConfigurationError: An argument makes no sense.
        """
        super().__init__(channel)
        self._forks = checked_count(forks, what="forks")

    def unary_unary(self, method: str, *args: Any, **options: Any) -> Any:
        """Make a member of a stub."""
        return _Forked(self._source(method, *args, **options), method, self._forks)


class BroadcastInvoker(_View):
    """Makes each unary call on every member and returns a dict of the answers.

    Its keys are the addresses of the members (`10.0.0.7:50051`), or the targets of the channels if
    a list of channels was given. A second member with the same address has the key `"address #2"`,
    and so on. All calls are made at once, each with the caller's timeout. If one fails, raises
    `BroadcastFailed`, which has the answers of the others. Members that are down, or want no new
    calls, are called too.

    (Dubbo's `broadcast` asks one after the other.)
    """

    def unary_unary(self, method: str, *args: Any, **options: Any) -> Any:
        """Make a member of a stub."""
        return _Broadcast(self._source(method, *args, **options), method)


def _refuse(said: str, *_: Any, **__: Any) -> NoReturn:
    raise ConfigurationError(said)


def _checked(channel: Any) -> Channels:
    if isinstance(channel, ClusterChannel):
        return channel
    several = isinstance(channel, (list, tuple))
    if not several or not all(isinstance(one, grpc.aio.Channel) for one in channel):
        way_out = (
            "interceptors hide its members, also those of kit.channel. Give it the channel of "
            "rpcwheel.aio.insecure_channel(url), and put what intercepts in front of it: "
            "kit.intercept_channel(BroadcastInvoker(channel))"
        )
        raise TypeError(
            "channel must be a ClusterChannel of rpcwheel.aio, or a list of channels of grpc.aio, "
            f"not {channel!r}; "
            + (
                way_out
                if isinstance(channel, grpc.aio.Channel)
                else "rpcwheel has the same for grpc"
            )
        )
    if not channel:
        raise ConfigurationError("channel must not be an empty list")
    return tuple(channel)


def _name(channel: grpc.aio.Channel) -> str:
    """Its target, if it tells; grpc.aio's own do not."""
    return str(getattr(channel, "target", "channel"))
