"""`BalancedChannel` for `grpc`: one channel for all servers of a service, used by any thread.

A call is sent on a subchannel that is READY, and never moves to another one. If none is READY, a
blocking call waits on its caller's thread. A call of `.future()` and a response stream are then a
`RetryingCall`, which begins when a subchannel is READY. While calls wait, a worker reads the states
of the subchannels; gRPC's own notifications need a thread for each subchannel.

The only lock is that of the pool. No user code runs under it, except `Picker.prepare`.
"""

from __future__ import annotations

import threading
import time
import weakref
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar

import grpc

from rpcwheel._concurrency.executor import EXECUTOR, reset_after_fork
from rpcwheel._concurrency.exiting import BACKGROUND
from rpcwheel._grpc import multicallable
from rpcwheel._grpc.calls import (
    CLOSED,
    NOT_SERIALIZED,
    Details,
    InternalCallback,
    check_call_options,
    check_request,
    metadata_tuple,
    outcome_of,
    reusable_metadata,
    run_at_end,
    set_server_of,
    value_of,
    was_not_invoked,
)
from rpcwheel._grpc.finished import FinishedError
from rpcwheel.call.client_state import ClientState
from rpcwheel.call.policy import CallPolicy
from rpcwheel.call.sync_retrying_call import DeferredCall
from rpcwheel.events import CallbackFailed, emit
from rpcwheel.rpc import NOT_EXECUTED_CODES, TRIED, Kind, classes_by_kind
from rpcwheel.transport.probe import MARK, SERVER_HEALTH
from rpcwheel.transport.sync import ReconnectingChannel

from .base import BalancedChannelBase
from .health import HealthChecker
from .pending import FIRST_POLL_S, MAX_POLL_S, Refusal, poll_interval_s
from .subchannel import SubchannelBase
from .subchannels import Connections, SubchannelPool
from .subscriptions import BalancerSubscriptions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from rpcwheel._concurrency.exiting import BackgroundCall
    from rpcwheel.instance import ServiceInstance
    from rpcwheel.timer.api import Timer

    from .pending import PendingPick
    from .pickers import Picker
    from .policy import BalancerPolicy
    from .subchannels import ProbeDone

    Options: TypeAlias = list[tuple[str, Any]]

WAKE_INTERVAL_S: Final = 1.0
"""The maximum time that a blocked call waits for the worker before it reads the states itself."""

T = TypeVar("T")


class Subchannel(SubchannelBase):
    """One server of a balanced channel, with a connection of its own. Made by the channel."""

    @property
    def channel(self) -> ReconnectingChannel:
        """Its own channel, made at the first use.

        Raises:
            ValueError: The subchannel was removed.
            Exception: Whatever `connect` raised.
        """
        channel: ReconnectingChannel = self._pool.connections.connection_of(self)
        return channel


class _Connections(Connections[Subchannel]):
    channel_class = ReconnectingChannel
    connect = Connections.connect_now
    drain = Connections.drain_now

    def closed_error(self) -> ValueError:
        return ValueError(CLOSED)

    def run_soon(self, job: Callable[[], object]) -> None:
        EXECUTOR.submit(("health checks", self._pool), job)

    def probe(self, subchannel: Subchannel, timeout_s: float, done: ProbeDone) -> None:
        background = BACKGROUND.begin_call()
        if background is None:
            done(None, None)
            return
        try:
            call = self.connection_of(subchannel).heartbeat_call(SERVER_HEALTH.method)
            probe = call.future(SERVER_HEALTH.request, timeout_s, MARK)
        except BaseException as error:  # closed meanwhile, or of the user's `connect`
            BACKGROUND.end_call(background)
            if not isinstance(error, Exception):
                done(None, error)
                raise
            if not subchannel.removed:
                emit(CallbackFailed(self._pool.name, f"connect {subchannel.id}", error))
            done(None, error)
            return
        background.cancel = probe.cancel
        probe.add_done_callback(InternalCallback(_probed, background, done))


def _probed(background: BackgroundCall, done: ProbeDone, probe: Any) -> None:
    """Handle the end of a probe. On gRPC's thread."""
    BACKGROUND.end_call(background)
    done(*outcome_of(probe))


class _Pool(SubchannelPool[Subchannel]):
    """The subchannels of one channel, their health, and the calls that wait."""

    subchannel_class = Subchannel
    connections_class = _Connections
    checker: HealthChecker[Subchannel]

    def __init__(self, *args: Any, timer: Timer | None, **settings: Any) -> None:
        super().__init__(*args, timer=timer, **settings)
        self.checker = HealthChecker(self, timer)
        self.waiting = _WaitingCalls(self)
        self.state = ClientState(CallPolicy(), timer=timer, queue_of=_no_queue)
        """The state of waiting calls, without policies."""
        self.on_change: Callable[[], object] = _nothing
        """Called when the state of the channel may have changed."""
        reset_after_fork(self)

    def reset(self) -> None:
        """Forget the waiting calls and checks of the parent, in a forked child."""
        self.lock = threading.RLock()
        self.waiting = _WaitingCalls(self)
        self.connections.reset()
        self.checker.reset()
        for picking in self.router:
            picking.read_soon()

    def changed(self) -> None:
        self.on_change()
        self.waiting.wake()

    def close(self) -> None:
        """Close the pool; see `BalancedChannel.close`."""
        connections = self.close_all()
        self.changed()
        try:
            self.close_callbacks.run()
        finally:  # whatever a callback raises, be it `SystemExit`
            with ExitStack() as closing:  # all, although `close` of the user's channel may raise
                for connection in connections:
                    closing.callback(connection.close)


class _BlockedCall(threading.Event):
    """A call that waits on its caller's thread, and picks there each time the states were read."""

    try_begin = threading.Event.set


class _WaitingCalls:
    """The calls of one channel that wait, and the worker that reads the states for them."""

    def __init__(self, pool: _Pool) -> None:
        self._pool = pool
        self._held: dict[WaitingCall | _BlockedCall, None] = {}
        self._polling = False
        self._poll_s = FIRST_POLL_S
        self._wake = threading.Event()  # for the worker that polls

    def wait_for(
        self, pending: PendingPick, find: Callable[[PendingPick, float], T | Refusal | None]
    ) -> T:
        """Wait on this thread until `find(pending, now_s)` returns something to return.

        Raises:
            FinishedError: `find` returned the status with which the call ends.
            ValueError: The channel is closed.
            Exception: Whatever a key function raised.
        """
        pool = self._pool
        if pool.closed:
            raise ValueError(CLOSED)
        blocked = _BlockedCall()
        self.hold(blocked)
        try:
            while True:
                blocked.clear()
                now_s = time.monotonic()
                result = find(pending, now_s)
                if isinstance(result, Refusal):
                    raise FinishedError(result.code, result.details)
                if result is not None:
                    return result
                left_s = pending.wait_left_s(now_s)
                if left_s is None or left_s <= 0:  # it is late, and waits for an explanation
                    left_s = WAKE_INTERVAL_S
                if not blocked.wait(min(left_s, WAKE_INTERVAL_S)):  # the worker has no thread
                    pool.refresh()
        finally:
            self.release(blocked)

    def hold(self, call: WaitingCall | _BlockedCall) -> None:
        """Add a waiting call; a worker reads the states, and calls its `try_begin`."""
        with self._pool.lock:
            self._poll_s = min(self._poll_s, poll_interval_s(len(self._held)))
            self._held[call] = None
            starts, self._polling = not self._polling, True
        if starts:
            EXECUTOR.submit(self._wake, partial(_poll, weakref.ref(self), self._wake))

    def release(self, call: WaitingCall | _BlockedCall) -> None:
        """Remove a waiting call."""
        with self._pool.lock:
            self._held.pop(call, None)

    def wake(self) -> None:
        """Read the states now."""
        self._wake.set()

    def poll(self) -> float | None:
        """Read the states and let waiting calls pick again.

        Returns:
            The seconds until the next read; None if no call waits.
        """
        pool = self._pool
        with pool.lock:
            held, poll_s = tuple(self._held), None
            self._polling = not pool.closed and bool(held)
            if self._polling:
                poll_s = self._poll_s
                self._poll_s = min(1.5 * poll_s, MAX_POLL_S)
        if poll_s is not None:
            pool.refresh()
        for call in held:
            call.try_begin()
        return poll_s


def _poll(calls: weakref.ref[_WaitingCalls], wake: threading.Event) -> None:
    """Poll on a worker, without a reference to the channel between the reads."""
    while True:
        wake.clear()
        alive = calls()
        try:
            poll_s = None if alive is None else alive.poll()
        except BaseException:  # such as `SystemExit` of the user's code; the executor reports it
            EXECUTOR.submit(wake, partial(_poll, calls, wake))
            raise
        del alive
        if poll_s is None:
            return
        wake.wait(poll_s)


# --- Calls ---


class WaitingCall(DeferredCall):
    """A call that begins its only attempt when a subchannel is READY."""

    def __init__(
        self,
        method: _BalancedMethod,
        name: str,
        request: Any,
        timeout: float | None,
        options: tuple[Any, ...],
    ) -> None:
        metadata, credentials, wait_for_ready, compression = options
        metadata = None if metadata is None else metadata_tuple(metadata)
        pool = method.pool
        details = Details(method.name, timeout, metadata, credentials, False, compression)
        super().__init__(pool.state, method.kind, details, request)
        self._method = method
        self._name = name
        self._options = metadata, credentials, False, compression
        message = method.message(self.request)
        self._pending = pool.rules.begin(
            method.name, message, metadata, timeout, wait_for_ready, time.monotonic(), TRIED.get()
        )
        self._looking = threading.Lock()
        self._begun = False
        pool.waiting.hold(self)

    def try_begin(self) -> None:
        """Begin the attempt if a subchannel is READY; end the call if it must not wait longer.

        Runs on a worker, in the context of the caller.
        """
        if self._looking.acquire(blocking=False):
            try:
                if self.final is None and not self._begun:
                    self._run(self._pick_and_begin)
            finally:
                self._looking.release()
        if self.final is not None or self._begun:
            self._method.pool.waiting.release(self)

    def _pick_and_begin(self) -> None:
        method, pending = self._method, self._pending
        while True:
            now_s = time.monotonic()
            outcome = method.pool.try_pick(pending, now_s)
            if not isinstance(outcome, Subchannel):
                break
            left_s = pending.timeout_left_s(now_s)
            attempt = method.begin_on(outcome, self._name, self.request, left_s, self._options)
            if attempt is not None:
                self._begun = True
                self.begin(attempt)
                return
        if outcome is not None:
            self._finish(FinishedError(outcome.code, outcome.details))

    def seconds_left(self) -> float | None:
        """Return the time until the deadline; None without one."""
        return self._pending.timeout_left_s(time.monotonic())


class _BalancedMethod:
    """A method of the channel; the base class of the four multicallables."""

    __slots__ = ("_arguments", "_methods", "name", "pool")

    kind: Kind

    def __init__(self, pool: _Pool, method: str, *args: Any, **options: Any) -> None:
        self.pool = pool
        self.name = method
        self._arguments = args, options
        self._methods: dict[Subchannel, tuple[ReconnectingChannel, Any]] = {}

    def on(self, subchannel: Subchannel) -> Any:
        """Return the multicallable of this method on the channel of a subchannel.

        Raises:
            ValueError: The subchannel was removed; has gRPC's text.
        """
        cached = self._methods.get(subchannel)
        if cached is not None and cached[0] is subchannel.connection:
            return cached[1]
        connection = self.pool.connections.connection_of(subchannel)
        args, options = self._arguments
        method = getattr(connection, self.kind.name.lower())(self.name, *args, **options)
        alive = {other: pair for other, pair in self._methods.copy().items() if not other.removed}
        self._methods = alive | {subchannel: (connection, method)}
        return method

    def message(self, request: Any) -> Any:
        """Return what a picker sees of the request: None if it is a stream."""
        return None if self.kind.streams_requests else request

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
        """Make a call on the caller's thread and return its response."""
        pool = self.pool
        metadata = reusable_metadata(metadata)  # a picker may read it too
        message, tried = None if self.kind.streams_requests else request, TRIED.get()
        if tried is None:
            subchannel = pool.pick(self.name, message, metadata)
        else:
            subchannel = pool.pick_other(tried, self.name, message, metadata)
        if subchannel is None:
            self._check(request, metadata, credentials, compression)
            pending = pool.rules.begin(
                self.name, message, metadata, timeout, wait_for_ready, time.monotonic(), tried
            )
            subchannel = pool.waiting.wait_for(pending, pool.try_pick)
            timeout = pending.timeout_left_s(time.monotonic())
        ready = False if wait_for_ready else wait_for_ready  # it must not wait for this server
        began_s, before = time.monotonic(), subchannel.connection
        try:
            method = getattr(self.on(subchannel), name)
            sent = subchannel.metadata_of(metadata)
            response = method(request, timeout, sent, credentials, ready, compression)
        except grpc.RpcError as error:
            code = _code_of(error)
            pool.checker.failed(subchannel, code)
            if code in NOT_EXECUTED_CODES:
                set_server_of(error, subchannel)
            raise
        except ValueError as error:
            if not _was_closed(subchannel, before, error):
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
        """Begin a call of `.future()`, or a response stream."""
        metadata, credentials, wait_for_ready, compression = options
        metadata = reusable_metadata(metadata)  # a picker may read it too
        ready = False if wait_for_ready else wait_for_ready  # it must not wait for one server
        call_options, tried = (metadata, credentials, ready, compression), TRIED.get()
        message = self.message(request)
        while True:
            subchannel = self.pool.pick_other(tried, self.name, message, metadata)
            if subchannel is None:
                break
            call = self.begin_on(subchannel, name, request, timeout, call_options)
            if call is not None:
                return call
        if self.pool.closed:
            raise ValueError(CLOSED)
        self._check(request, metadata, credentials, compression)
        waiting = WaitingCall(self, name, request, timeout, (metadata, *options[1:]))
        return waiting.make_retrying_call()

    def _check(self, request: Any, metadata: Any, credentials: object, compression: object) -> None:
        """Check the arguments of a call that waits, as gRPC does when it begins the call.

        Raises:
            TypeError, ValueError: An argument has a wrong type.
            FinishedError: The serializer has raised.
        """
        check_call_options(metadata, credentials, compression)
        if self.kind.streams_requests:
            return
        args, options = self._arguments
        serializer = args[0] if args else options.get("request_serializer")
        error = check_request(request, serializer)
        if error is not None:
            raise FinishedError(grpc.StatusCode.INTERNAL, NOT_SERIALIZED) from error

    def begin_on(
        self,
        subchannel: Subchannel,
        name: str,
        request: Any,
        timeout: float | None,
        options: tuple[Any, ...],
    ) -> Any:
        """Begin a call on a subchannel; None if the subchannel was removed or closed meanwhile."""
        before, sent = subchannel.connection, subchannel.metadata_of(options[0])
        try:
            call = getattr(self.on(subchannel), name)(request, timeout, sent, *options[1:])
        except ValueError as error:
            if not _was_closed(subchannel, before, error):
                raise
            return None
        report_end(call, self.pool, subchannel)
        return call


def _was_closed(subchannel: Subchannel, before: Any, error: ValueError) -> bool:
    """Whether a call was refused because its subchannel was removed or its channel closed.

    gRPC has not begun the call then. `before` is the connection of the subchannel, read before the
    multicallable.
    """
    if not was_not_invoked(error):
        return False
    connection = subchannel.connection
    replaced = connection is not before or connection is None or not connection.accepts_calls
    return subchannel.removed or replaced


def report_end(call: Any, pool: _Pool, subchannel: Subchannel) -> None:
    """Report the end of a call to the pool, without keeping the call alive."""
    try:
        alive = weakref.ref(call)
    except TypeError:  # of an interceptor
        return

    def ended() -> None:
        """Runs on gRPC's thread, or on the thread that ends the call."""
        over = alive()
        code = "" if over is None else _code_of(over)
        if code == "OK":
            subchannel.succeeded()
        elif code:
            EXECUTOR.submit(pool, partial(pool.checker.failed, subchannel, code))

    if hasattr(call, "add_callback"):
        set_server_of(call, subchannel)  # now: a caller may see the end of the call before `ended`
        run_at_end(call, ended)


def _code_of(call: Any) -> str:
    """Return the name of the status code of a call; "" if it has none."""
    return getattr(value_of(call, "code"), "name", "")


def _no_queue(*_: object) -> Any:
    raise AssertionError("there is no failback policy")


def _nothing() -> None:
    """There are no subscribers."""


_MULTICALLABLES: Final = classes_by_kind(_BalancedMethod, multicallable.MULTICALLABLES)


# --- The channel ---


class BalancedChannel(BalancedChannelBase[Subchannel], multicallable.Channel):
    """A channel that distributes its calls over the servers of a service.

    Thread-safe. Like any channel of gRPC, it may fail in a forked child process.
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
        balancer_policy: BalancerPolicy | None = None,
        timer: Timer | None = None,
    ) -> None:
        """Make the channel. Its subchannels connect at the first call.

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
            connect: Makes the channels of subchannels: `connect(instance, options)` returns a new
                `grpc.Channel`. It runs on the thread of a call, or on one that reconnects. If it
                raises, the server counts as unreachable. Instances of both protocols are used.
            on_subchannel: Called with each subchannel when its channel is made, on that thread.
            on_removed: Called with each subchannel whose instance was removed, if its channel was
                made.
            balancer_policy: The settings; None for the defaults.
            timer: For health checks and drain timeouts; None for `shared_timer()`.

        Raises:
            TypeError, ConfigurationError: An argument is invalid.
        """
        self._pool = _Pool(
            name,
            lb_policy,
            balancer_policy,
            timer=timer,
            connect=connect,
            options=options,
            own={"credentials": credentials, "compression": compression},
            on_subchannel=on_subchannel,
            on_removed=on_removed,
        )
        self._subscriptions = BalancerSubscriptions(name, self.get_state, timer)
        self._pool.on_change = self._subscriptions.read_soon
        if instances is not None:
            self.update(instances)

    # --- A channel of gRPC ---

    def _multicallable(self, kind: Kind, method: str, *args: Any, **options: Any) -> Any:
        return _MULTICALLABLES[kind](self._pool, method, *args, **options)

    def subscribe(
        self,
        callback: Callable[[grpc.ChannelConnectivity], None],
        try_to_connect: bool | None = False,
    ) -> None:
        """Call `callback(state)` now and at each change; see `get_state`.

        Callbacks run on a worker, one at a time, within 0.2 s after a change. If one raises, the
        event `CallbackFailed` is emitted, and it is called again at the next change.

        Args:
            callback: Called with the state.
            try_to_connect: Whether to connect subchannels while none is READY.

        Raises:
            TypeError: `callback` is not callable.
        """
        self._subscriptions.add(callback, try_to_connect=bool(try_to_connect))

    def unsubscribe(self, callback: Callable[[grpc.ChannelConnectivity], None]) -> None:
        """Remove a callback. Ignores unknown callbacks."""
        self._subscriptions.remove(callback)

    def close(self) -> None:
        """End all calls and close all connections. Idempotent.

        Must not be called on the thread on which gRPC runs done-callbacks: like any channel of
        gRPC, it would wait for itself.
        """
        self._subscriptions.close()
        self._pool.close()
