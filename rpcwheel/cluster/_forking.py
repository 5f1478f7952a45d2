"""One call on several members at once, for threads: the first good answer, or all answers.

Both are views of a channel, or of several: a stub is made of them as of any channel. Unary calls
only, and those that wait: a stub may have other methods, which say so when they are called.
"""

from __future__ import annotations

from abc import abstractmethod
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, NoReturn, Self, TypeAlias

import grpc

from rpcwheel._grpc.calls import InternalCallback
from rpcwheel._grpc.connectivity import target_below
from rpcwheel._grpc.finished import FinishedError, FinishedResponse
from rpcwheel.errors import ConfigurationError

from ._channel import ClusterChannel
from ._spread import OfCluster
from .failed import BroadcastFailed, told_apart
from .member import checked_count

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

    from ._spread import Running

    Channels: TypeAlias = ClusterChannel | Sequence[grpc.Channel]

__all__ = ["BroadcastInvoker", "ForkingInvoker"]


class _OfChannels:
    """One method of several channels."""

    def __init__(self, names: Sequence[str], methods: Sequence[Any]) -> None:
        self._named = list(zip(names, methods, strict=True))
        self._turn = 0

    def spread(self, count: int | None, request: Any, options: tuple[Any, ...]) -> _Fixed:
        """Begin it on so many channels, in turn; on all if None."""
        size = len(self._named)
        first = self._turn = (self._turn + 1) % size  # two threads may take the same: no matter
        places = [(first + step) % size for step in range(min(size, count or size))]
        return _Fixed(
            [
                (self._named[place][0], self._named[place][1].future(request, *options))
                for place in places
            ]
        )


class _Fixed:
    """One call on some channels."""

    def __init__(self, running: list[Running]) -> None:
        self.running = running

    def moved(self, _: Any) -> None:
        """Tell that it goes to no other."""

    def anew(self, error: BaseException) -> NoReturn:
        """Tell that it is not made again."""
        raise error


class _Unary(grpc.UnaryUnaryMultiCallable):
    """A method of a stub. The base of both."""

    def __init__(self, source: OfCluster | _OfChannels, method: str) -> None:
        self._source = source
        self._method = method

    def __call__(self, request: Any, *args: Any, **options: Any) -> Any:
        """Carry out the call; takes what grpc's own does."""
        return self.with_call(request, *args, **options)[0]

    def with_call(
        self,
        request: Any,
        timeout: float | None = None,
        metadata: Any = None,
        credentials: grpc.CallCredentials | None = None,
        wait_for_ready: bool | None = None,
        compression: grpc.Compression | None = None,
    ) -> Any:
        """Carry out the call, and give it too."""
        return self._carry_out(
            request, (timeout, metadata, credentials, wait_for_ready, compression)
        )

    def future(self, *_: Any, **__: Any) -> NoReturn:
        """Refuse: these calls are waited for."""
        raise ConfigurationError(f"{self._method}: .future() is not for calls on several members")

    @abstractmethod
    def _carry_out(self, request: Any, options: tuple[Any, ...]) -> Any: ...


class _Forked(_Unary):
    def __init__(self, source: OfCluster | _OfChannels, method: str, forks: int) -> None:
        super().__init__(source, method)
        self._forks = forks

    def _carry_out(self, request: Any, options: tuple[Any, ...]) -> Any:
        spread = self._source.spread(self._forks, request, options)
        done: SimpleQueue[Any] = SimpleQueue()
        running = [call for _, call in spread.running]
        try:
            for call in running:
                call.add_done_callback(InternalCallback(done.put))
            ended = 0
            while True:
                call, ended = done.get(), ended + 1
                error = _error_of(call)
                if error is None:
                    return call.result(), call
                other = spread.moved(call)
                more = [] if other is None else [other]
                if ended == len(running) and not more:
                    more = spread.anew(error)
                for one in more:
                    running.append(one)
                    one.add_done_callback(InternalCallback(done.put))
        finally:
            for call in running:
                call.cancel()


class BroadcastFailedRpc(BroadcastFailed, FinishedError):
    """`BroadcastFailed` as a call, which is what interceptors of grpc get of one that failed."""

    def __init__(self, method: str, answers: dict[str, Any], errors: dict[str, Any]) -> None:
        BroadcastFailed.__init__(self, method, answers, errors)
        FinishedError.__init__(self, self.code(), str(self))


class _Broadcast(_Unary):
    def _carry_out(self, request: Any, options: tuple[Any, ...]) -> Any:
        running = self._source.spread(None, request, options).running
        answers, errors = {}, {}
        try:
            for target, call in running:
                error = call.exception()
                if error is None:
                    answers[target] = call.result()
                else:
                    errors[target] = error
        finally:
            for _, call in running:
                call.cancel()  # if the wait was interrupted
        if errors:
            raise BroadcastFailedRpc(self._method, answers, errors)
        return answers, FinishedResponse(answers, "")


def _error_of(call: Any) -> BaseException | None:
    try:
        error: BaseException | None = call.exception()
    except grpc.FutureCancelledError:  # by somebody's interceptor, or the channel's end
        return call if isinstance(call, BaseException) else grpc.FutureCancelledError()
    return error


class _View(grpc.Channel):
    """A channel for stubs, over others. Closing it closes none of them."""

    def __init__(self, channel: Channels) -> None:
        self._channels = _checked(channel)

    def _source(self, *given: Any, **options: Any) -> OfCluster | _OfChannels:
        if isinstance(self._channels, ClusterChannel):
            return OfCluster(self._channels.unary_unary(*given, **options))
        methods = [channel.unary_unary(*given, **options) for channel in self._channels]
        return _OfChannels(told_apart(map(_name, self._channels)), methods)

    def _refuse(self, method: str, *_: Any, **__: Any) -> Any:
        return partial(_refuse, f"{method} streams; {type(self).__name__} is for unary calls")

    unary_stream = stream_unary = stream_stream = _refuse

    def subscribe(
        self,
        callback: Callable[[grpc.ChannelConnectivity], None],
        try_to_connect: bool | None = False,
    ) -> None:
        """Tell the state of the channel, if it is one of many members.

        Raises:
            ConfigurationError: There are several, each with a state of its own.
        """
        if not isinstance(self._channels, ClusterChannel):
            raise ConfigurationError("several channels have no one state; subscribe to each")
        self._channels.subscribe(callback, try_to_connect)

    def unsubscribe(self, callback: Callable[[grpc.ChannelConnectivity], None]) -> None:
        """Tell it no more."""
        if isinstance(self._channels, ClusterChannel):
            self._channels.unsubscribe(callback)

    def close(self) -> None:
        """Do nothing: the channels are their owners' to close."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_val: BaseException | None,
        exc_tb: TracebackType | None,
    ) -> None:
        self.close()


class ForkingInvoker(_View):
    """Makes each unary call on several members at once; the first good answer is the caller's.

    The other calls are cancelled then. If none succeeds, the last error is the caller's. For calls
    that may be carried out more than once: reads, where an answer must come soon.

    (Dubbo's `forking` leaves the others running, and gives None when the time is over.)
    """

    def __init__(self, channel: Channels, forks: int = 2) -> None:
        """Make the view.

        Args:
            channel: A `ClusterChannel`, whose picker says which members, and which gets a call that
                another one did not get; or channels, taken in turn.
            forks: How many at once; all that any call may go to, if those are fewer.

        Raises:
            TypeError, ConfigurationError: An argument makes no sense.
        """
        super().__init__(channel)
        self._forks = checked_count(forks, what="forks")

    def unary_unary(self, method: str, *args: Any, **options: Any) -> grpc.UnaryUnaryMultiCallable:
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

    def unary_unary(self, method: str, *args: Any, **options: Any) -> grpc.UnaryUnaryMultiCallable:
        """Make a member of a stub."""
        return _Broadcast(self._source(method, *args, **options), method)


def _refuse(said: str, *_: Any, **__: Any) -> NoReturn:
    raise ConfigurationError(said)


def _checked(channel: Any) -> Channels:
    if isinstance(channel, ClusterChannel):
        return channel
    several = isinstance(channel, (list, tuple))
    if not several or not all(isinstance(one, grpc.Channel) for one in channel):
        way_out = (
            "interceptors hide its members, also those of kit.channel. Give it the channel of "
            "rpcwheel.insecure_channel(url), and put what intercepts in front of it: "
            "kit.intercept_channel(BroadcastInvoker(channel)), or grpc.intercept_channel"
        )
        raise TypeError(
            "channel must be a ClusterChannel, or a list of channels of grpc, not "
            f"{channel!r}; "
            + (
                way_out
                if isinstance(channel, grpc.Channel)
                else "rpcwheel.aio has the same for grpc.aio"
            )
        )
    if not channel:
        raise ConfigurationError("channel must not be an empty list")
    return tuple(channel)


def _name(channel: grpc.Channel) -> str:
    return getattr(channel, "target", None) or target_below(channel) or "channel"
