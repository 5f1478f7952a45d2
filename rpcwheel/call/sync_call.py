"""Calls of `grpc` and their attempts, for the channels, the interceptors and failback.

A blocking call runs on its caller's thread, including all attempts and the waits between them
(`ClientCall.run`). For `.future()` and response streams there are two cases:

* If the method needs only a deadline, the caller gets gRPC's own call.
* Otherwise the caller gets a `RetryingCall`. `CallAttempts` makes its attempts one after the other;
  `HedgedAttempts` makes them at the same time.

Threads: gRPC's threads report the end of an attempt. They record a success and submit everything
else to a worker, because users' wait objects and predicates, and other interceptors, may block. The
timer's thread submits to a worker too.

`CallAttempts` has no reference to the `RetryingCall`. When the caller drops the `RetryingCall`, its
finalizer cancels the call, as with gRPC's own calls. Each call has one lock. No code of gRPC or of
users is called under it.
"""

from __future__ import annotations

import threading
import time
import weakref
from contextvars import copy_context
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Self

import grpc

from rpcwheel._concurrency.callbacks import run_callback
from rpcwheel._concurrency.executor import EXECUTOR
from rpcwheel._grpc.calls import (
    InternalCallback,
    copy_details,
    details_with_timeout,
    failure_of,
    has_ended,
    has_status,
    is_channel_closed_error,
    is_single_threaded,
    metadata_tuple,
    reusable_metadata,
    run_at_end,
)
from rpcwheel._grpc.finished import FinishedError, FinishedResponse, FinishedStream, refused_by
from rpcwheel.durations import NEVER, to_ns, to_seconds
from rpcwheel.errors import FailbackError
from rpcwheel.events import CallbackFailed, HedgeSent, RetryStopped, emit
from rpcwheel.rpc import TRIED, Kind, NextAttempt, Stop
from rpcwheel.telemetry.tracing import with_current_trace

from .config import (
    ANSWER_KEY,
    TIMER_CHECK_INTERVAL_S,
    copy_of,
    delivery_timeout,
    messages_of,
    queued_metadata,
    queued_request,
    response_source,
    seconds_left,
)
from .idempotency import with_key
from .keeper import KeptDelivery
from .policy import DefaultResponsePolicy
from .retry import TIMER_STOPPED, result_of, with_attempt
from .sync_requests import RequestStream

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from rpcwheel._grpc.calls import AnyCall, Details, Metadata
    from rpcwheel.timer import Timeout
    from rpcwheel.timer.api import Timer

    from .config import ClientState, MethodConfig
    from .failback_policy import FailbackPolicy
    from .hedging import HedgingPlan
    from .retry import RetryPlan

    Start = Callable[[Any, Any], AnyCall]

CANCELED_BY_CALLER: Final = "Locally cancelled by application!"
DROPPED_BY_CALLER: Final = "Cancelled upon garbage collection!"

READERS_TIMEOUT_S: Final = 0.5
"""How long to wait, after an attempt has failed, for threads that still read its last message."""

TRAILERS_TIMEOUT_S: Final = 0.02
"""How long to wait, after empty initial metadata, for a failure that may follow at once."""

CHANNEL_CLOSED: Final = Stop("its channel was closed")
NO_STATUS: Final = Stop("it failed without a status")


def with_readiness(details: Any, config: MethodConfig) -> Any:
    """Return call details with the `wait_for_ready` of the method, if the caller did not set it."""
    if config.wait_for_ready is None or getattr(details, "wait_for_ready", None) is not None:
        return details
    return copy_details(details)._replace(wait_for_ready=config.wait_for_ready)


def with_reusable_metadata(details: Any) -> Any:
    """Return call details whose metadata each attempt can read."""
    metadata = getattr(details, "metadata", None)
    reusable = reusable_metadata(metadata)
    return details if reusable is metadata else copy_details(details)._replace(metadata=reusable)


class WaitingCalls:
    """The calls of one channel that end with it. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: weakref.WeakSet[Any] = weakref.WeakSet()
        self._running: weakref.WeakSet[Any] = weakref.WeakSet()

    def add_running(self, call: AnyCall) -> None:
        """Add a call that `cancel_running` is to cancel. The reference to it is weak."""
        with self._lock:
            self._running.add(call)

    def cancel_running(self) -> None:
        """Cancel the calls of `add_running`."""
        with self._lock:
            calls = list(self._running)
        for call in calls:
            call.cancel()

    def add(self, call: _BackoffWait | _RetryingState) -> None:
        """Add a call that begins to wait. The reference to it is weak."""
        with self._lock:
            self._calls.add(call)

    def end_waiting(self) -> None:
        """Make the next attempts now. The channel is closed, so this ends the calls."""
        with self._lock:
            calls = list(self._calls)
        for call in calls:
            call.end_waiting()


class _BackoffWait:
    """The wait of a blocking call for its next attempt."""

    def __init__(self) -> None:
        self.over = threading.Event()

    def end_waiting(self, _: object = None) -> None:
        self.over.set()


class ClientCall:
    """One call of a client: makes its attempts and decides what follows them.

    Not thread-safe: used by one thread at a time.
    """

    __slots__ = (
        "_attempts",
        "_begun",
        "_details",
        "_plan",
        "_request",
        "_start",
        "config",
        "kind",
        "method",
        "requests",
        "start_delivery",
        "state",
        "waiting",
    )

    def __init__(
        self,
        state: ClientState,
        kind: Kind,
        start: Start,
        details: Any,
        request: Any,
        begun: tuple[MethodConfig, int, int, int] | None = None,
        waiting: WaitingCalls | None = None,
    ) -> None:
        """Begin a call, or continue with a call whose first attempt was made.

        Args:
            state: The state of the client.
            kind: The kind of call.
            start: Makes an attempt: `start(details, request)` returns a call.
            details: The call details of the caller or of an outer interceptor.
            request: The message, or the iterator of messages.
            begun: The configuration and the result of `ClientState.begin`, if the first attempt was
                made; None if not.
            waiting: The call adds itself here while it waits for its next attempt.
        """
        self.state = state
        self.kind = kind
        self.waiting = waiting
        self.method: str = details.method
        if begun is None:
            config, timeout = state.current_config(self.method), details.timeout
            own_ns = None if timeout is None else to_ns(timeout, subject="timeout")
            begun = (config, *state.begin(config, own_ns))
        self.config = begun[0]
        self._begun = begun[1:]
        self._plan: RetryPlan | None = None  # until the first attempt has failed
        self._start = start
        self.start_delivery = start
        """Makes an attempt in the background, after failback has queued the call."""
        details = with_readiness(with_reusable_metadata(details), self.config)
        if self.config.durable:
            details = copy_details(details)._replace(metadata=with_key(details.metadata))
        self._details = details
        self._request = request
        self._attempts = 1
        self.requests: RequestStream | None = None
        if kind.streams_requests and (limit := self.config.buffer_bytes) is not None:
            self.requests = RequestStream(request, limit)

    @property
    def is_late(self) -> bool:
        """Whether the deadline had passed before the call began, so that no attempt is made."""
        now_ns, deadline_ns, _ = self._begun
        return now_ns >= deadline_ns

    def seconds_left(self) -> float | None:
        """Return the time until the deadline; None without a deadline."""
        return seconds_left(self._begun[1], self.state.now_ns())

    # --- Attempts ---

    def first_attempt(self) -> AnyCall:
        """Make the first attempt."""
        now_ns, _, attempt_ns = self._begun
        details = details_with_timeout(self._details, seconds_left(attempt_ns, now_ns))
        return self._start(details, self._next_request())

    def keep_request(self) -> None:
        """Copy the request, because the caller may change it before the next attempt."""
        config = self.config
        if self.requests is None and (config.keeps_requests or config.hedging is not None):
            self._request = copy_of(self._request)

    def next_attempt(self, attempt: NextAttempt) -> AnyCall:
        """Make another attempt."""
        self._attempts = attempt.number
        if self.state.refuse is not None:
            return _channel_closed()
        left_s = seconds_left(attempt.deadline_ns, self.state.now_ns())
        details = details_with_timeout(self._details, left_s)
        details = details._replace(metadata=with_attempt(details.metadata, attempt.number))
        try:
            return self._start(details, self._next_request())
        except ValueError as error:
            if is_channel_closed_error(error):
                return _channel_closed()
            raise

    def _next_request(self) -> Any:
        return self._request if self.requests is None else self.requests.for_attempt()

    @property
    def hedged(self) -> bool:
        """Whether several attempts may run at the same time."""
        return self.config.hedging is not None and self.kind is Kind.UNARY_UNARY

    def hedging_plan(self) -> HedgingPlan | None:
        """Return the plan of the attempts after the first one; None if the call is not hedged."""
        if not self.hedged:
            return None
        return self.state.hedging_plan(self.config, *self._begun[:2])

    def next_step(self, error: BaseException, *, received: bool = False) -> NextAttempt | Stop:
        """Decide what follows a failed attempt. Runs users' wait objects."""
        if is_channel_closed_error(error) or self.state.refuse is not None:
            return CHANNEL_CLOSED
        if not has_status(error):
            return NO_STATUS
        if self._plan is None:
            self._plan = self.state.retry_plan(self.config, *self._begun[:2])
        committed = received or (self.requests is not None and not self.requests.replayable)
        result = result_of(error, committed=committed)
        return self.state.next_step(self.method, self.config, self._plan, result, self._attempts)

    def abandon_retry(self, error: BaseException) -> Stop:
        """Emit that a planned retry is not made because the timer was stopped or is full."""
        code = result_of(error).code
        emit(RetryStopped(self.method, self._attempts, code, TIMER_STOPPED.reason))
        return TIMER_STOPPED

    # --- The end ---

    def end(self, call: AnyCall, error: BaseException, *, received: bool = False) -> AnyCall:
        """Return the call for the caller after a failure that is not retried.

        Runs users' predicates.

        Args:
            call: The failed attempt.
            error: How it failed.
            received: Whether the caller has received messages of it.

        Raises:
            FailbackFull, FailbackClosed: The call can't be queued. The exception is also a
                `grpc.RpcError`; its cause is `error`.
        """
        if is_channel_closed_error(error):  # the error of a blocking retry has no status
            return call if has_status(error) or self._attempts == 1 else _channel_closed()
        if not has_status(error):
            return call
        policy = self.state.final_policy(
            self.method,
            self.config,
            error,
            attempts=self._attempts,
            started_ns=self._begun[0],
            received=received,
        )
        if policy is None:
            return call
        outcome = None
        if not isinstance(policy, DefaultResponsePolicy):
            outcome = self._enqueue(policy, error)
            if outcome is None:
                return call
        return self._default_response(policy, error, outcome)

    def end_late(self) -> AnyCall:
        """Return the call for the caller if the deadline had passed before the call began."""
        self._attempts = 0
        error = FinishedError(
            grpc.StatusCode.DEADLINE_EXCEEDED,
            "Deadline Exceeded before the call began: its deadline has passed",
        )
        try:
            return self.end(error, error)
        except FailbackError as refusal:
            return refusal  # it is a call too
        finally:
            self.close()

    def close(self) -> None:
        """Release the request stream. Idempotent; any thread."""
        if self.requests is not None:
            self.requests.close()

    def _default_response(
        self, policy: FailbackPolicy | DefaultResponsePolicy, error: Any, outcome: str | None
    ) -> FinishedResponse:
        source, details = response_source(outcome, error.code().name, error.details())
        streams = self.kind.streams_responses
        return (FinishedStream if streams else FinishedResponse)(
            messages_of(policy.default) if streams else policy.default,
            details,
            initial=metadata_tuple(error.initial_metadata()),
            trailing=(*metadata_tuple(error.trailing_metadata()), (ANSWER_KEY, source)),
        )

    def _enqueue(self, policy: FailbackPolicy, error: BaseException) -> str | None:
        """Queue the call for delivery in the background; see `Queue.enqueue`."""
        if self.requests is None:
            messages: list[Any] | None = [queued_request(self._request)]
        elif self.requests.is_buffered or self.state.is_queued(self.method, self.config, error):
            messages = self.requests.read_rest(self.method, self.seconds_left())
        else:
            return None
        if messages is None:
            error.add_note(f"{self.method}: not queued by failback, as not all requests are known")
            return None
        original = copy_details(self._details)
        details = original._replace(
            timeout=delivery_timeout(original.timeout, self.config),
            metadata=queued_metadata(original.metadata, policy),
        )
        try:
            if self.config.durable:
                stored = details._replace(metadata=original.metadata)
                failed = self.state.failed_rpc(policy, self.kind, stored, messages)
                queue = self.state.queue_of(policy, self.config.queue)
                outcome: str | None = queue.enqueue_rpc(error, failed)
                return outcome
            delivery = Delivery(
                self.method, self.kind, self.start_delivery, details, self._attempts, self.state.key
            )
            return self.state.enqueue(policy, self.config, error, delivery, *messages)
        except FailbackError as refusal:
            raise refused_by(refusal, error) from error
        except Exception as raised:  # noqa: BLE001 - a user's predicate, wait object or request
            emit(CallbackFailed(self.method, "failback", raised))
            error.add_note(f"{self.method}: not queued by failback: {raised}")
            return None

    # --- On the caller's thread ---

    def run(self, call: AnyCall = None) -> AnyCall:
        """Run the call to its end on this thread; `call` is the first attempt, if it was made."""
        if self.is_late:
            return self.end_late()
        watch = self.state.watch_slow_call(self.method, self.config)
        try:
            return self.resume(self.first_attempt() if call is None else call)
        finally:
            if watch is not None:
                watch.cancel()
            self.close()

    def resume(self, call: AnyCall) -> AnyCall:
        """Wait for the end of an attempt and make the attempts that follow it."""
        while (error := failure_of(call)) is not None:
            step = self.next_step(error)
            if isinstance(step, NextAttempt) and not self._wait_until_due(step):
                step = self.abandon_retry(error)
            if isinstance(step, Stop):
                return self.end(call, error)
            call = self.next_attempt(step)
        return call

    def _wait_until_due(self, attempt: NextAttempt) -> bool:
        """Wait on this thread; False if the timer takes no timeout.

        Does not wait past the deadline, even if a task blocks the timer's thread.
        """
        state = self.state
        delay_s = (attempt.at_ns - state.now_ns()) / 1e9
        if delay_s <= 0:
            return True
        pause = _BackoffWait()
        if self.waiting is not None:
            self.waiting.add(pause)
        timeout = state.schedule(pause.end_waiting, delay_s, f"retry of {self.method}")
        if timeout is None:
            return False
        try:
            while not pause.over.wait(
                min(TIMER_CHECK_INTERVAL_S, (attempt.deadline_ns - state.now_ns()) / 1e9)
            ):
                if state.timer.stopped:
                    return False
                if state.now_ns() >= attempt.at_ns:
                    break
            return True
        finally:
            timeout.cancel()


class Delivery(KeptDelivery):
    """Makes a queued call again. Failback calls it with the requests."""

    __slots__ = ("_details", "_kind", "_number", "_start")

    def __init__(
        self,
        method: str,
        kind: Kind,
        start: Start,
        details: Details,
        attempts: int,
        channel: object = None,
    ) -> None:
        """Keep what is needed to make the call.

        Args:
            method: The full name of the method.
            kind: The kind of call.
            start: Makes an attempt: `start(details, request)` returns a call.
            details: The call details of each attempt.
            attempts: The number of attempts so far.
            channel: The same for all calls of a channel, whose deliveries are paced together.
        """
        super().__init__(method, channel, details.timeout)
        self._kind = kind
        self._start = start
        self._details = details
        self._number = attempts

    def __call__(self, *requests: Any) -> Any:
        """Return the call, for whose end failback waits. Reads a response stream to its end."""
        self._number += 1
        metadata = with_current_trace(with_attempt(self._details.metadata, self._number))
        request = iter(requests) if self._kind.streams_requests else requests[0]
        call = self._start(self._details._replace(metadata=metadata), request)
        if not self._kind.streams_responses:
            return call
        for _ in call:
            pass
        return None


def _channel_closed() -> FinishedError:
    """The end of a call whose channel was closed between two attempts, as in grpc."""
    return FinishedError(grpc.StatusCode.CANCELLED, "Channel closed!")


# --- Calls of `.future()` and response streams ---


def begin_unary(call: ClientCall, *, may_block: bool = False) -> AnyCall:
    """Begin a call of `.future()` with one response.

    Args:
        call: The call.
        may_block: Whether the first attempt may block until its end; see `is_blocking_unary`.
    """
    if not (call.config.handles_failures or call.hedged):
        return _begin_plain(call)
    return _begin(call, RetryingCall, may_block=may_block)


def begin_stream(call: ClientCall) -> AnyCall:
    """Begin a call with a response stream."""
    if call.config.handles_failures or call.config.has_message_timeout:
        return _begin(call, RetryingStream, may_block=False)
    return _begin_plain(call)


def _begin(call: ClientCall, kind: type[RetryingCall], *, may_block: bool) -> AnyCall:
    if call.is_late:
        return call.end_late()
    if call.hedged:
        return copy_context().run(_begin_hedged, call, kind, may_block=may_block)
    return _begin_attempts(call, kind, may_block=may_block)


def _begin_hedged(call: ClientCall, kind: type[RetryingCall], *, may_block: bool) -> AnyCall:
    """Begin in a new context, which all attempts share, so that each goes to another server."""
    TRIED.set([])
    return _begin_attempts(call, kind, may_block=may_block)


def _begin_attempts(call: ClientCall, kind: type[RetryingCall], *, may_block: bool) -> AnyCall:
    try:
        attempt = call.first_attempt()
    except BaseException:
        call.close()
        raise
    if not hasattr(attempt, "add_done_callback"):  # a generator of an inner interceptor
        call.state.report_plain_iterator(call.method)
        return attempt
    if may_block and has_ended(attempt):  # it has blocked in an inner interceptor
        return call.run(attempt)
    call.keep_request()
    hedging = call.hedging_plan()
    attempts = CallAttempts(call) if hedging is None else HedgedAttempts(call, hedging)
    retrying = kind(attempts)
    attempts.start(attempt)
    return retrying


def _begin_plain(call: ClientCall) -> AnyCall:
    """Begin a call that is gRPC's own; emits `CallSlow` if it is slow."""
    if call.is_late:
        return call.end_late()
    watch = call.state.watch_slow_call(call.method, call.config)
    if watch is None:
        return call.first_attempt()
    try:
        attempt = call.first_attempt()
    except BaseException:
        watch.cancel()
        raise
    run_at_end(attempt, watch.cancel)
    return attempt


class RetryingCall(grpc.Call, grpc.Future):
    """A call that may need several attempts. It is canceled when its caller drops it.

    Its methods block where those of gRPC's own calls do.
    """

    def __init__(self, attempts: _RetryingState) -> None:
        self._attempts = attempts

    @property
    def _state(self) -> _RetryingState:
        """Has the status after the end, without keeping the call alive, as in gRPC's calls."""
        return self._attempts

    # --- grpc.Call ---

    def initial_metadata(self) -> Metadata:
        """Wait for the initial metadata."""
        return self._attempts.initial_metadata()

    def trailing_metadata(self) -> Metadata:
        """Wait for the end and return the trailing metadata."""
        metadata: Metadata = self._attempts.wait().trailing_metadata()
        return metadata

    def code(self) -> grpc.StatusCode:
        """Wait for the end and return the status code."""
        code: grpc.StatusCode = self._attempts.wait().code()
        return code

    def details(self) -> str:
        """Wait for the end and return the status details."""
        details: str = self._attempts.wait().details()
        return details

    def debug_error_string(self) -> str:
        """Wait for the end and return the description of gRPC's core; "" if there is none."""
        describe = getattr(self._attempts.wait(), "debug_error_string", None)
        return "" if describe is None else describe()

    def is_active(self) -> bool:
        return not self.done()

    def time_remaining(self) -> float | None:
        """Return the seconds until the deadline of all attempts; None without a deadline."""
        return self._attempts.seconds_left()

    def add_callback(self, callback: Callable[[], object]) -> bool:
        """Call `callback()` on a worker thread at the end; False if the call has ended."""
        return self._attempts.add_callback(callback)

    # --- grpc.Future ---

    def cancel(self) -> bool:
        """Cancel the call, during an attempt or between two; False if the call has ended."""
        return self._attempts.cancel()

    def cancelled(self) -> bool:
        final = self._attempts.final
        return final is not None and bool(final.cancelled())

    def running(self) -> bool:
        return not self.done()

    def done(self) -> bool:
        self._attempts.check_timer()
        return self._attempts.final is not None

    def result(self, timeout: float | None = None) -> Any:
        """Wait for the end and return the response.

        Raises:
            grpc.FutureTimeoutError: The call has not ended within `timeout` seconds; it continues.
            grpc.FutureCancelledError: The client canceled the call.
            grpc.RpcError: The call failed.
        """
        return self._attempts.wait(timeout).result()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the end and return the failure, None if the call succeeded."""
        error: BaseException | None = self._attempts.wait(timeout).exception()
        return error

    def traceback(self, timeout: float | None = None) -> TracebackType | None:
        """Wait for the end and return the traceback of the failure."""
        traceback: TracebackType | None = self._attempts.wait(timeout).traceback()
        return traceback

    def add_done_callback(self, fn: Callable[[Self], object]) -> None:
        """Call `fn(self)` on a worker thread at the end; now, on this thread, if it has ended."""
        if not self._attempts.add_callback(fn, self):
            fn(self)

    def __del__(self) -> None:
        attempts = getattr(self, "_attempts", None)
        if attempts is not None:
            attempts.drop()

    def __repr__(self) -> str:
        final = self._attempts.final
        return f"<{type(self).__name__} object>" if final is None else repr(final)


class RetryingStream(RetryingCall):
    """A response stream that may need several attempts."""

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        """Wait for the next message."""
        return self._attempts.next_message()

    next = __next__


Callback = tuple["Callable[..., object]", tuple[object, ...]]


def run_callbacks(method: str, callbacks: list[Callback]) -> None:
    """Call the done-callbacks of a call that has ended.

    Those of rpcwheel run on this thread. Those of users run on a worker, in their order; one that
    blocks delays only those of calls of the same method.
    """
    users = []
    for callback, args in callbacks:
        if isinstance(callback, InternalCallback):
            callback(*args)
        else:
            users.append((callback, args))
    if users:
        EXECUTOR.submit(("callbacks", method), partial(_run_user_callbacks, method, users))


def _run_user_callbacks(method: str, callbacks: list[Callback]) -> None:
    for callback, args in callbacks:
        run_callback(method, callback, *args, name="done callback", catch=BaseException)


class _RetryingState:
    """The state that retried and hedged calls have in common: their end."""

    def __init__(self, call: ClientCall) -> None:
        self.call = call
        self._context = copy_context()  # of the caller, for other interceptors
        self._changed = threading.Condition()
        self.final: AnyCall = None
        self._ending = False  # the last attempt has failed; the call can't be canceled
        self._callbacks: list[Callback] = []
        self._timeout: Timeout | None = None
        self._watch: Timeout | None = None

    def wait(self, timeout: float | None = None) -> AnyCall:
        """Wait for the end and return the call that has the caller's result.

        Raises:
            grpc.FutureTimeoutError: The call has not ended within `timeout` seconds.
        """
        with self._changed:
            if not self._wait_for(lambda: self.final is not None, timeout):
                raise grpc.FutureTimeoutError
        return self.final

    def _wait_for(self, happened: Callable[[], bool], limit_s: float | None = None) -> bool:
        """Wait under the lock until `happened()`; False after `limit_s` seconds."""
        until = None if limit_s is None else time.monotonic() + limit_s
        while True:
            left_s = TIMER_CHECK_INTERVAL_S
            if until is not None:
                left_s = min(left_s, until - time.monotonic())
            if self._changed.wait_for(happened, max(0, left_s)):
                return True
            if left_s < TIMER_CHECK_INTERVAL_S:
                return False
            self.check_timer()

    def check_timer(self) -> None:
        """Continue without the timer if it is late or was stopped."""

    def end_waiting(self) -> None:
        """Stop waiting for the next attempt, because the channel is closed."""
        raise NotImplementedError

    def code(self) -> grpc.StatusCode | None:
        """Return the status code; None before the end."""
        return None if self.final is None else self.final.code()

    def seconds_left(self) -> float | None:
        """Return the seconds until the deadline; None without a deadline."""
        return self.call.seconds_left()

    def add_callback(self, callback: Callable[..., object], *args: object) -> bool:
        """Call a function at the end, see `run_callbacks`; False if the call has ended."""
        with self._changed:
            if self.final is None:
                self._callbacks.append((callback, args))
                return True
        return False

    def cancel(self, details: str = CANCELED_BY_CALLER) -> bool:
        """Cancel the call; False if it has ended, or its last attempt has failed."""
        raise NotImplementedError

    def drop(self) -> None:
        """Cancel the call because its caller has dropped it."""
        if self.final is None:
            self.cancel(DROPPED_BY_CALLER)

    def initial_metadata(self) -> Metadata:
        """Wait for the server's initial metadata."""
        raise NotImplementedError

    def next_message(self) -> Any:
        """Return the next message of a response stream."""
        raise NotImplementedError

    def _end(self, call: AnyCall, failure: BaseException, *, received: bool = False) -> None:
        """End the call after its last attempt has failed. On a worker."""
        with self._changed:
            if self.final is not None:
                return
            self._ending = True
        try:
            call = self.call.end(call, failure, received=received)
        except FailbackError as refusal:
            call = refusal  # it is a call too
        self._finish(call)

    def _finish(self, final: AnyCall) -> bool:
        """End the call with the result of `final`; False if it has ended already."""
        with self._changed:
            if self.final is not None:
                return False
            self.final = final
            callbacks, self._callbacks = self._callbacks, []
            timeouts = (self._watch, self._timeout)
            self._changed.notify_all()
        for timeout in timeouts:
            if timeout is not None:
                timeout.cancel()
        self.call.close()
        run_callbacks(self.call.method, callbacks)
        return True

    def _run_on_worker(self, job: Callable[[], object]) -> None:
        EXECUTOR.submit(("calls", self.call.method), partial(self._run, job))

    def _run(self, job: Callable[[], object]) -> None:
        try:
            self._context.copy().run(job)
        except BaseException as error:  # noqa: BLE001 - for the caller
            self._finish(_raised(error))


class CallAttempts(_RetryingState):
    """The attempts of one call, one after the other."""

    def __init__(self, call: ClientCall) -> None:
        super().__init__(call)
        self._attempt: Any = None  # the running attempt, or the last one
        self._deciding = False  # the attempt has failed; the decision about a retry is pending
        self._received = False  # the caller has received a message or metadata of the attempt
        self._readers = 0  # threads that wait for a message of the attempt
        self._stalled: Any = None  # an attempt that was canceled by message_timeout
        self._reading: object = None  # the read that waits for a message
        self._backoff: tuple[Timer, NextAttempt, Callable[[], object]] | None = None
        """Set during the wait for a retry: the timer, the retry, and the end if the timer stops."""

    # --- Attempts ---

    def start(self, attempt: AnyCall) -> None:
        """Follow the first attempt."""
        self._watch = self.call.state.watch_slow_call(self.call.method, self.call.config)
        self._follow(attempt)

    def _follow(self, attempt: AnyCall) -> None:
        with self._changed:
            self._attempt = attempt
            self._readers = 0
            self._deciding = False
            over = self.final is not None
            self._changed.notify_all()
        if over:
            attempt.cancel()  # the call was canceled while this attempt was made
        attempt.add_done_callback(InternalCallback(self._on_done, attempt))

    # The second argument is the call that gRPC passes: the inner one, if `attempt` is a wrapper.
    def _on_done(self, attempt: AnyCall, _: object) -> None:
        """Record the end of an attempt. On gRPC's thread, or on the thread that canceled it."""
        try:
            failure = failure_of(attempt)
        except BaseException as error:  # noqa: BLE001 - of an inner interceptor
            failure = error
        self._attempt_ended(attempt, failure)

    def _attempt_ended(self, attempt: AnyCall, failure: BaseException | None) -> None:
        with self._changed:
            if self.final is not None or self._attempt is not attempt or self._deciding:
                return
            self._deciding = failure is not None
        if failure is None:
            self._finish(attempt)
        else:
            self._run_on_worker(partial(self._decide, attempt, failure))

    def _decide(self, attempt: AnyCall, failure: BaseException) -> None:
        if self._stalled is attempt:
            attempt = failure = self._stalled_error(attempt)
        received = self._has_received()
        step: NextAttempt | Stop | None = None
        if has_status(failure):
            step = self.call.next_step(failure, received=received)
        if isinstance(step, NextAttempt):
            end = partial(self._end_unretried, attempt, failure, received=received)
            with self._changed:
                self._attempt = None
                self._changed.notify_all()
            if not self._wait_until_due(step, end):
                end()
            return
        self._end(attempt, failure, received=received)

    def _end_unretried(self, attempt: AnyCall, failure: BaseException, *, received: bool) -> None:
        """End the call without the planned retry: its timer was stopped or is full."""
        self.call.abandon_retry(failure)
        self._end(attempt, failure, received=received)

    def _has_received(self) -> bool:
        """Whether the caller has received, or is receiving, something of the failed attempt.

        A thread of the caller may have read a message that arrived before the failure without
        having recorded it. No other thread begins to read now, and the readers need not wait for
        the server, so they finish soon. A reader that does not finish reads a call of another
        interceptor; its message is dropped.
        """
        with self._changed:
            self._changed.wait_for(lambda: not self._readers, READERS_TIMEOUT_S)
            return self._received

    def _wait_until_due(self, step: NextAttempt, end: Callable[[], object]) -> bool:
        """Make an attempt when it is due, or call `end` if the timer was stopped.

        False if the timer takes no timeout.
        """
        state = self.call.state
        timer = state.timer
        delay_s = (step.at_ns - state.now_ns()) / 1e9
        if delay_s <= 0:
            self._make(step)
            return True
        self._backoff = (timer, step, end)
        if self.call.waiting is not None:
            self.call.waiting.add(self)
        timeout = state.schedule(partial(self._due, step), delay_s, f"retry of {self.call.method}")
        if timeout is None:
            with self._changed:
                waited, self._backoff = self._backoff is not None, None
            return not waited  # False: `check_timer` has ended the wait meanwhile
        with self._changed:
            self._timeout = timeout
            over = self.final is not None
        if over:
            timeout.cancel()
        return True

    def _due(self, step: NextAttempt, _: Timeout) -> None:
        with self._changed:
            backoff = self._backoff
            if backoff is None or backoff[1] is not step:  # the timer was late
                return
            self._backoff = None
        self._run_on_worker(partial(self._make, step))

    def check_timer(self) -> None:
        """Make the retry if the timer is late with it; end the call if the timer was stopped."""
        backoff = self._backoff
        if backoff is None:
            return
        timer, step, job = backoff
        if not timer.stopped:
            if self.call.state.now_ns() < step.at_ns:
                return
            job = partial(self._make, step)
        with self._changed:
            waited, self._backoff = self._backoff is backoff, None
        if waited:
            self._run_on_worker(job)

    def end_waiting(self) -> None:
        """Make the attempt that the call waits for now; its channel is closed."""
        with self._changed:
            backoff, self._backoff = self._backoff, None
        if backoff is not None:
            self._run_on_worker(partial(self._make, backoff[1]))

    def _make(self, step: NextAttempt) -> None:
        if self.final is None:
            self._follow(self.call.next_attempt(step))

    # --- The end ---

    def _finish(self, final: AnyCall) -> bool:
        self._backoff = None
        return super()._finish(final)

    def cancel(self, details: str = CANCELED_BY_CALLER) -> bool:
        """Cancel the call; False if it has ended, or its last attempt has failed."""
        with self._changed:
            if self.final is not None or self._ending:
                return False
            attempt = None if self._deciding else self._attempt
        if attempt is not None:
            if attempt.cancel():
                # gRPC's thread may have ended this call with the canceled attempt meanwhile.
                return self._finish(attempt) or self.final is attempt
            if has_ended(attempt) and failure_of(attempt) is None:
                return False
        finished = self._finish(FinishedError(grpc.StatusCode.CANCELLED, details, cancelled=True))
        with self._changed:
            attempt = self._attempt  # a worker may have begun it meanwhile
        if finished and attempt is not None:
            attempt.cancel()
        return finished

    def wait(self, timeout: float | None = None) -> AnyCall:
        """Wait for the end. Refused for a single-threaded stream, which must be read to its end."""
        if self.final is None and is_single_threaded(self._attempt):
            raise grpc.experimental.UsageError(
                "a single-threaded stream has no end before it was read to its end"
            )
        return super().wait(timeout)

    # --- Before the end ---

    def initial_metadata(self) -> Metadata:
        """Wait for the initial metadata. If it is not empty, no retry follows."""
        while True:
            attempt = self._current()
            if attempt is self.final:
                return metadata_tuple(attempt.initial_metadata())
            metadata = metadata_tuple(attempt.initial_metadata())
            with self._changed:
                if not metadata:  # a failure without metadata looks the same until its status
                    self._changed.wait_for(partial(self._is_closed, attempt), TRAILERS_TIMEOUT_S)
                if self._is_open(attempt):
                    self._received = self._received or metadata != ()
                    return metadata

    def next_message(self) -> Any:
        """Wait for the next message of the current attempt, or of the one that follows it."""
        while True:
            attempt = self._current(reads=True)
            if attempt is self.final:
                return next(attempt)
            try:
                message, is_current = self._read(attempt)
            except (StopIteration, grpc.RpcError) as end:
                if not has_ended(attempt):  # of another interceptor, without `done()`
                    self._attempt_ended(attempt, None if isinstance(end, StopIteration) else end)
                with self._changed:
                    self._wait_for(partial(self._is_settled, attempt))
                if self.final is attempt:
                    raise
            else:
                if is_current:
                    return message

    def _current(self, *, reads: bool = False) -> AnyCall:
        """Wait for a running attempt or the end; `reads` counts this thread as a reader."""
        with self._changed:
            self._wait_for(lambda: self.final is not None or self._is_open(self._attempt))
            if self.final is not None:
                return self.final
            self._readers += reads
            return self._attempt

    def _is_open(self, attempt: AnyCall) -> bool:
        """Whether this attempt runs and has not failed, as far as is known."""
        return attempt is not None and self._attempt is attempt and not self._deciding

    def _is_closed(self, attempt: AnyCall) -> bool:
        return not self._is_open(attempt)

    def _is_settled(self, attempt: AnyCall) -> bool:
        return self.final is not None or self._attempt is not attempt

    def _read(self, attempt: AnyCall) -> tuple[Any, bool]:
        """Read the next message of an attempt. Returns it and whether the attempt is current."""
        arrived = False
        try:
            message = self._next_in_time(attempt)
            arrived = True
        finally:
            is_current = self._record_read(attempt, arrived=arrived)
        return message, is_current

    def _record_read(self, attempt: AnyCall, *, arrived: bool) -> bool:
        """Record the end of a read. After a message for the caller, no retry follows."""
        with self._changed:
            if self._attempt is not attempt:
                return False
            self._readers -= 1
            is_current = self.final in (None, attempt)
            self._received = self._received or (arrived and is_current)
            if self._deciding:
                self._changed.notify_all()  # `_has_received` waits for the readers
            return is_current

    # --- message_timeout ---

    def _next_in_time(self, attempt: AnyCall) -> Any:
        call = self.call
        if not call.config.has_message_timeout:
            return next(attempt)
        reading = self._reading = object()
        timeout = call.state.schedule(
            lambda _: self._run_on_worker(partial(self._stall, attempt, reading)),
            to_seconds(call.config.message_timeout_ns),
            f"message_timeout of {call.method}",
        )
        try:
            return next(attempt)
        finally:
            self._reading = None
            if timeout is not None:
                timeout.cancel()

    def _stall(self, attempt: AnyCall, reading: object) -> None:
        """Cancel an attempt whose reader has waited longer than message_timeout."""
        with self._changed:
            over = self.final is not None
            if self._reading is not reading or not self._is_open(attempt) or over:
                return
            self._stalled = attempt
        if not attempt.cancel():
            self._stalled = None  # the attempt has just ended

    def _stalled_error(self, attempt: AnyCall) -> FinishedError:
        call = self.call
        return FinishedError(
            grpc.StatusCode.DEADLINE_EXCEEDED,
            call.state.report_stall(call.method, call.config),
            initial=metadata_tuple(attempt.initial_metadata()),
        )


class HedgedAttempts(_RetryingState):
    """The attempts of one hedged unary call, several at the same time (gRFC A6)."""

    def __init__(self, call: ClientCall, plan: HedgingPlan) -> None:
        super().__init__(call)
        self._plan = plan  # under the lock
        self._running: list[AnyCall] = []
        self._failed: tuple[AnyCall, BaseException] | None = None  # the attempt that failed last

    def start(self, attempt: AnyCall) -> None:
        """Follow the first attempt."""
        self._watch = self.call.state.watch_slow_call(self.call.method, self.call.config)
        if self.call.waiting is not None:
            self.call.waiting.add(self)
        self._follow(attempt)
        self._go_on()

    def _follow(self, attempt: AnyCall) -> None:
        with self._changed:
            over = self.final is not None or self._ending
            if not over:
                self._running.append(attempt)
        if over:
            attempt.cancel()
        attempt.add_done_callback(InternalCallback(self._on_done, attempt))

    def _go_on(self) -> None:
        """Make the attempts that are due, schedule the next one, or end the call."""
        state, call = self.call.state, self.call
        while True:
            with self._changed:
                if self.final is not None or self._ending:
                    return
                step = self._plan.due(state.now_ns())
                failed = self._failed if self._plan.is_over else None
                next_ns = self._plan.next_ns
            if step is None:
                break
            emit(HedgeSent(call.method, step.number))
            self._follow(call.next_attempt(step))
        if failed is not None:
            self._end(*failed)
        elif next_ns != NEVER:
            self._wake_at(next_ns)

    def _wake_at(self, at_ns: int) -> None:
        """Schedule the next attempt; make no more if the timer takes no timeout."""
        state = self.call.state
        delay_s = max(0, at_ns - state.now_ns()) / 1e9
        timeout = state.schedule(self._due, delay_s, f"hedging of {self.call.method}")
        if timeout is None:
            with self._changed:
                self._plan.stop()
                failed = self._failed if self._plan.is_over else None
            if failed is not None:
                self._end(*failed)
            return
        with self._changed:
            wanted = self.final is None and self._plan.next_ns == at_ns  # not changed meanwhile
            if wanted:
                timeout, self._timeout = self._timeout, timeout
        if timeout is not None:
            timeout.cancel()

    def _due(self, _: Timeout) -> None:
        self._run_on_worker(self._go_on)

    def check_timer(self) -> None:
        """Continue without the timer if it is late or was stopped, and no attempt runs."""
        with self._changed:
            next_ns = self._plan.next_ns
            waits = self.final is None and not self._running and next_ns != NEVER
        state = self.call.state
        if waits and (state.timer.stopped or state.now_ns() >= next_ns):
            with self._changed:
                failed = self._failed if state.timer.stopped else None
            self._run_on_worker(self._go_on if failed is None else partial(self._end, *failed))

    def end_waiting(self) -> None:
        """Make no more attempts, and end the call if none runs; its channel is closed."""
        with self._changed:
            self._plan.stop()
            over = self._plan.is_over
        if over:
            self._finish(_channel_closed())

    def _on_done(self, attempt: AnyCall, _: object) -> None:
        """Record the end of an attempt. On gRPC's thread, or on the thread that canceled it."""
        try:
            failure = failure_of(attempt)
        except BaseException as error:  # noqa: BLE001 - of an inner interceptor
            failure = error
        with self._changed:
            if self.final is not None or self._ending or attempt not in self._running:
                return
            self._running.remove(attempt)
        if failure is None:
            self._finish(attempt)
        else:
            self._run_on_worker(partial(self._has_failed, attempt, failure))

    def _has_failed(self, attempt: AnyCall, failure: BaseException) -> None:
        has_rpc_status = has_status(failure) and not is_channel_closed_error(failure)
        with self._changed:
            self._failed = attempt, failure
            over = not has_rpc_status or self._plan.ended(
                self.call.state.now_ns(), result_of(failure)
            )
        if over:
            self._end(attempt, failure)
        else:
            self._go_on()

    def _end(self, call: AnyCall, failure: BaseException, *, received: bool = False) -> None:
        with self._changed:
            if self._ending:  # several attempts may have failed at the same moment
                return
            self._ending = True
        self._cancel_running()  # before the call is queued: it must not succeed as well
        super()._end(call, failure, received=received)

    def _finish(self, final: AnyCall) -> bool:
        finished = super()._finish(final)
        if finished:
            self._cancel_running()
        return finished

    def _cancel_running(self) -> None:
        with self._changed:
            running, self._running = self._running, []
            self._plan.canceled(len(running))
        for attempt in running:
            attempt.cancel()

    def cancel(self, details: str = CANCELED_BY_CALLER) -> bool:
        """Cancel the call; False if it has ended, or its last attempt has failed."""
        with self._changed:
            if self.final is not None or self._ending:
                return False
        return self._finish(FinishedError(grpc.StatusCode.CANCELLED, details, cancelled=True))

    def initial_metadata(self) -> Metadata:
        """Wait for the end, which decides whose metadata the caller gets."""
        return metadata_tuple(self.wait().initial_metadata())


def _raised(error: BaseException) -> FinishedError:
    """A call that ends with an exception, as grpc ends one whose interceptor raised."""
    details = f"Exception raised while intercepting the RPC: {error}"
    return FinishedError(grpc.StatusCode.INTERNAL, details, error=error)
