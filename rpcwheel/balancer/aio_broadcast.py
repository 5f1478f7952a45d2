"""`BroadcastChannel` for `grpc.aio`: each unary call goes to all servers at once."""

from __future__ import annotations

import asyncio
import time
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import grpc

from rpcwheel._grpc import aio_multicallable
from rpcwheel._grpc.aio_finished import (
    CANCELLED,
    OK,
    failed_call,
    failed_with,
    finished_call,
)
from rpcwheel._grpc.aio_relay import AwaitedRelay, cancel_count
from rpcwheel._grpc.calls import (
    AIO_CLOSED,
    CANCELLED_HERE,
    FailureStatus,
    aio_metadata,
    metadata_tuple,
)
from rpcwheel.rpc import Kind, classes_by_kind

from .aio_channel import CALLS, BalancedChannel
from .broadcast_base import BroadcastBase, BroadcastFailed, distinct_names

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .aio_channel import Subchannel

KIND: Final = Kind.UNARY_UNARY


class BroadcastChannel(BroadcastBase, aio_multicallable.Channel):
    """A channel whose unary calls go to all servers at once, and return a dict of the responses.

    As `rpcwheel.balancer.BroadcastChannel`. The calls are awaited; the keys of channels without a
    target, such as those of `grpc.aio`, are `channel`, `"channel #2"`, and so on.
    """

    _modules = "rpcwheel.aio", "rpcwheel"
    _balanced_class = BalancedChannel
    _plain_class = grpc.aio.Channel

    def unary_unary(self, method: str, *args: Any, **options: Any) -> Any:
        """Make a multicallable."""
        if isinstance(self._channel, BalancedChannel):
            of_all = self._channel.unary_unary(method, *args, **options)
            return _Broadcast(method, partial(_begin_on_subchannels, of_all), of_all.pool)
        methods = [channel.unary_unary(method, *args, **options) for channel in self._channel]
        names = distinct_names(
            str(getattr(channel, "target", "channel")) for channel in self._channel
        )
        return _Broadcast(method, partial(_begin_on_channels, names, methods))

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        """Return the state of the `BalancedChannel`.

        Raises:
            ConfigurationError: It was made of several channels.
        """
        balanced: BalancedChannel = self._balanced("read that")
        return balanced.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        """Wait for another state of the `BalancedChannel`; raises as `get_state`."""
        await self._balanced("read that").wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        """Wait until the `BalancedChannel` is READY; raises as `get_state`."""
        await self._balanced("read that").channel_ready()

    async def close(self, grace: float | None = None) -> None:
        """Do nothing: the given channels stay open."""


class _BroadcastMethod:
    """One method of a stub."""

    def __init__(self, method: str, begin: Callable[..., Any], pool: Any = None) -> None:
        self._method = method
        self._begin_all = begin
        self._pool = pool

    def _begin(
        self,
        request: Any,
        timeout: float | None,
        metadata: Any,
        credentials: grpc.CallCredentials | None,
        wait_for_ready: bool | None,
        compression: grpc.Compression | None,
    ) -> Any:
        if self._pool is not None and self._pool.closing:
            raise grpc.aio.UsageError(AIO_CLOSED)
        options = {
            "timeout": timeout,
            "metadata": None
            if metadata is None
            else metadata_tuple(metadata),  # may be an iterator
            "credentials": credentials,
            "wait_for_ready": wait_for_ready,
            "compression": compression,
        }
        return _BroadcastCall(self._method, timeout, partial(self._begin_all, request, options))


_Broadcast: Final = classes_by_kind(_BroadcastMethod, aio_multicallable.MULTICALLABLES)[KIND]


class _BroadcastCall(AwaitedRelay, grpc.aio.UnaryUnaryCall[Any, Any]):
    """The call of the caller. A task begins the calls on the servers and awaits them."""

    kind = KIND
    _task: asyncio.Task[None] | None = None  # while an eager task runs in the constructor

    def __init__(self, method: str, timeout: float | None, begin: Callable[..., Any]) -> None:
        self.method = method
        self._until_s = None if timeout is None else time.monotonic() + timeout
        self._task = asyncio.get_running_loop().create_task(self._run(begin))

    async def _run(self, begin: Callable[..., Any]) -> None:
        calls: dict[str, Any] = {}
        try:
            await begin(calls)
            outcomes = await asyncio.gather(*map(_outcome_of, calls.values()))
        except asyncio.CancelledError:
            self.cancel()
        except Exception as error:  # noqa: BLE001 - for the caller
            self.finish(failed_call(KIND, error))
        else:
            self._finish_with(dict(zip(calls, outcomes, strict=True)))
        finally:
            for call in calls.values():
                call.cancel()  # if the task was canceled

    def _finish_with(self, outcomes: dict[str, tuple[Any, grpc.RpcError | None]]) -> None:
        responses = {name: response for name, (response, error) in outcomes.items() if not error}
        errors = {name: error for name, (_, error) in outcomes.items() if error}
        if errors:
            self.finish(failed_call(KIND, BroadcastFailed(self.method, responses, errors)))
        else:
            self.finish(finished_call(KIND, OK, "", result=responses))

    def _release(self) -> None:
        if self._task is not None and self._task is not asyncio.current_task():
            self._task.cancel()

    def time_remaining(self) -> float | None:
        return None if self._until_s is None else max(0.0, self._until_s - time.monotonic())


async def _begin_on_subchannels(
    method: Any, request: Any, options: dict[str, Any], calls: dict[str, Any]
) -> None:
    """Begin a call on each subchannel; waits until there are subchannels."""
    pool, timeout, metadata = method.pool, options["timeout"], options["metadata"]
    pending = pool.rules.begin(
        method.name, None, metadata, timeout, options["wait_for_ready"], time.monotonic()
    )
    subchannels = await pool.waiting.wait_for_subchannels(pending)
    options["timeout"] = pending.timeout_left_s(time.monotonic())
    names = distinct_names(subchannel.address for subchannel in subchannels)
    for name, subchannel in zip(names, subchannels, strict=True):
        calls[name] = _begin_on(method, subchannel, request, options)


def _begin_on(method: Any, subchannel: Subchannel, request: Any, options: dict[str, Any]) -> Any:
    problem = method.pool.connections.try_connect(subchannel)
    if not problem:
        begun = method.start(subchannel, (request,), options)
        if begun is not None:
            return CALLS[KIND](method, begun)
        problem = "its instance was removed"
    return finished_call(KIND, grpc.StatusCode.UNAVAILABLE, problem)


async def _begin_on_channels(
    names: Sequence[str],
    methods: Sequence[Any],
    request: Any,
    options: dict[str, Any],
    calls: dict[str, Any],
) -> None:
    for name, method in zip(names, methods, strict=True):
        calls[name] = method(request, **options)


async def _outcome_of(call: Any) -> tuple[Any, grpc.RpcError | None]:
    """Return the response of a call, or its error."""
    cancels = cancel_count()
    try:
        return await call, None
    except asyncio.CancelledError:
        if cancel_count() > cancels:
            raise
        return None, failed_with(CANCELLED, CANCELLED_HERE)  # its channel was closed
    except grpc.aio.AioRpcError as error:
        return None, error
    except Exception as error:  # noqa: BLE001 - an interceptor may raise any
        code, details, initial, trailing = FailureStatus.of(error)
        status = grpc.aio.AioRpcError(code, aio_metadata(initial), aio_metadata(trailing), details)
        return None, status
