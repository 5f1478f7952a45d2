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
    CANCELLED_HERE,
    failed_call,
    failed_with,
    finished_call,
)
from rpcwheel._grpc.aio_interceptors import give_lists
from rpcwheel._grpc.aio_relay import (
    RELAYS,
    Signal,
    cancel_count,
)
from rpcwheel._grpc.calls import check_options, check_request, reusable_metadata, value_of
from rpcwheel.call.config import copy_of
from rpcwheel.errors import ConfigurationError
from rpcwheel.events import CallbackFailed, emit
from rpcwheel.rpc import TRIED, Kind, classes_by_kind
from rpcwheel.transport.aio import (
    CLOSED,
    MULTICALLABLES,
    AioTransport,
    ReconnectingChannel,
    TransportCall,
)
from rpcwheel.transport.probe import MARK
from rpcwheel.transport.state import MethodSpec

from .base import BalancedChannelBase
from .health import PROBE, HealthChecker, error_text, is_answered
from .subchannels import (
    EXPLAIN_AGAIN_S,
    EXPLAIN_TIMEOUT_S,
    FAILING,
    FIRST_POLL_S,
    MAX_EXPLAINED,
    MAX_POLL_S,
    READY,
    SHUTDOWN,
    SubchannelBase,
    SubchannelPool,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rpcwheel._concurrency.exiting import BackgroundCall
    from rpcwheel._grpc.aio_interceptors import Interceptors
    from rpcwheel.instance import ServiceInstance
    from rpcwheel.timer.api import Timer

    from .pickers import Picker
    from .policy import BalancerPolicy
    from .subchannels import Refusal

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
        channel: ReconnectingChannel = self._pool.connection_of(self)
        return channel


class _Pool(SubchannelPool[Subchannel]):
    """The subchannels of one channel, their connections, and the calls that wait."""

    subchannel_class = Subchannel
    channel_class = ReconnectingChannel

    def __init__(self, *args: Any, timer: Timer | None, **settings: Any) -> None:
        super().__init__(*args, timer=timer, **settings)
        self.appended: Interceptors = {kind: [] for kind in Kind}
        """Interceptors that were appended to the lists of the channel; used on all subchannels."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._jobs: list[Job] = []  # queued until the loop is known
        self._waiting: dict[weakref.ref[_BalancedCall], _BalancedCall | None] = {}
        # None for a response stream, so that its caller can drop it.
        self._poll_handle: asyncio.TimerHandle | None = None
        self._explaining: asyncio.Task[None] | None = None
        self._probes: set[asyncio.Task[None]] = set()
        self._to_close: list[ReconnectingChannel] = []
        self.signal = Signal()
        """Notified when the state of the channel may have changed."""
        self.checker = HealthChecker(self, timer)

    @property
    def is_insecure(self) -> bool:
        """Whether the connections are not encrypted; False if `connect` makes them."""
        return self._connect is None and self._own["credentials"] is None

    # --- The loop ---

    def enter(self) -> asyncio.AbstractEventLoop:
        """Return the running loop and use it from now on.

        Raises:
            RuntimeError: No loop is running.
        """
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            with self.lock:
                self._loop = loop
                jobs, self._jobs = self._jobs, []
            for job in jobs:
                job()
        return loop

    def run_soon(self, check: Job) -> None:
        """Run a job on the loop: now if this is its thread, else soon."""
        here = running_loop()
        with self.lock:
            loop = self._loop
            if loop is None and here is None:
                self._jobs.append(check)
                return
        if here is not None and (here is loop or loop is None or loop.is_closed()):
            self.enter()
            check()
        elif loop is not None:
            call_on_loop(loop, check)

    # --- Connections ---

    def connect(self, subchannels: Iterable[Subchannel]) -> None:
        self.run_soon(partial(self.connect_now, tuple(subchannels)))

    def drain(self, subchannels: Iterable[Subchannel]) -> None:
        self.run_soon(partial(self.drain_now, tuple(subchannels)))

    def new_connection(self, instance: ServiceInstance) -> ReconnectingChannel:
        with contextlib.suppress(RuntimeError):  # grpc.aio makes channels before a loop runs
            self.enter()
        connection: ReconnectingChannel = super().new_connection(instance)
        connection.append_to(self.appended)
        return connection

    def closed_error(self) -> grpc.aio.UsageError:
        return grpc.aio.UsageError(CLOSED)

    def was_closed(self, subchannel: Subchannel, error: grpc.aio.UsageError) -> bool:
        """Whether a call was refused because its subchannel was removed or its channel closed."""
        if str(error) != CLOSED:
            return False
        connection = subchannel.connection
        return subchannel.removed or connection is None or not connection.accepts_calls

    # --- Calls that wait ---

    def hold(self, call: _BalancedCall, *, weakly: bool) -> None:
        """Add a waiting call; its `try_begin` is called until `release`."""
        reference = weakref.ref(call)
        if reference not in self._waiting:
            self._poll_s = FIRST_POLL_S
            self._poll_soon(0)
        self._waiting[reference] = None if weakly else call

    def release(self, call: _BalancedCall) -> None:
        """Remove a waiting call."""
        self._waiting.pop(weakref.ref(call), None)

    async def wait_for_subchannels(
        self,
        timeout: float | None,  # noqa: ASYNC109 - of the call, for its status
        *,
        wait_for_ready: bool,
    ) -> tuple[Subchannel, ...]:
        """Wait until there are subchannels, in any state.

        Raises:
            grpc.aio.AioRpcError: The call fails.
            asyncio.CancelledError: The channel was closed.
        """
        self.enter()
        began_s = time.monotonic()
        limit_s = self.limit_of(timeout, wait_for_ready=wait_for_ready)
        while not self.subchannels:
            if self.closed:
                raise asyncio.CancelledError
            refusal = self.refusal()
            left_s = None if limit_s is None else began_s + limit_s - time.monotonic()
            if refusal is None or (wait_for_ready and not refusal.final):
                is_late = left_s is not None and left_s <= 0
                refusal = self.timed_out(timeout, limit_s) if is_late else None
            if refusal is not None:
                raise failed_with(refusal.code, refusal.details)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await self.signal.wait()
        return self.subchannels

    def changed(self) -> None:
        self.run_soon(self._changed)

    def _changed(self) -> None:
        self.signal.notify()
        if self._waiting:
            self._poll_soon(0)

    def _poll_soon(self, delay_s: float) -> None:
        if self._poll_handle is not None:
            self._poll_handle.cancel()
        self._poll_handle = self.enter().call_later(delay_s, self._poll)

    def _poll(self) -> None:
        """Read the states and let waiting calls pick again."""
        self._poll_handle = None
        if not self.closed:
            self.refresh()
        refusal = self.refusal()
        for reference in tuple(self._waiting):
            call = reference()
            if call is None:  # dropped by its caller
                del self._waiting[reference]
            else:
                call.try_begin(refusal)
        if self._waiting and self._poll_handle is None:
            self._poll_soon(self._poll_s)
            self._poll_s = min(1.5 * self._poll_s, MAX_POLL_S)

    def explains(self) -> bool:
        """Start probes that find out why servers can't be reached; False if there is a result."""
        if self._explaining is not None:
            return True
        now_s = time.monotonic()
        if now_s - self._explained_s < EXPLAIN_AGAIN_S:
            return False
        self._explained_s = now_s
        self._explaining = self.enter().create_task(self._explain())
        return True

    async def _explain(self) -> None:
        """Probe servers that can't be reached. The user's request must not be sent for that."""
        failing = [
            subchannel
            for subchannel in self.subchannels[:MAX_EXPLAINED]
            if subchannel.connection is not None and subchannel.state is FAILING
        ]
        try:
            texts = await asyncio.gather(
                *(_connect_error(subchannel.connection) for subchannel in failing)
            )
            for subchannel, text in zip(failing, texts, strict=True):
                subchannel.error_text = text or subchannel.error_text
        finally:
            self._explaining = None
            self._changed()

    # --- Health checks ---

    def probe(self, subchannel: Subchannel, done: Callable[[bool | None], object]) -> None:
        background = BACKGROUND.begin_call()
        if background is None:
            done(None)
            return
        loop = self.enter()
        task = loop.create_task(self._probe(subchannel, done))
        background.is_lost = loop.is_closed
        background.cancel = partial(loop.call_soon_threadsafe, task.cancel)
        self._probes.add(task)
        task.add_done_callback(partial(self._probed, background))

    def _probed(self, background: BackgroundCall, task: asyncio.Task[None]) -> None:
        self._probes.discard(task)
        BACKGROUND.end_call(background)

    async def _probe(self, subchannel: Subchannel, done: Callable[[bool | None], object]) -> None:
        try:
            call = self.connection_of(subchannel).heartbeat_call(PROBE.method)
            response = await call(PROBE.request, timeout=self.check_timeout_s, metadata=MARK)
            answered = is_answered(response, "OK")
        except grpc.RpcError as error:
            answered = is_answered(None, getattr(value_of(error, "code"), "name", "CANCELLED"))
        except asyncio.CancelledError:
            if cancel_count():
                raise
            answered = False  # the user has closed the connection
        except Exception as error:  # noqa: BLE001 - closed meanwhile, or the user's `connect`
            if not isinstance(error, grpc.aio.UsageError):
                emit(CallbackFailed(self.name, f"connect {subchannel.id}", error))
            answered = False
        done(answered)

    # --- The end ---

    async def close(self, grace: float | None) -> None:
        """Close the pool; see `BalancedChannel.close`."""
        self.enter()
        self.closing = True
        until_s = time.monotonic() + (grace or 0)
        try:
            while self._waiting and not self.closed and time.monotonic() < until_s:  # noqa: ASYNC110
                await asyncio.sleep(MAX_POLL_S)
        except asyncio.CancelledError:
            await self._close_now(None)
            raise
        await self._close_now(None if grace is None else max(0.0, until_s - time.monotonic()))

    async def _close_now(self, grace: float | None) -> None:
        self._to_close += self.close_all()
        if self._poll_handle is not None:
            self._poll_handle.cancel()
            self._poll_handle = None
        for probe in tuple(self._probes):
            probe.cancel()
        try:
            self.close_callbacks.run()
        finally:  # whatever a callback raises, be it `SystemExit`
            await self._close(grace)

    async def _close(self, grace: float | None) -> None:
        """End the waiting calls, close all connections, and wait for the probes."""
        for reference in tuple(self._waiting):
            call = reference()
            if call is not None:
                call.cancel()
        self._waiting.clear()
        self.signal.notify()
        closing = [asyncio.ensure_future(connection.close(grace)) for connection in self._to_close]
        others = [*self._probes, *(() if self._explaining is None else (self._explaining,))]
        try:
            if closing or others:
                await asyncio.wait([*closing, *others])
        except asyncio.CancelledError:
            for task in closing:
                task.cancel()
            await asyncio.gather(*closing, return_exceptions=True)
            raise
        for task in closing:
            task.result()


async def _connect_error(connection: ReconnectingChannel) -> str:
    """Return why a connection is in TRANSIENT_FAILURE; "" if that is not known."""
    try:
        probe = connection.heartbeat_call(PROBE.method)
        await probe(PROBE.request, timeout=EXPLAIN_TIMEOUT_S, metadata=MARK)
    except grpc.RpcError as error:
        return error_text(error)
    except Exception:  # noqa: BLE001 - closed meanwhile, or an interceptor's
        return ""
    return ""


# --- Calls ---


class _BalancedCall(TransportCall):
    """A call on one subchannel, which may have to wait for it. The base class of the four kinds."""

    _subchannel: Subchannel | None = None
    _waiting: tuple[Any, ...] | None = None
    _began_s = 0.0
    _timeout_s: float | None = None

    def __init__(self, method: _BalancedMethod, begun: _Begun | None) -> None:
        self.kind = method.kind
        self.method = method.name
        self._method = method
        if begun is not None:
            self._subchannel, self._reconnecting, self._transport, call = begun
            self.run(call, counted=True)

    def wait_for(
        self,
        request: tuple[Any, ...],
        options: dict[str, Any],
        *,
        wait_for_ready: bool,
    ) -> None:
        """Wait until a subchannel is READY, then begin."""
        self._began_s = time.monotonic()
        timeout_s, metadata = options["timeout"], options["metadata"]
        self._timeout_s = None if timeout_s is None else max(0.0, timeout_s)
        if not self.kind.streams_requests:  # the caller may change it before it is sent
            request = (copy_of(request[0]),)
        options["metadata"] = None if metadata is None else grpc.aio.Metadata(*metadata)
        self._waiting = request, options, wait_for_ready, TRIED.get(), copy_context()
        self._method.pool.hold(self, weakly=self._cancels_when_dropped)

    async def _wait_for_change(self) -> None:
        if self._waiting is not None:  # the task that awaits may have no other reference
            self._method.pool.hold(self, weakly=False)
        await super()._wait_for_change()

    def try_begin(self, refusal: Refusal | None) -> None:
        """Begin the attempt if a subchannel is READY; end the call if it must not wait longer.

        Args:
            refusal: The status of a call without `wait_for_ready` if none is READY.
        """
        if self._waiting is None:
            return
        request, options, wait_for_ready, tried, context = self._waiting
        pool = self._method.pool
        if pool.closed:
            self.cancel()
            return
        try:
            begun = context.run(self._pick_and_begin, request, options, tried)
        except BaseException as error:  # noqa: BLE001 - a key function's, or an interceptor's
            self._end_waiting(failed_call(self.kind, error))
            return
        if begun:
            return
        if refusal is not None and (refusal.final or not wait_for_ready):
            if not refusal.unreachable or not pool.explains():
                self._fail(refusal)
            return
        limit_s = pool.limit_of(self._timeout_s, wait_for_ready=wait_for_ready)
        if limit_s is not None and time.monotonic() - self._began_s >= limit_s:
            self._fail(pool.timed_out(self._timeout_s, limit_s))

    def _pick_and_begin(
        self, request: tuple[Any, ...], options: dict[str, Any], tried: list[object] | None
    ) -> bool:
        method, metadata = self._method, options["metadata"]
        message = None if self.kind.streams_requests else request[0]
        while True:
            waited_s = time.monotonic() - self._began_s
            subchannel = method.pool.pick_other(tried, method.name, message, metadata, waited_s)
            if subchannel is None:
                return False
            left_s = self.time_remaining()
            begun = method.start(subchannel, request, options | {"timeout": left_s})
            if begun is not None:
                self._waiting = None
                method.pool.release(self)
                self._subchannel, self._reconnecting, self._transport, call = begun
                self.run(call, counted=True)
                return True

    def _fail(self, refusal: Refusal) -> None:
        self._end_waiting(finished_call(self.kind, refusal.code, refusal.details))

    def _end_waiting(self, call: Any) -> None:
        self._waiting = None
        self._method.pool.release(self)
        self.finish(call)

    def cancel(self) -> bool:
        if self._waiting is None:
            return super().cancel()
        self._end_waiting(finished_call(self.kind, CANCELLED, CANCELLED_HERE))
        return True

    def time_remaining(self) -> float | None:
        if self._subchannel is not None:
            return super().time_remaining()
        if self._timeout_s is None:
            return None
        return max(0.0, self._began_s + self._timeout_s - time.monotonic())

    def _saw_status(self, code: grpc.StatusCode) -> None:
        super()._saw_status(code)
        if self._subchannel is not None:
            self._method.pool.failed(self._subchannel, code.name)

    def _release(self) -> None:
        subchannel = self._subchannel
        if subchannel is None:
            return  # the call has not begun
        if self._final is self._call and not self._has_failed:
            subchannel.failures = 0  # like `succeeded`, without a call
            subchannel.successes += 1
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
        method = self._methods.get(subchannel)
        try:
            if method is None or method.channel is not subchannel.connection:
                method = self._make(subchannel)
            transport, call = method.start(request, options)
        except grpc.aio.UsageError as error:
            if not self.pool.was_closed(subchannel, error):
                raise
            return None
        return subchannel, method.channel, transport, call

    def _make(self, subchannel: Subchannel) -> Any:
        connection = self.pool.connection_of(subchannel)
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
            raise grpc.aio.UsageError(CLOSED)
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
                call.wait_for((request,), options, wait_for_ready=bool(wait_for_ready))
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
        if credentials is not None and self.pool.is_insecure:
            raise grpc.aio.UsageError(NOT_SECURE)
        check_options(metadata, credentials, compression)
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

        Args:
            name: The name of the service, such as `"shop.Orders"`, for events and status details.
            instances: The servers; None if they are not known yet, so that calls wait for `update`.
            lb_policy: Which server gets a call: `"round_robin"`, `"weighted_round_robin"`,
                `"weighted_random"`, `"least_request"`, `"ring_hash:HEADER"`, or a `Picker`.
            credentials: With credentials, only instances with the protocol `grpcs` are used.
                Without, only those with `grpc`; while one has `grpcs`, calls end with
                FAILED_PRECONDITION.
            options: As gRPC takes them, for the connection of each subchannel.
            compression: As gRPC takes it.
            interceptors: As gRPC takes them. They run after the pick.
            connect: Makes the channels of subchannels: `connect(instance, options)` returns a new
                `grpc.aio.Channel`. It runs on the loop. If it raises, the server counts as
                unreachable. Instances of both protocols are used.
            on_subchannel: A plain function, called on the loop with each subchannel when its
                channel is made.
            on_removed: A plain function, called on the loop with each subchannel whose instance
                was removed.
            balancer_policy: The settings; None for the defaults.
            timer: For health checks and drain timeouts; None for `shared_timer()`.

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
            raise grpc.aio.UsageError(CLOSED)
        await self._wait_until(lambda: self.get_state() is not last_observed_state)

    async def channel_ready(self) -> None:
        """Connect all subchannels and wait until one is READY.

        Raises:
            grpc.aio.UsageError: The channel is closed, or is closed during the wait.
        """
        ready = {READY, SHUTDOWN}
        await self._wait_until(lambda: self.get_state(try_to_connect=True) in ready)
        if self.closed:
            raise grpc.aio.UsageError(CLOSED)

    async def _wait_until(self, happened: Callable[[], bool]) -> None:
        self._pool.enter()
        poll_s = FIRST_POLL_S
        while not happened():
            try:
                async with asyncio.timeout(poll_s):
                    await self._pool.signal.wait()
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
        if grace is not None and grace < 0:
            raise ConfigurationError(f"grace must be 0 seconds or more, or None, not {grace!r}")
        await self._pool.close(grace)


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
