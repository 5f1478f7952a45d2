"""`BalancedChannel` for `grpc`: one channel for all servers of a service, used by any thread.

A call is handed to one subchannel, which is READY at that moment, and stays there. If none is
READY, a blocking call waits on its caller's thread, and a call that the caller holds while it runs
(`.future()`, response streams) is a `RetryingCall` that begins when one is READY. While calls wait,
a worker reads the states of the subchannels; gRPC's own notifications would cost a thread for each.

Locks: that of the pool, which is held for a few steps only. Under it run no user code and nothing
of gRPC but reads of a state.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Self, TypeAlias, TypeVar

import grpc

from rpcwheel._concurrency.executor import EXECUTOR
from rpcwheel._grpc import multicallable
from rpcwheel._grpc.calls import Details, InternalCallback, call_at_end, metadata_of
from rpcwheel._grpc.finished import FinishedError, FinishedResponse
from rpcwheel.call.config import ClientState, copy_of
from rpcwheel.call.policy import CallPolicy
from rpcwheel.call.sync_call import CallAttempts, ClientCall, RetryingCall, RetryingStream
from rpcwheel.durations import NEVER, to_ns
from rpcwheel.events import CallbackFailed, emit
from rpcwheel.exiting import BACKGROUND
from rpcwheel.probe import MARK
from rpcwheel.rpc import TRIED, Kind
from rpcwheel.transport.sync import CLOSED, ReconnectingChannel

from .base import BalancedChannelBase
from .health import PROBE, HealthChecker, error_text, is_answered
from .subchannels import (
    EXPLAIN_AGAIN_S,
    EXPLAIN_TIMEOUT_S,
    FAILING,
    FIRST_POLL_S,
    MAX_EXPLAINED,
    MAX_POLL_S,
    SubchannelBase,
    SubchannelPool,
)
from .subscriptions import Subscriptions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from types import TracebackType

    from rpcwheel.exiting import BackgroundCall
    from rpcwheel.instance import ServiceInstance
    from rpcwheel.timer.api import Timer

    from .pickers import Picker
    from .policy import BalancerPolicy
    from .subchannels import Refusal

    Options: TypeAlias = list[tuple[str, Any]]

__all__ = ["BalancedChannel", "Subchannel"]

CLOSED_MEANWHILE: Final = "Channel closed!"
"""The details of a call that waits when its channel is closed, as gRPC has them."""

WAKE_INTERVAL_S: Final = 1.0
"""How long a blocked call waits at most before it looks by itself."""

T = TypeVar("T")


class Subchannel(SubchannelBase):
    """One server of a balanced channel, with a connection of its own. Made by the channel."""

    @property
    def channel(self) -> ReconnectingChannel:
        """Its own channel, made when it is first needed.

        Raises:
            ValueError: The subchannel was removed.
            Exception: What `connect` raised.
        """
        channel: ReconnectingChannel = self._pool.connection_of(self)
        return channel


class _Pool(SubchannelPool[Subchannel]):
    """The subchannels of one channel, their connections, and the calls that wait for one."""

    subchannel_class = Subchannel
    channel_class = ReconnectingChannel

    def __init__(self, *args: Any, timer: Timer | None, **settings: Any) -> None:
        super().__init__(*args, timer=timer, **settings)
        self._version = threading.Condition(self.lock)
        self._blocked = 0  # threads that wait for a subchannel
        self._held: dict[WaitingCall, None] = {}
        self._polling = False
        self._polls = 0
        self._wake = threading.Event()  # for the worker that polls
        self._explaining = threading.Lock()
        self.checker = HealthChecker(self, timer)
        self.state = ClientState(CallPolicy(), timer=timer, queue_of=_no_queue)
        """Of calls that wait: without a retry policy."""
        self.on_change: Callable[[], object] = _nothing
        """Called when the state of the whole may have changed."""

    # --- Connections ---

    connect = SubchannelPool.connect_now
    drain = SubchannelPool.drain_now

    def closed_error(self) -> ValueError:
        return ValueError(CLOSED)

    def was_closed(self, subchannel: Subchannel, before: Any, error: ValueError) -> bool:
        """Whether a call was refused because its subchannel was removed, or its channel closed.

        gRPC has begun nothing then.

        Args:
            subchannel: The one that it was to begin on.
            before: The connection of it, read before its multicallable.
            error: What was raised.
        """
        if not str(error).startswith("Cannot invoke RPC"):
            return False
        connection = subchannel.connection
        replaced = connection is not before or connection is None or not connection.accepts_calls
        return subchannel.removed or replaced

    def close(self) -> None:
        """See `BalancedChannel.close`."""
        connections = self.close_all()
        self.changed()
        try:
            self.close_callbacks.run()
        finally:  # whatever a callback raises, be it `SystemExit`
            for connection in connections:
                connection.close()

    # --- Calls that wait ---

    def wait_for(
        self, find: Callable[[], T | None], timeout: float | None, *, wait_for_ready: bool
    ) -> tuple[T, float | None]:
        """Wait on this thread until `find()` returns what a call needs: a READY subchannel.

        Returns:
            What it returned, and what is left of the timeout.

        Raises:
            FinishedError: The call fails.
            ValueError: The channel is closed; FinishedError, if it is closed meanwhile.
            Exception: What a key function raised.
        """
        if self.closed:
            raise ValueError(CLOSED)
        began_s = time.monotonic()
        limit_s = self.limit_of(timeout, wait_for_ready=wait_for_ready)
        is_first = True
        with self.lock:
            self._blocked += 1
        try:
            while True:
                version = self._start_polling() if is_first else self._polls
                found = find()
                if found is not None:
                    left_s = None if timeout is None else began_s + timeout - time.monotonic()
                    return found, None if left_s is None else max(0.0, left_s)
                if self.closed:  # as gRPC ends calls that run at that moment
                    raise FinishedError(grpc.StatusCode.CANCELLED, CLOSED_MEANWHILE)
                self.check_refusal(wait_for_ready=wait_for_ready)
                left_s = WAKE_INTERVAL_S
                if limit_s is not None:
                    left_s = min(left_s, began_s + limit_s - time.monotonic())
                    if left_s <= 0:
                        raise self.late(timeout, limit_s)
                with self._version:
                    was_polled = self._polls != version or self._version.wait(left_s)
                if not was_polled:  # there is no thread for the worker
                    self.refresh()
                is_first = False
        finally:
            with self.lock:
                self._blocked -= 1

    def late(self, timeout: float | None, limit: float | None) -> FinishedError:
        """The end of a call that has waited for too long; see `timed_out`."""
        end = self.timed_out(timeout, limit)
        return FinishedError(end.code, end.details)

    def check_refusal(self, *, wait_for_ready: bool) -> None:
        """Return if a call that got no subchannel is to wait.

        Raises:
            FinishedError: It is to fail now.
            ValueError: The channel is closed.
        """
        if self.closed:
            raise ValueError(CLOSED)
        refusal = self.refusal()
        if refusal is None or (wait_for_ready and not refusal.final):
            return
        if refusal.unreachable:
            refusal = self._explain() or refusal
        raise FinishedError(refusal.code, refusal.details)

    def _explain(self) -> Refusal | None:
        """Ask servers that can't be reached for the reason: gRPC's state does not have it.

        Not with the user's request, which must not be sent now.
        """
        if self._explaining.acquire(timeout=EXPLAIN_TIMEOUT_S):
            try:
                self._probe_errors()
            finally:
                self._explaining.release()
        return self.refusal()

    def _probe_errors(self) -> None:
        now_s = time.monotonic()
        if now_s - self._explained_s < EXPLAIN_AGAIN_S:
            return
        self._explained_s = now_s
        for one in self.subchannels[:MAX_EXPLAINED]:
            left_s = now_s + EXPLAIN_TIMEOUT_S - time.monotonic()
            if left_s > 0 and one.connection is not None and one.state is FAILING:
                one.error_text = _connect_error(one.connection, left_s) or one.error_text

    def _start_polling(self) -> int:
        """Have a worker read the states until no call waits. Returns the count of its readings."""
        with self.lock:
            self._poll_s = FIRST_POLL_S
            starts = not self._polling
            self._polling = True
            version = self._polls
        if starts:
            EXECUTOR.submit(self._wake, partial(_poll, weakref.ref(self), self._wake))
        return version

    def poll(self) -> float | None:
        """Read the states, and let calls that wait look again.

        Returns:
            After how many seconds to do so again; None: no call waits.
        """
        with self.lock:
            if self.closed or not (self._blocked or self._held):
                self._polling = False
                held = tuple(self._held)
                poll_s = None
            else:
                held, poll_s = tuple(self._held), self._poll_s
                self._poll_s = min(1.5 * poll_s, MAX_POLL_S)
        if poll_s is not None:
            self.refresh()
        with self._version:
            self._polls += 1
            self._version.notify_all()
        for call in held:
            call.look_for_subchannel()
        return poll_s

    def hold(self, call: WaitingCall) -> None:
        """Let a call wait; the worker calls its `look_for_subchannel`."""
        with self.lock:
            self._held[call] = None
        self._start_polling()

    def release(self, call: WaitingCall) -> None:
        """A call waits no more."""
        with self.lock:
            self._held.pop(call, None)

    def changed(self) -> None:
        self.on_change()
        self._wake.set()

    # --- Health checks ---

    def run_soon(self, check: Callable[[], object]) -> None:
        EXECUTOR.submit(("health checks", self), check)

    def probe(self, subchannel: Subchannel, done: Callable[[bool | None], object]) -> None:
        background = BACKGROUND.begin_call()
        if background is None:
            done(None)
            return
        try:
            call = self.connection_of(subchannel).heartbeat_call(PROBE.method)
            probe = call.future(PROBE.request, self.check_timeout_s, MARK)
        except Exception as error:  # noqa: BLE001 - closed meanwhile, or the user's `connect`
            BACKGROUND.end_call(background)
            if not subchannel.removed:
                emit(CallbackFailed(self.name, f"connect {subchannel.id}", error))
            done(False)
            return
        background.cancel = probe.cancel
        ended = InternalCallback(_probed, background, self.run_soon, done)
        probe.add_done_callback(ended)


def _poll(pool: weakref.ref[_Pool], wake: threading.Event) -> None:
    """On a worker, which does not keep the channel alive."""
    while True:
        wake.clear()
        alive = pool()
        try:
            poll_s = None if alive is None else alive.poll()
        except BaseException:  # a `SystemExit` of the user's code, which is reported
            EXECUTOR.submit(wake, partial(_poll, pool, wake))
            raise
        del alive
        if poll_s is None:
            return
        wake.wait(poll_s)


def _probed(
    background: BackgroundCall,
    submit: Callable[[Callable[[], object]], object],
    done: Callable[[bool | None], object],
    probe: Any,
) -> None:
    """On gRPC's thread."""
    BACKGROUND.end_call(background)
    submit(lambda: done(_is_answered(probe)))


def _is_answered(probe: Any) -> bool:
    try:
        return is_answered(probe.result(timeout=0), "OK")
    except grpc.RpcError as error:
        code = error.code() if hasattr(error, "code") else None
        return is_answered(None, getattr(code, "name", "CANCELLED"))
    except Exception:  # noqa: BLE001 - canceled, or of an interceptor's own future
        return False


def _connect_error(connection: ReconnectingChannel, timeout_s: float) -> str:
    """Why a connection that is in TRANSIENT_FAILURE can't be made; "" if that can't be known."""
    try:
        connection.heartbeat_call(PROBE.method)(PROBE.request, timeout_s, MARK)
    except grpc.RpcError as error:
        return error_text(error)
    except Exception:  # noqa: BLE001 - closed meanwhile, or an interceptor's
        return ""
    return ""


# --- Calls ---


class WaitingCall(CallAttempts):
    """The one attempt of a call that begins when a subchannel is READY."""

    def __init__(
        self,
        method: _Method,
        name: str,
        request: Any,
        timeout: float | None,
        options: tuple[Any, ...],
    ) -> None:
        metadata, credentials, wait_for_ready, compression = options
        metadata = None if metadata is None else metadata_of(metadata)
        state, now_ns = method.pool.state, method.pool.state.now_ns()
        deadline_ns = NEVER if timeout is None else now_ns + max(0, to_ns(timeout, what="timeout"))
        if not method.kind.streams_requests:
            request = copy_of(request)  # its caller may change it before it is sent
        details = Details(method.name, timeout, metadata, credentials, False, compression)
        config = state.configs.config_for(method.name)
        begun = config, now_ns, deadline_ns, deadline_ns
        super().__init__(ClientCall(state, method.kind, _none, details, request, begun))
        self._method = method
        self._name = name
        self._given = request, metadata, credentials, compression
        self._timeout_s = timeout
        self._began_s = time.monotonic()
        self._waits_for_ready = bool(wait_for_ready)
        self._tried = TRIED.get()
        pool = method.pool
        self._limit_s = pool.limit_of(timeout, wait_for_ready=self._waits_for_ready)
        self._looking = threading.Lock()
        pool.hold(self)

    def look_for_subchannel(self) -> None:
        """Begin the attempt if a subchannel is READY; end the call if it is to wait no longer.

        On a worker; in the context of the caller.
        """
        if self._looking.acquire(blocking=False):
            try:
                if self.final is None and self._attempt is None:
                    self._run(self._look)
            finally:
                self._looking.release()
        if self.final is not None or self._attempt is not None:
            self._method.pool.release(self)

    def _look(self) -> None:
        method, pool = self._method, self._method.pool
        request, metadata, credentials, compression = self._given
        waited_s = time.monotonic() - self._began_s
        while True:
            subchannel = method.pick(request, metadata, self._tried, waited_s)
            if subchannel is None:
                break
            left_s = None if self._timeout_s is None else max(0.0, self._timeout_s - waited_s)
            options = metadata, credentials, False, compression
            attempt = method.begin_on(subchannel, self._name, request, left_s, options)
            if attempt is not None:
                self._follow(attempt if hasattr(attempt, "add_done_callback") else _Bare(attempt))
                return
        try:
            pool.check_refusal(wait_for_ready=self._waits_for_ready)
            if self._limit_s is not None and waited_s >= self._limit_s:
                raise pool.late(self._timeout_s, self._limit_s)
        except FinishedError as error:
            self._finish(error)
        except ValueError:
            self._finish(FinishedError(grpc.StatusCode.CANCELLED, CLOSED_MEANWHILE))

    def seconds_left(self) -> float | None:
        if self._timeout_s is None:
            return None
        return max(0.0, self._began_s + self._timeout_s - time.monotonic())


class _Bare(FinishedResponse):
    """A response stream that an interceptor made a generator of (OpenTelemetry's does).

    It has no status but OK; its reader sees its end.
    """

    def __init__(self, messages: Any) -> None:
        super().__init__(None, "")
        self._messages = iter(messages)

    def add_done_callback(self, _: object) -> None:
        pass

    def __next__(self) -> Any:
        return next(self._messages)

    def done(self) -> bool:
        return False

    def cancel(self) -> bool:
        with contextlib.suppress(ValueError, AttributeError):  # it runs on another thread
            self._messages.close()
        return True


class _Method:
    """One method of a stub. The base of the four multicallables."""

    __slots__ = ("_given", "_made", "name", "pool")

    kind: Kind

    def __init__(self, pool: _Pool, method: str, *args: Any, **options: Any) -> None:
        self.pool = pool
        self.name = method
        self._given = args, options
        self._made: dict[Subchannel, tuple[ReconnectingChannel, Any]] = {}

    def on(self, subchannel: Subchannel) -> Any:
        """The same method of a subchannel's own channel.

        Raises:
            ValueError: The subchannel was removed; with gRPC's text.
        """
        known = self._made.get(subchannel)
        if known is not None and known[0] is subchannel.connection:
            return known[1]
        connection = self.pool.connection_of(subchannel)
        args, options = self._given
        made = getattr(connection, self.kind.name.lower())(self.name, *args, **options)
        alive = {one: each for one, each in self._made.copy().items() if not one.removed}
        self._made = alive | {subchannel: (connection, made)}
        return made

    def pick(
        self, request: Any, metadata: Any, tried: list[object] | None, waited_s: float = 0.0
    ) -> Subchannel | None:
        """Pick a READY subchannel; with `tried`, preferably one that is not in it."""
        seen = None if self.kind.streams_requests else request
        return self.pool.pick_other(tried, self.name, seen, metadata, waited_s)

    def _wait(
        self,
        name: str,
        request: Any,
        timeout: float | None,
        metadata: Any,
        credentials: Any,
        wait_for_ready: bool | None,
        compression: Any,
    ) -> Any:
        """Make a call on its caller's thread."""
        pool = self.pool
        seen = None if self.kind.streams_requests else request
        subchannel = pool.pick(self.name, seen, metadata)
        if subchannel is None:
            pick = partial(pool.pick_again, self.name, seen, metadata)
            found, timeout = pool.wait_for(pick, timeout, wait_for_ready=bool(wait_for_ready))
            subchannel = found
        ready = False if wait_for_ready else wait_for_ready  # or it might wait at this server
        began_s, before = time.monotonic(), subchannel.connection
        try:
            known = self._made.get(subchannel)  # as `on`, without another call
            made = known[1] if known is not None and known[0] is before else self.on(subchannel)
            response = made.wait_for(
                name, request, timeout, metadata, credentials, ready, compression
            )
        except grpc.RpcError as error:
            pool.failed(subchannel, _code_of(error))
            raise
        except ValueError as error:
            if not pool.was_closed(subchannel, before, error):
                raise
        else:
            subchannel.succeeded()
            return response
        if timeout is not None:
            timeout = max(0.0, began_s + timeout - time.monotonic())
        return self._wait(
            name, request, timeout, metadata, credentials, wait_for_ready, compression
        )

    def _begin(self, name: str, request: Any, timeout: float | None, *options: Any) -> Any:
        """Begin a call that the caller holds while it runs."""
        metadata, credentials, wait_for_ready, compression = options
        ready = False if wait_for_ready else wait_for_ready  # or it might wait at one server
        given, tried = (metadata, credentials, ready, compression), TRIED.get()
        while True:
            subchannel = self.pick(request, metadata, tried)
            if subchannel is None:
                break
            call = self.begin_on(subchannel, name, request, timeout, given)
            if call is not None:
                return call
        if self.pool.closed:
            raise ValueError(CLOSED)
        waiting = WaitingCall(self, name, request, timeout, options)
        return RetryingCall(waiting) if name == "future" else RetryingStream(waiting)

    def begin_on(
        self,
        subchannel: Subchannel,
        name: str,
        request: Any,
        timeout: float | None,
        options: tuple[Any, ...],
    ) -> Any:
        """Begin a call on a subchannel; None if that was removed or closed meanwhile."""
        before = subchannel.connection
        try:
            call = getattr(self.on(subchannel), name)(request, timeout, *options)
        except ValueError as error:
            if not self.pool.was_closed(subchannel, before, error):
                raise
            return None
        report_end(call, self.pool, subchannel)
        return call


def report_end(call: Any, pool: _Pool, subchannel: Subchannel) -> None:
    """Report how a call ends to the pool; the call is not kept alive for that."""
    try:
        alive = weakref.ref(call)
    except TypeError:  # an interceptor's own
        return

    def ended() -> None:
        """On gRPC's thread, or on the one that ends it."""
        over = alive()
        code = "" if over is None else _code_of(over)
        if code == "OK":
            subchannel.succeeded()
        elif code:
            EXECUTOR.submit(pool, partial(pool.failed, subchannel, code))

    if hasattr(call, "add_callback"):
        call_at_end(call, ended)


def _code_of(call: Any) -> str:
    """The name of its status code; "" if it has none."""
    get_code = getattr(call, "code", None)
    code = get_code() if callable(get_code) else None
    return getattr(code, "name", "")


def _none(*_: object) -> None:
    raise AssertionError("a waiting call begins its attempt by itself")


def _no_queue(*_: object) -> Any:
    raise AssertionError("there is no failback policy")


def _nothing() -> None:
    """There are no subscribers."""


class _UnaryUnary(_Method, multicallable.UnaryUnary):
    __slots__ = ()
    kind = Kind.UNARY_UNARY


class _StreamUnary(_Method, multicallable.StreamUnary):
    __slots__ = ()
    kind = Kind.STREAM_UNARY


class _UnaryStream(_Method, multicallable.UnaryStream):
    __slots__ = ()
    kind = Kind.UNARY_STREAM


class _StreamStream(_Method, multicallable.StreamStream):
    __slots__ = ()
    kind = Kind.STREAM_STREAM


# --- The channel ---


class BalancedChannel(BalancedChannelBase[Subchannel], grpc.Channel):
    """A channel whose calls are spread over the servers of a service, which may come and go.

    Thread-safe. In a forked child make another one: as with any channel of gRPC, this one's
    connections and threads are the parent's.
    """

    _title = "BalancedChannel"
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
        connect: Callable[[ServiceInstance, Options], grpc.Channel] | None = None,
        on_subchannel: Callable[[Subchannel], object] | None = None,
        on_removed: Callable[[Subchannel], object] | None = None,
        policy: BalancerPolicy | None = None,
        timer: Timer | None = None,
    ) -> None:
        """Make the channel. Its subchannels connect at the first call.

        Args:
            name: Of the service, `"shop.Orders"`: for events and status details.
            instances: The servers; None if they are not known yet, so that calls wait for `update`.
            lb_policy: Which server gets a call: `"round_robin"`, `"weighted_round_robin"`,
                `"weighted_random"`, `"least_request"`, `"ring_hash:HEADER"`, or a `Picker`.
            credentials: With credentials, only instances with the protocol `grpcs` are used.
                Without, only those with `grpc`; while one has `grpcs`, calls end with
                FAILED_PRECONDITION.
            options: As gRPC takes them, for the connection of each subchannel.
            compression: As gRPC takes it.
            connect: Makes the channel of each subchannel in your own way: `connect(instance,
                options)` returns a new `grpc.Channel`. On a thread that calls, or reconnects; a
                server for which it raises counts as unreachable. Instances of both protocols are
                used.
            on_subchannel: Called with each subchannel when its channel is made, on that thread.
            on_removed: Called with each subchannel whose instance is gone.
            policy: None: the defaults.
            timer: For health checks and drain timeouts; None for `shared_timer()`.

        Raises:
            TypeError, ConfigurationError: An argument makes no sense.
        """
        self._pool = _Pool(
            name,
            lb_policy,
            policy,
            timer=timer,
            connect=connect,
            options=options,
            own={"credentials": credentials, "compression": compression},
            on_subchannel=on_subchannel,
            on_removed=on_removed,
        )
        self._subscriptions = Subscriptions(name, self.get_state, timer)
        self._pool.on_change = self._subscriptions.look_soon
        if instances is not None:
            self.update(instances)

    # --- A channel of gRPC ---

    def unary_unary(self, method: str, *args: Any, **options: Any) -> grpc.UnaryUnaryMultiCallable:
        """Make a multicallable."""
        return _UnaryUnary(self._pool, method, *args, **options)

    def unary_stream(
        self, method: str, *args: Any, **options: Any
    ) -> grpc.UnaryStreamMultiCallable:
        """Make a multicallable."""
        return _UnaryStream(self._pool, method, *args, **options)

    def stream_unary(
        self, method: str, *args: Any, **options: Any
    ) -> grpc.StreamUnaryMultiCallable:
        """Make a multicallable."""
        return _StreamUnary(self._pool, method, *args, **options)

    def stream_stream(
        self, method: str, *args: Any, **options: Any
    ) -> grpc.StreamStreamMultiCallable:
        """Make a multicallable."""
        return _StreamStream(self._pool, method, *args, **options)

    def subscribe(
        self,
        callback: Callable[[grpc.ChannelConnectivity], None],
        try_to_connect: bool | None = False,
    ) -> None:
        """Call `callback(state)` now and at each change; see `get_state`.

        On a worker, one callback at a time; a change is seen within 0.2 s. If one raises, that is
        the event `CallbackFailed`, and it is called again at the next change.

        Args:
            callback: Gets the state.
            try_to_connect: Whether to connect as long as no subchannel is READY.
        """
        self._subscriptions.add(callback, try_to_connect=bool(try_to_connect))

    def unsubscribe(self, callback: Callable[[grpc.ChannelConnectivity], None]) -> None:
        """Call it no more. Unknown ones are no error."""
        self._subscriptions.remove(callback)

    def close(self) -> None:
        """End all calls, as any channel of gRPC, and close all connections. A second time, nothing.

        Not to be called where gRPC runs done-callbacks: like any channel of gRPC, it would wait
        there for itself.
        """
        self._subscriptions.close()
        self._pool.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_val: BaseException | None,
        exc_tb: TracebackType | None,
    ) -> None:
        self.close()
