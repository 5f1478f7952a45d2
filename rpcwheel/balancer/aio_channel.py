"""`BalancedChannel` for `grpc.aio`: one channel for all servers of a service, on one event loop.

A call is sent on a subchannel that is READY, and never moves to another one. If none is READY, the
call begins when one is. While calls wait, the states of the subchannels are read every few
milliseconds.

All code runs on the event loop. Methods that may be called on any thread submit their work to the
loop; before the first call, when the loop is not known, the work is queued.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
import weakref
from collections.abc import Iterable
from contextvars import copy_context
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import grpc

from rpcwheel._concurrency.exiting import BACKGROUND
from rpcwheel._concurrency.loop import call_on_loop, running_loop
from rpcwheel._grpc import aio_multicallable
from rpcwheel._grpc.aio_finished import (
    CANCELLED,
    failed_call,
    failed_with,
    finished_call,
)
from rpcwheel._grpc.aio_relay import (
    RELAYS,
    Signal,
    cancel_count,
)
from rpcwheel._grpc.calls import (
    AIO_CLOSED,
    CANCELLED_HERE,
    check_call_options,
    check_request,
    copy_of,
    reusable_metadata,
)
from rpcwheel._grpc.interceptors import give_lists
from rpcwheel.events import CallbackFailed, emit
from rpcwheel.rpc import TRIED, Kind, classes_by_kind
from rpcwheel.transport.aio import (
    MULTICALLABLES,
    AioTransport,
    ReconnectingChannel,
    TransportCall,
)
from rpcwheel.transport.arguments import checked_grace
from rpcwheel.transport.probe import MARK, SERVER_HEALTH
from rpcwheel.transport.state import MethodSpec

from .base import BalancedChannelBase
from .health import HealthChecker
from .pending import (
    CLOSED_MEANWHILE,
    FIRST_POLL_S,
    MAX_POLL_S,
    Refusal,
    poll_interval_s,
)
from .subchannel import READY, SHUTDOWN, SubchannelBase
from .subchannels import Connections, SubchannelPool

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rpcwheel._concurrency.exiting import BackgroundCall
    from rpcwheel._grpc.interceptors import InterceptorLists
    from rpcwheel.instance import ServiceInstance
    from rpcwheel.timer.api import Timer

    from .pending import PendingPick
    from .pickers import Picker
    from .policy import BalancerPolicy
    from .subchannels import ProbeDone

    _ProbeResult = tuple[bytes | None, BaseException | None]
    Options: TypeAlias = list[tuple[str, Any]]
    Job: TypeAlias = Callable[[], object]
    _Begun: TypeAlias = tuple["Subchannel", ReconnectingChannel, AioTransport, Any]
    """A subchannel, its channel, its transport, and gRPC's call."""


NOT_SECURE: Final = "Call credentials are only valid on secure channels"
"""The text of grpc.aio's error for a call with credentials on a channel without encryption."""


class Subchannel(SubchannelBase):
    """One server of a balanced channel, with a connection of its own. Made by the channel."""

    @property
    def channel(self) -> ReconnectingChannel:
        """Its own channel, made at the first use. On the loop.

        Raises:
            grpc.aio.UsageError: The subchannel was removed.
            Exception: Whatever `connect` raised.
        """
        channel: ReconnectingChannel = self._pool.connections.connection_of(self)
        return channel


class _LoopJobs:
    """Runs jobs on the loop of a channel. Jobs of other threads wait until the loop is known."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a finalizer may submit
        self._loop: asyncio.AbstractEventLoop | None = None
        self._jobs: dict[Job, None] = {}  # each once

    def enter(self) -> asyncio.AbstractEventLoop:
        """Return the running loop and use it from now on.

        Raises:
            RuntimeError: No loop is running.
        """
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            with self._lock:
                self._loop = loop
                jobs, self._jobs = self._jobs, {}
            for job in jobs:
                job()
        return loop

    def run_soon(self, job: Job) -> None:
        """Run a job on the loop: now if this is its thread, else soon."""
        here = running_loop()
        with self._lock:
            loop = self._loop
            if loop is None and here is None:
                self._jobs[job] = None
                return
        if here is not None and (here is loop or loop is None or loop.is_closed()):
            self.enter()
            job()
        elif loop is not None:
            call_on_loop(loop, job)


class _Connections(Connections[Subchannel]):
    """The connections of one channel, which are made on its loop."""

    channel_class = ReconnectingChannel
    _pool: _Pool

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.probes: set[asyncio.Task[_ProbeResult]] = set()

    def connect(self, subchannels: Iterable[Subchannel]) -> None:
        self.run_soon(partial(self.connect_now, tuple(subchannels)))

    def drain(self, subchannels: Iterable[Subchannel]) -> None:
        self.run_soon(partial(self.drain_now, tuple(subchannels)))

    def run_soon(self, job: Job) -> None:
        self._pool.jobs.run_soon(job)

    def new_connection(self, instance: ServiceInstance) -> ReconnectingChannel:
        with contextlib.suppress(RuntimeError):  # grpc.aio makes channels before a loop runs
            self._pool.jobs.enter()
        connection: ReconnectingChannel = super().new_connection(instance)
        connection.append_to(self._pool.appended)
        return connection

    def closed_error(self) -> grpc.aio.UsageError:
        return grpc.aio.UsageError(AIO_CLOSED)

    @property
    def are_insecure(self) -> bool:
        """Whether the connections are not encrypted; False if `connect` makes them."""
        return self._connect is None and self._own["credentials"] is None

    def probe(self, subchannel: Subchannel, timeout_s: float, done: ProbeDone) -> None:
        background = BACKGROUND.begin_call()
        if background is None:
            done(None, None)
            return
        loop = self._pool.jobs.enter()
        task = loop.create_task(self._probe(subchannel, timeout_s))
        background.is_lost = loop.is_closed
        background.cancel = partial(loop.call_soon_threadsafe, task.cancel)
        self.probes.add(task)
        task.add_done_callback(partial(self._probed, background, done))

    def _probed(
        self, background: BackgroundCall, done: ProbeDone, task: asyncio.Task[_ProbeResult]
    ) -> None:
        self.probes.discard(task)
        BACKGROUND.end_call(background)
        if task.cancelled():  # perhaps before its first step: the process is exiting
            done(None, None)
        elif (error := task.exception()) is not None:
            done(None, error)
        else:
            done(*task.result())

    async def _probe(self, subchannel: Subchannel, timeout_s: float) -> _ProbeResult:
        try:
            call = self.connection_of(subchannel).heartbeat_call(SERVER_HEALTH.method)
            return await call(SERVER_HEALTH.request, timeout=timeout_s, metadata=MARK), None
        except asyncio.CancelledError as error:
            if cancel_count():
                raise
            return None, error  # the user has closed the connection
        except Exception as error:  # noqa: BLE001 - of the call, the user's `connect`, or closed
            if not isinstance(error, (grpc.RpcError, grpc.aio.UsageError)):
                emit(CallbackFailed(self._pool.name, f"connect {subchannel.id}", error))
            return None, error


class _Pool(SubchannelPool[Subchannel]):
    """The subchannels of one channel, their health, and the calls that wait."""

    subchannel_class = Subchannel
    connections_class = _Connections
    checker: HealthChecker[Subchannel]
    connections: _Connections

    def __init__(self, *args: Any, timer: Timer | None, **settings: Any) -> None:
        super().__init__(*args, timer=timer, **settings)
        self.appended: InterceptorLists = {kind: [] for kind in Kind}
        """Interceptors that were appended to the lists of the channel; used on all subchannels."""
        self.jobs = _LoopJobs()
        self.checker = HealthChecker(self, timer)
        self.waiting = _WaitingCalls(self)
        self._to_close: list[ReconnectingChannel] = []

    def changed(self) -> None:
        self.jobs.run_soon(self.waiting.notify)

    async def close(self, grace: float | None) -> None:
        """Close the pool; see `BalancedChannel.close`."""
        self.jobs.enter()
        self.closing = True
        until_s = time.monotonic() + (grace or 0)
        try:
            while self.waiting.calls and not self.closed and time.monotonic() < until_s:  # noqa: ASYNC110
                await asyncio.sleep(MAX_POLL_S)
        except asyncio.CancelledError:
            await self._close_now(None)
            raise
        await self._close_now(None if grace is None else max(0.0, until_s - time.monotonic()))

    async def _close_now(self, grace: float | None) -> None:
        self._to_close += self.close_all()
        for probe in tuple(self.connections.probes):
            probe.cancel()
        try:
            self.close_callbacks.run()
        finally:  # whatever a callback raises, be it `SystemExit`
            self.waiting.cancel()
            await self._close(grace)

    async def _close(self, grace: float | None) -> None:
        """Close all connections, and wait for the probes."""
        closing = [asyncio.ensure_future(connection.close(grace)) for connection in self._to_close]
        try:
            if closing or self.connections.probes:
                await asyncio.wait([*closing, *self.connections.probes])
        except asyncio.CancelledError:
            for task in closing:
                task.cancel()
            await asyncio.gather(*closing, return_exceptions=True)
            raise
        for task in closing:
            task.result()


class _WaitingCalls:
    """The calls of one channel that wait, and the timer on the loop that reads the states."""

    def __init__(self, pool: _Pool) -> None:
        self._pool = pool
        self.calls: dict[weakref.ref[_BalancedCall], _BalancedCall | None] = {}
        # None for a response stream, so that its caller can drop it.
        self._handle: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None  # of the handle
        self._due_s = 0.0  # when it is due, on the clock of the loop
        self._poll_s = FIRST_POLL_S
        self.signal = Signal()
        """Notified when the state of the channel may have changed."""

    def hold(self, call: _BalancedCall, *, weakly: bool) -> None:
        """Add a waiting call; its `try_begin` is called until `release`."""
        reference = weakref.ref(call)
        self._poll_s = min(self._poll_s, poll_interval_s(len(self.calls)))
        if self.calls:  # the others need not pick again now
            self._poll_soon(self._poll_s)
            self._pool.jobs.enter().call_soon(self._begin, reference)
        else:
            self._poll_soon(0)
        self.calls[reference] = None if weakly else call

    def release(self, call: _BalancedCall) -> None:
        """Remove a waiting call."""
        self.calls.pop(weakref.ref(call), None)

    async def wait_for_subchannels(self, pending: PendingPick) -> tuple[Subchannel, ...]:
        """Wait until there are subchannels, in any state.

        Raises:
            grpc.aio.AioRpcError: The call fails.
            asyncio.CancelledError: The channel was closed.
        """
        self._pool.jobs.enter()
        while (picked := self._pool.try_subchannels(pending, now_s := time.monotonic())) is None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pending.wait_left_s(now_s)):
                    await self.signal.wait()
        if picked is CLOSED_MEANWHILE:
            raise asyncio.CancelledError
        if isinstance(picked, Refusal):
            raise failed_with(picked.code, picked.details)
        return picked

    def notify(self) -> None:
        """Let all waiting calls pick again, because the state of the channel may have changed."""
        self.signal.notify()
        if self.calls:
            self._poll_soon(0)

    def cancel(self) -> None:
        """Cancel all waiting calls, because the channel is closed."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None
        for reference in tuple(self.calls):
            call = reference()
            if call is not None:
                call.cancel()
        self.calls.clear()
        self.signal.notify()

    def _poll_soon(self, delay_s: float) -> None:
        """Read the states after a delay, or before if that is planned."""
        loop = self._pool.jobs.enter()
        due_s = loop.time() + delay_s
        if self._handle is not None:
            if loop is self._loop and self._due_s <= due_s:
                return
            self._handle.cancel()
        self._handle = loop.call_later(delay_s, self._poll)
        self._loop, self._due_s = loop, due_s

    def _poll(self) -> None:
        """Read the states and let waiting calls pick again."""
        self._handle = None
        try:
            if not self._pool.closed:
                self._pool.refresh()
            for reference in tuple(self.calls):
                self._begin(reference)
        finally:  # also after `SystemExit` of the user's code
            if self.calls and self._handle is None:
                self._poll_soon(self._poll_s)
                self._poll_s = min(1.5 * self._poll_s, MAX_POLL_S)

    def _begin(self, reference: weakref.ref[_BalancedCall]) -> None:
        call = reference()
        if call is None:  # dropped by its caller
            self.calls.pop(reference, None)
        else:
            call.try_begin()


# --- Calls ---


class _BalancedCall(TransportCall):
    """A call on one subchannel, which may have to wait for it. The base class of the four kinds."""

    _subchannel: Subchannel | None = None
    _pending: PendingPick | None = None
    _waiting: tuple[Any, ...] | None = None  # while it waits: its arguments, and its context

    def __init__(self, method: _BalancedMethod, begun: _Begun | None) -> None:
        self.kind = method.kind
        self.method = method.name
        self._method = method
        if begun is not None:
            self._run_on(begun)

    def _run_on(self, begun: _Begun) -> None:
        self._subchannel, self._reconnecting, self._transport, call = begun
        self.run(call, counted=True)

    def wait_for(
        self, request: tuple[Any, ...], options: dict[str, Any], wait_for_ready: bool | None
    ) -> None:
        """Wait until a subchannel is READY, then begin."""
        method, message, metadata = self._method, None, options["metadata"]
        if not self.kind.streams_requests:  # the caller may change it before it is sent
            message = copy_of(request[0])
            request = (message,)
        options["metadata"] = None if metadata is None else grpc.aio.Metadata(*metadata)
        self._pending = method.pool.rules.begin(
            method.name,
            message,
            metadata,
            options["timeout"],
            wait_for_ready,
            time.monotonic(),
            TRIED.get(),
        )
        self._waiting = self._pending, request, options, copy_context()
        method.pool.waiting.hold(self, weakly=self._cancels_when_dropped)

    @property
    def rpcwheel_server(self) -> Subchannel | None:
        """The subchannel of the call, for `server_of`; None if it has not begun."""
        return self._subchannel

    def try_begin(self) -> None:
        """Begin the attempt if a subchannel is READY; end the call if it must not wait longer."""
        if self._waiting is None:
            return
        *arguments, context = self._waiting
        try:
            end: Refusal | None = context.run(self._pick_and_begin, *arguments)
        except BaseException as error:  # noqa: BLE001 - a key function's, or an interceptor's
            self._end_waiting(failed_call(self.kind, error))
            return
        if end is CLOSED_MEANWHILE:
            self.cancel()
        elif end is not None:
            self._end_waiting(finished_call(self.kind, end.code, end.details))

    def _pick_and_begin(
        self, pending: PendingPick, request: tuple[Any, ...], options: dict[str, Any]
    ) -> Refusal | None:
        method, pool = self._method, self._method.pool
        while True:
            now_s = time.monotonic()
            outcome = pool.try_pick(pending, now_s)
            if not isinstance(outcome, Subchannel):
                return outcome
            left_s = pending.timeout_left_s(now_s)
            begun = method.start(outcome, request, options | {"timeout": left_s})
            if begun is not None:
                self._waiting = None
                pool.waiting.release(self)
                self._run_on(begun)
                return None

    def _end_waiting(self, call: Any) -> None:
        self._waiting = None
        self._method.pool.waiting.release(self)
        self.finish(call)

    def cancel(self) -> bool:
        if self._waiting is None:
            return super().cancel()
        self._end_waiting(finished_call(self.kind, CANCELLED, CANCELLED_HERE))
        return True

    def time_remaining(self) -> float | None:
        if self._subchannel is not None or self._pending is None:
            return super().time_remaining()
        return self._pending.timeout_left_s(time.monotonic())

    def _saw_status(self, code: grpc.StatusCode) -> None:
        super()._saw_status(code)
        if self._subchannel is not None:
            self._method.pool.checker.failed(self._subchannel, code.name)

    def _release(self) -> None:
        subchannel = self._subchannel
        if subchannel is None:
            return  # the call has not begun
        if self._final is self._call and not self._has_failed:
            subchannel.succeeded()
        super()._release()


CALLS: Final = classes_by_kind(_BalancedCall, RELAYS)


class _BalancedMethod:
    """A method of the channel; the base class of the four multicallables."""

    kind: Kind

    def __init__(
        self, channel: BalancedChannel, pool: _Pool, method: str, *args: Any, **options: Any
    ) -> None:
        self._channel = channel  # a stub keeps the channel alive, which gets the updates
        self.pool = pool
        self.name = method
        self._spec = MethodSpec(self.kind, method, *args, **options)
        self._methods: dict[Subchannel, Any] = {}

    def start(
        self, subchannel: Subchannel, request: tuple[Any, ...], options: dict[str, Any]
    ) -> _Begun | None:
        """Begin gRPC's call on a subchannel; None if it was removed or closed meanwhile."""
        method, metadata = self._methods.get(subchannel), options["metadata"]
        if (sent := subchannel.metadata_of(metadata)) is not metadata:
            options = options | {"metadata": sent}
        try:
            if method is None or method.channel is not subchannel.connection:
                method = self._make(subchannel)
            transport, call = method.start(request, options)
        except grpc.aio.UsageError as error:
            connection = subchannel.connection
            accepts = connection is not None and connection.accepts_calls
            if str(error) != AIO_CLOSED or (accepts and not subchannel.removed):
                raise
            return None
        return subchannel, method.channel, transport, call

    def _make(self, subchannel: Subchannel) -> Any:
        connection = self.pool.connections.connection_of(subchannel)
        self._methods = {
            other: cached for other, cached in self._methods.items() if not other.removed
        }
        method = self._methods[subchannel] = MULTICALLABLES[self.kind](connection, self._spec)
        return method

    def _begin(
        self,
        request: Any,
        timeout: float | None,
        metadata: Any,
        credentials: grpc.CallCredentials | None,
        wait_for_ready: bool | None,
        compression: grpc.Compression | None,
    ) -> Any:
        pool = self.pool
        if pool.closing:
            raise grpc.aio.UsageError(AIO_CLOSED)
        metadata = reusable_metadata(metadata)  # a picker may read it too
        options = {
            "timeout": timeout,
            "metadata": metadata,
            "credentials": credentials,
            # False: it must not wait for one server
            "wait_for_ready": False if wait_for_ready else wait_for_ready,
            "compression": compression,
        }
        message, tried = None if self.kind.streams_requests else request, TRIED.get()
        while True:
            if tried is None:
                subchannel = pool.pick(self.name, message, metadata)
            else:
                subchannel = pool.pick_other(tried, self.name, message, metadata)
            if subchannel is None:
                self._check(request, metadata, credentials, compression)
                call = CALLS[self.kind](self, None)
                call.wait_for((request,), options, wait_for_ready)
                return call
            begun = self.start(subchannel, (request,), options)
            if begun is not None:
                return CALLS[self.kind](self, begun)

    def _check(self, request: Any, metadata: Any, credentials: object, compression: object) -> None:
        """Check the arguments of a call that waits, as gRPC does when it begins the call.

        Raises:
            TypeError, ValueError: An argument has a wrong type.
            grpc.aio.UsageError: It has credentials, and the connections are not encrypted.
        """
        if credentials is not None and self.pool.connections.are_insecure:
            raise grpc.aio.UsageError(NOT_SECURE)
        check_call_options(metadata, credentials, compression)
        if not self.kind.streams_requests:
            check_request(request, self._spec.serializer)


_MULTICALLABLES: Final = classes_by_kind(_BalancedMethod, aio_multicallable.MULTICALLABLES)


# --- The channel ---


class BalancedChannel(BalancedChannelBase[Subchannel], aio_multicallable.Channel):
    """A channel that distributes its calls over the servers of a service."""

    _title = "BalancedChannel of grpc.aio"
    _pool: _Pool

    def __init__(
        self,
        name: str,
        instances: Iterable[ServiceInstance] | None = None,
        *,
        lb_policy: str | Picker = "weighted_round_robin",
        credentials: grpc.ChannelCredentials | None = None,
        options: Sequence[tuple[str, Any]] | None = None,
        compression: grpc.Compression | None = None,
        interceptors: Sequence[grpc.aio.ClientInterceptor] | None = None,
        connect: Callable[[ServiceInstance, Options], grpc.aio.Channel] | None = None,
        on_subchannel: Callable[[Subchannel], object] | None = None,
        on_removed: Callable[[Subchannel], object] | None = None,
        balancer_policy: BalancerPolicy | None = None,
        timer: Timer | None = None,
    ) -> None:
        """Make the channel, on a loop or before there is one. It connects at the first call.

        The arguments are those of `rpcwheel.balancer.BalancedChannel`, and `interceptors`, as gRPC
        takes them, which run after the pick. `connect` returns a new `grpc.aio.Channel`. It,
        `on_subchannel` and `on_removed` are plain functions that are called on the loop.

        Raises:
            TypeError, ConfigurationError: An argument is invalid.
        """
        own = {
            "credentials": credentials,
            "compression": compression,
            "interceptors": _checked_interceptors(interceptors),
        }
        self._pool = _Pool(
            name,
            lb_policy,
            balancer_policy,
            timer=timer,
            connect=connect,
            options=options,
            own=own,
            on_subchannel=on_subchannel,
            on_removed=on_removed,
        )
        give_lists(self, self._pool.appended)
        if instances is not None:
            self.update(instances)

    # --- A channel of grpc.aio ---

    def _multicallable(self, kind: Kind, method: str, *args: Any, **options: Any) -> Any:
        return _MULTICALLABLES[kind](self, self._pool, method, *args, **options)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        """Wait for another state, which is read every few milliseconds.

        Raises:
            grpc.aio.UsageError: The channel is closed.
        """
        if self.closed:
            raise grpc.aio.UsageError(AIO_CLOSED)
        await self._wait_until(lambda: self.get_state() is not last_observed_state)

    async def channel_ready(self) -> None:
        """Connect all subchannels and wait until one is READY.

        Raises:
            grpc.aio.UsageError: The channel is closed, or is closed during the wait.
        """
        ready = {READY, SHUTDOWN}
        await self._wait_until(lambda: self.get_state(try_to_connect=True) in ready)
        if self.closed:
            raise grpc.aio.UsageError(AIO_CLOSED)

    async def _wait_until(self, happened: Callable[[], bool]) -> None:
        self._pool.jobs.enter()
        poll_s = FIRST_POLL_S
        while not happened():
            try:
                async with asyncio.timeout(poll_s):
                    await self._pool.waiting.signal.wait()
            except TimeoutError:
                poll_s = min(1.5 * poll_s, MAX_POLL_S)

    # --- The end ---

    async def close(self, grace: float | None = None) -> None:
        """Accept no more calls, and end the running calls on all subchannels.

        Args:
            grace: The seconds that running calls may continue; None or 0: they are canceled now.
                They are also canceled if this coroutine is canceled, or if `close` is called again
                without a grace.

        Raises:
            ConfigurationError: `grace` is negative.
        """
        await self._pool.close(checked_grace(grace))


def _checked_interceptors(interceptors: object) -> list[grpc.aio.ClientInterceptor] | None:
    if interceptors is None:
        return None
    if isinstance(interceptors, Iterable):
        checked = list(interceptors)
        if all(isinstance(interceptor, grpc.aio.ClientInterceptor) for interceptor in checked):
            return checked
    raise TypeError(
        f"interceptors must be interceptors of grpc.aio for clients, not {interceptors!r}"
    )
