"""Policies for a channel of `grpc.aio`: as a channel, or as interceptors.

Both begin the attempts of `rpcwheel.call.aio_call`. `InterceptedChannel` calls the multicallable of
the user's channel. An interceptor awaits the continuation that grpc.aio passes to it.
"""

from __future__ import annotations

import asyncio
from functools import partial
from types import CoroutineType
from typing import TYPE_CHECKING, Any, Final, Never

import grpc

from rpcwheel._concurrency.loop import call_on_loop
from rpcwheel._grpc import aio_multicallable
from rpcwheel._grpc.aio_counted import begin_counted, begin_counted_awaited, count_end
from rpcwheel._grpc.calls import AIO_CLOSED, code_of
from rpcwheel._grpc.interceptors import AIO_CHANNEL, Interceptors, give_lists, lists_of
from rpcwheel.call.aio_call import CallFactory, Delivery
from rpcwheel.call.config import MAX_METHODS
from rpcwheel.call.idempotency import IDEMPOTENCY_KEY
from rpcwheel.failback.stored import StoredRpc
from rpcwheel.rpc import Kind, classes_by_kind
from rpcwheel.transport.probe import MARK, SERVER_HEALTH, SERVER_HEALTH_TIMEOUT_S, is_answered

from .aio_admission import begin_admitted, begin_admitted_awaited
from .applying import InterceptedChannelBase

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine
    from typing import TypeAlias

    from rpcwheel.call.client_state import ClientState
    from rpcwheel.failback.stored import StoredFunction
    from rpcwheel.journal.backend import StoredCall
    from rpcwheel.telemetry.call_counts import CallCounts, MethodCounts

    Continuation: TypeAlias = Callable[[Any, Any], Awaitable[Any]]

_TASKS: Final[set[asyncio.Task[None]]] = set()
"""Tasks that close kept connections or check the health of servers; the loop has only weak
references to tasks."""


FOR_AIO: Final = (
    "these interceptors are for channels of grpc.aio: grpc.aio.insecure_channel(target, "
    "interceptors=...); for servers use server_interceptors"
)

# --- A channel ---


class InterceptedChannel(InterceptedChannelBase, aio_multicallable.Channel):
    """Applies policies to the calls of the user's channel. Closing it closes the user's channel."""

    _channel_class = grpc.aio.Channel
    _wrong_channel = (
        "channel must be a grpc.aio channel, not {!r}; for a grpc channel use "
        "rpcwheel.interceptors.intercept_channel"
    )
    _channel: grpc.aio.Channel
    _loop: asyncio.AbstractEventLoop | None = None  # since the channel is kept

    def __init__(self, channel: grpc.aio.Channel, *args: Any) -> None:
        """Apply policies to a channel; arguments as of `InterceptedChannelBase`."""
        super().__init__(channel, *args)
        give_lists(self, lists_of(channel))  # interceptors appended to them run in each attempt

    def _stored_calls(self) -> _StoredCalls:
        return _StoredCalls(self._channel, self._state)

    async def close(self, grace: float | None = None) -> None:
        """Close the user's channel, or, for a channel of a kit, all but its queued calls.

        If calls of a kit's channel are queued, its connections are kept until these are delivered
        or the kit is closed.

        Args:
            grace: Seconds for which calls in flight may continue; None or 0: they are canceled now.
                A call that fails meanwhile is not retried. Calls that wait for their next attempt,
                or for a limit of the client, are canceled now.
        """
        self._begin_close()
        if self._on_close is not None:
            self._on_close()
        owner, keeper = self._owner, self._state.failback.keeper
        if owner is not None:
            self._state.refuse = _refuse  # first: what ends may run callbacks that begin calls
        self._state.channel_calls.end_waiting()  # no new attempts during the grace
        self._loop = asyncio.get_running_loop()
        if owner is None or keeper is None:
            await self._channel.close(grace)
        else:
            kept = owner.keep(self, keeper)
            await (self._end_calls(grace) if kept else self._channel.close(grace))

    async def _end_calls(self, grace: float | None) -> None:
        calls = [call for call in self._state.channel_calls.running if not call.done()]
        ends = [asyncio.get_running_loop().create_future() for _ in calls]
        for call, end in zip(calls, ends, strict=True):
            call.add_done_callback(lambda _, end=end: end.done() or end.set_result(None))
        try:
            if grace and ends:
                await asyncio.wait(ends, timeout=grace)
        finally:
            for call in calls:
                call.cancel()

    async def close_kept(self) -> None:
        """Close the connections that were kept for queued calls."""
        keeper = self._state.failback.keeper
        if keeper is not None:
            keeper.end()
        await self._channel.close()

    def close_kept_soon(self) -> None:
        """Run `close_kept` on the loop. Any thread."""
        if self._loop is not None:  # if it is closed, the garbage collector closes them
            call_on_loop(self._loop, _run_apart, self.close_kept)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        """Return the state of the user's channel."""
        if self._state.refuse is not None:
            return grpc.ChannelConnectivity.SHUTDOWN
        return self._channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        """Wait for another state of the user's channel."""
        if self._state.refuse is not None:
            self._state.refuse()
        await self._channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        """Wait until the user's channel is ready."""
        if self._state.refuse is not None:
            self._state.refuse()
        await self._channel.channel_ready()

    def check_health(self, done: Callable[[bool], object]) -> bool:
        """Check the health of the server, for a circuit breaker. Any thread."""
        loop = self._state.loop  # None before the first call
        return loop is not None and call_on_loop(loop, _run_apart, self._check, done)

    async def _check(self, done: Callable[[bool], object]) -> None:
        serves = True  # if the check has no result, the next calls find out
        try:
            check: Any = self._channel.unary_unary(SERVER_HEALTH.method)
            response = await check(
                SERVER_HEALTH.request, timeout=SERVER_HEALTH_TIMEOUT_S, metadata=MARK
            )
            serves = is_answered(response, None)
        except grpc.RpcError as error:
            serves = is_answered(None, error)
        except grpc.aio.UsageError:
            pass  # the channel was closed
        finally:
            done(serves)

    def _multicallable(self, kind: Kind, method: str, *args: Any, **options: Any) -> Any:
        serialize = args[0] if args else options.get("request_serializer")
        call = getattr(self._channel, kind.name.lower())(method, *args, **options)
        calls = CallFactory(self._state, method, kind, serialize=serialize)
        call = _attempts(calls, call)
        counts = self._state.counts
        method_counts = None if counts is None else counts.client.method(method, kind.grpc_type)
        return _MULTICALLABLES[kind](call, calls, method_counts)


def _refuse() -> Never:
    raise grpc.aio.UsageError(AIO_CLOSED)


def _run_apart(work: Callable[..., Coroutine[Any, Any, None]], *args: Any) -> None:
    """Run a coroutine function in a task. On the loop."""
    task = asyncio.get_running_loop().create_task(work(*args))
    _TASKS.add(task)
    task.add_done_callback(_TASKS.discard)


class _StoredCalls:
    """Makes the calls of a journal through a channel. They consist of bytes."""

    def __init__(self, channel: grpc.aio.Channel, state: ClientState) -> None:
        self._channel = channel
        self._state = state
        self._calls: dict[tuple[Kind, str], tuple[CallFactory, Any]] = {}

    def __call__(
        self, call: StoredCall, body: StoredRpc | StoredFunction
    ) -> tuple[Delivery, tuple[bytes, ...], dict[str, Any]]:
        """Return the delivery of a call, and its requests.

        Raises:
            ValueError: It is the call of a function.
        """
        if not isinstance(body, StoredRpc):
            raise ValueError("it is the call of a function, and its queue is one of a channel")  # noqa: TRY004 - it is data
        calls, start = self._of_method(body.kind, call.method)
        delivery = Delivery(
            calls,
            start,
            timeout=body.timeout_s,
            metadata=(*body.metadata, (IDEMPOTENCY_KEY, call.key)),
            wait_for_ready=body.wait_for_ready,
            attempts=call.attempts,
        )
        return delivery, body.requests, {}

    def _of_method(self, kind: Kind, method: str) -> tuple[CallFactory, Any]:
        cached = self._calls.get((kind, method))
        if cached is not None:
            return cached
        start: Any = getattr(self._channel, kind.name.lower())(method)
        calls = CallFactory(self._state, method, kind)
        if len(self._calls) >= MAX_METHODS:
            self._calls.clear()
        cached = self._calls[kind, method] = calls, _attempts(calls, start)
        return cached


def _attempts(calls: CallFactory, start: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that begins an attempt if the policies allow it, and counts it."""
    state, method, kind = calls.state, calls.method, calls.kind
    if state.counts is not None:
        start = partial(begin_counted, state.counts.attempts.method(method, kind.grpc_type), start)
    admission = state.admission_of(method, kind)
    return start if admission is None else partial(begin_admitted, calls, admission, start)


class _InterceptedMulticallable:
    def __init__(
        self, call: Callable[..., Any], calls: CallFactory, counts: MethodCounts | None
    ) -> None:
        """Apply the policies of `calls` to `call`; count calls, unless `counts` is None."""
        self._call = call
        self._calls = calls
        self._counts = counts
        self._keeper = calls.state.failback.keeper

    def _begin(
        self,
        request: Any,
        timeout: float | None,
        metadata: Any,
        credentials: grpc.CallCredentials | None,
        wait_for_ready: bool | None,
        compression: grpc.Compression | None,
    ) -> Any:
        counts = self._counts
        began_ns = 0 if counts is None else counts.begin()
        start = partial(self._call, credentials=credentials, compression=compression)
        try:
            call = self._calls.begin(start, request, timeout, metadata, wait_for_ready)
        except BaseException as error:
            if counts is not None:
                counts.end(began_ns, code_of(error))
            raise
        if self._keeper is not None and self._keeper.is_used:
            self._calls.state.channel_calls.add_running(call)
        if counts is not None:
            count_end(counts, began_ns, call)
        return call


_MULTICALLABLES: Final = classes_by_kind(
    _InterceptedMulticallable, aio_multicallable.MULTICALLABLES
)


# --- Interceptors ---


class _ClientInterceptor:
    """The part that is common to the interceptors of the four kinds of call.

    There is one for each kind because grpc.aio (1.60 to 1.85) uses an interceptor of several kinds
    for one of them only. None awaits the call: grpc.aio lets a caller write requests only when all
    interceptors have returned.
    """

    kind: Kind

    def __init__(self, state: ClientState) -> None:
        self._state = state
        self.call_policy = state.policy
        self._calls: dict[bytes | str, CallFactory] = {}
        if state.counts is not None:
            counted = partial(self._intercept_counted, state.counts)
            setattr(self, f"intercept_{self.kind.name.lower()}", counted)

    async def _intercept_counted(
        self, counts: CallCounts, continuation: Continuation, call_details: Any, request: Any
    ) -> Any:
        """Begin a call, return it, and count it and its attempts."""
        method = (
            call_details.method.decode()
            if isinstance(call_details.method, bytes)
            else call_details.method
        )
        key = method, self.kind.grpc_type
        attempt = partial(begin_counted_awaited, counts.attempts.method(*key), continuation)
        calls = counts.client.method(*key)
        return await begin_counted_awaited(calls, self.intercept, attempt, call_details, request)

    async def intercept(self, continuation: Continuation, call_details: Any, request: Any) -> Any:
        """Begin a call and return it."""
        calls = self._calls.get(call_details.method) or self._add(call_details.method)
        method, credentials = call_details.method, call_details.credentials
        admission = self._state.admission_of(calls.method, self.kind)
        if admission is not None:
            continuation = partial(begin_admitted_awaited, self.kind, admission, continuation)

        async def start(
            request: Any,
            *,
            timeout: float | None,  # noqa: ASYNC109 - of the call
            metadata: Any,
            wait_for_ready: bool | None,
        ) -> Any:
            details = grpc.aio.ClientCallDetails(
                method, timeout, metadata, credentials, wait_for_ready
            )
            return await continuation(details, request)

        options = call_details.timeout, call_details.metadata, call_details.wait_for_ready
        call = calls.begin(start, request, *options)
        return await call if isinstance(call, CoroutineType) else call

    intercept_unary_unary = intercept_unary_stream = intercept
    intercept_stream_unary = intercept_stream_stream = intercept

    def _add(self, method: bytes | str) -> CallFactory:
        name = method.decode() if isinstance(method, bytes) else method
        if len(self._calls) >= MAX_METHODS:
            self._calls.clear()
        calls = self._calls[method] = CallFactory(self._state, name, self.kind)
        return calls


_INTERCEPTORS: Final = classes_by_kind(
    _ClientInterceptor,
    {
        Kind.UNARY_UNARY: (grpc.aio.UnaryUnaryClientInterceptor,),
        Kind.UNARY_STREAM: (grpc.aio.UnaryStreamClientInterceptor,),
        Kind.STREAM_UNARY: (grpc.aio.StreamUnaryClientInterceptor,),
        Kind.STREAM_STREAM: (grpc.aio.StreamStreamClientInterceptor,),
    },
)


def interceptors_for(state: ClientState) -> list[grpc.aio.ClientInterceptor]:
    """Make one interceptor for each kind of call; all share the state."""
    state.begin_admission(None)
    interceptors = (each(state) for each in _INTERCEPTORS.values())
    return Interceptors(interceptors, AIO_CHANNEL, FOR_AIO)
