"""Calls of `grpc` and their attempts, for the channels, the interceptors and failback.

`Attempts` decides; this module starts, reads and cancels the attempts. A blocking call runs on its
caller's thread, including all attempts and the waits between them (`ClientCall.run`). For
`.future()` and response streams there are two cases:

* If the method needs only a deadline, the caller gets gRPC's own call.
* Otherwise the caller gets a `RetryingCall`, whose attempts `CallAttempts` makes.

Threads: gRPC's threads report the end of an attempt. They record a success and submit everything
else to a worker, because users' wait objects and predicates, and other interceptors, may block. The
timer's thread submits to a worker too.

`CallAttempts` refers to the `RetryingCall` only in done-callbacks (`add_done_callback`). Without
them, when the caller drops the `RetryingCall`, its finalizer cancels the call, as with gRPC's own
calls. Each call has one lock. No code of gRPC or of users is called under it.
"""

from __future__ import annotations

import contextlib
import threading
import time
from contextvars import copy_context
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Self

import grpc

from rpcwheel._concurrency.callbacks import run_callback
from rpcwheel._concurrency.executor import EXECUTOR
from rpcwheel._grpc.calls import (
    CANCELLED_HERE,
    CLOSED_DURING_CALL,
    COLLECTED,
    InternalCallback,
    copy_of,
    details_of,
    failure_of,
    has_ended,
    has_status,
    is_channel_closed_error,
    is_single_threaded,
    metadata_tuple,
    reusable_metadata,
    run_at_end,
    server_of,
)
from rpcwheel._grpc.finished import FinishedError, FinishedResponse, FinishedStream, refused_by
from rpcwheel.durations import NEVER, to_ns, to_seconds
from rpcwheel.errors import FailbackError
from rpcwheel.events import HedgeSent, emit
from rpcwheel.rpc import TRIED, Kind, NextAttempt, Stop
from rpcwheel.telemetry.tracing import with_current_trace

from .attempts import (
    CHANNEL_CLOSED,
    LATE,
    Attempts,
    Enqueue,
    ReadRequests,
    Response,
    State,
    Wait,
    with_other_server,
)
from .client_state import TIMER_CHECK_INTERVAL_S, seconds_left
from .failed_calls import (
    default_messages,
    delivery_timeout,
    queued_metadata,
    queued_request,
    response_status,
)
from .idempotency import with_key
from .keeper import KeptDelivery
from .metadata import call_metadata, new_nonce, result_of, with_attempt
from .sync_requests import RequestStream

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from rpcwheel._grpc.calls import AnyCall, Details, Metadata
    from rpcwheel.timer import Timeout
    from rpcwheel.timer.api import Timer

    from .attempts import Step
    from .client_state import ChannelCalls, ClientState
    from .config import MethodConfig
    from .failback_policy import FailbackPolicy

    Start = Callable[[Any, Any], AnyCall]

READERS_TIMEOUT_S: Final = 0.5
"""How long to wait, after an attempt has failed, for threads that still read its last message."""

TRAILERS_TIMEOUT_S: Final = 0.02
"""How long to wait, after empty initial metadata, for a failure that may follow at once."""

NO_STATUS: Final = Stop("it failed without a status")


def _with_defaults(details: Details, config: MethodConfig) -> Details:
    """Return call details with reusable metadata, the criticality and an idempotency key.

    They have the method's `wait_for_ready` if the caller set none.
    """
    metadata = call_metadata(reusable_metadata(details.metadata), config.criticality)
    if config.durable:
        metadata = with_key(metadata)
    if metadata is not details.metadata:
        details = details._replace(metadata=metadata)
    if config.wait_for_ready is not None and details.wait_for_ready is None:
        details = details._replace(wait_for_ready=config.wait_for_ready)
    return details


class _BackoffWait:
    """The wait of a blocking call for its next attempt."""

    def __init__(self) -> None:
        self.over = threading.Event()

    def end_waiting(self, _: object = None) -> None:
        """Make the next attempt now; if the channel is closed, that ends the call."""
        self.over.set()


class ClientCall:
    """One call of a client: makes its attempts and decides what follows them.

    Not thread-safe, except `decide`, which may run for several hedges at once.
    """

    def __init__(
        self,
        state: ClientState,
        kind: Kind,
        start: Start,
        details: Any,
        request: Any,
        begun: tuple[MethodConfig, int, int, int] | None = None,
        *,
        start_delivery: Start | None = None,
        serialize: Callable[[Any], bytes] | None = None,
    ) -> None:
        """Begin a call, or continue with a call whose first attempt was made.

        `start(details, request)` makes an attempt, and returns a call; `start_delivery` makes one
        in the background, after failback has queued the call. If the first attempt was made,
        `begun` has the configuration and the result of `ClientState.begin`. A journal needs the
        serializer of requests; None if they are bytes.
        """
        details = details_of(details)
        self.state = state
        self.kind = kind
        self.method = details.method
        if begun is None:
            config = state.current_config(self.method)
            begun = (config, *state.begin(config, details.timeout))
        self.config, self._started_ns, self._deadline_ns, self._attempt_ns = begun
        self._attempts: Attempts | None = None  # most calls succeed at their first attempt
        self._tried: list[object] | None = None  # after a refused attempt
        self.nonce: str | None = None
        """The nonce of the newest attempt; None if it has none."""
        self._start = start
        self._start_delivery = start if start_delivery is None else start_delivery
        self._serialize = serialize
        self._details = _with_defaults(details, self.config)
        self._request = request
        self.requests: RequestStream | None = None
        if kind.streams_requests and (limit := self.config.buffer_bytes) is not None:
            self.requests = RequestStream(request, limit)

    @property
    def is_late(self) -> bool:
        """Whether the deadline had passed before the call began, so that no attempt is made."""
        return self._started_ns >= self._deadline_ns

    def seconds_left(self) -> float | None:
        """Return the time until the deadline; None without a deadline."""
        return seconds_left(self._deadline_ns, self.state.now_ns())

    # --- Attempts ---

    @property
    def attempts(self) -> Attempts:
        """The decisions about the attempts, which are retries unless `hedge` was called."""
        return self._attempts or self._make_attempts(hedged=False)

    def _make_attempts(self, *, hedged: bool) -> Attempts:
        budget, times = self.state.budget_of(self.config), (self._started_ns, self._deadline_ns)
        self._attempts = Attempts(self.method, self.config, *times, budget, hedged=hedged)
        return self._attempts

    @property
    def may_hedge(self) -> bool:
        """Whether the policy allows hedging; a blocking call of an interceptor is not hedged."""
        return self.config.hedging is not None and self.kind is Kind.UNARY_UNARY

    def hedge(self) -> None:
        """Make the attempts after the first one at the same time."""
        self._make_attempts(hedged=True)

    @property
    def is_over(self) -> bool:
        """Whether no attempt runs or follows any more, if an attempt has failed."""
        return self._attempts is not None and self._attempts.is_over

    def ended(self) -> None:
        """Note that the result of the caller is known."""
        if self._attempts is not None:
            self._attempts.ended()

    @property
    def can_resend(self) -> bool:
        """Whether all requests can be sent again."""
        return self.requests is None or self.requests.buffer.replayable

    def first_attempt(self) -> AnyCall:
        """Make the first attempt."""
        left_s = seconds_left(self._attempt_ns, self._started_ns)
        details = self._details._replace(timeout=left_s)
        if self.config.sends_nonces:
            self.nonce = new_nonce()
            details = details._replace(metadata=with_attempt(details.metadata, 1, self.nonce))
        return self._start(details, self._next_request())

    def keep_request(self) -> None:
        """Copy the request, because the caller may change it before the next attempt."""
        config = self.config
        if self.requests is None and (config.keeps_requests or config.hedging is not None):
            self._request = copy_of(self._request)

    def next_attempt(self, attempt: NextAttempt) -> AnyCall:
        """Make another attempt."""
        if self.attempts.hedged:
            emit(HedgeSent(self.method, attempt.number))
        if self.state.channel_calls.is_closed:
            return channel_closed()
        left_s = seconds_left(attempt.deadline_ns, self.state.now_ns())
        self.nonce = new_nonce() if self.config.sends_nonces else None
        metadata = with_attempt(self._details.metadata, attempt.number, self.nonce)
        details = self._details._replace(timeout=left_s, metadata=metadata)
        token = None if self._tried is None else TRIED.set(self._tried)
        try:
            return self._start(details, self._next_request())
        except ValueError as error:
            if is_channel_closed_error(error):
                return channel_closed()
            raise
        finally:
            if token is not None:
                TRIED.reset(token)

    def _next_request(self) -> Any:
        return self._request if self.requests is None else self.requests.for_attempt()

    def decide(self, error: BaseException, *, received: bool = False) -> Step:
        """Decide what follows a failed attempt. Runs users' wait objects."""
        if is_channel_closed_error(error) or self.state.refuse is not None:
            return CHANNEL_CLOSED
        if not has_status(error):
            return NO_STATUS
        committed, server = received or not self.can_resend, server_of(error)
        result = result_of(error, committed=committed, nonce=self.nonce, server=server)
        if result.refused:
            result = with_other_server(result, server, self._tried_servers())
        return self.attempts.decide(self.state.now_ns(), result)

    def _tried_servers(self) -> list[object]:
        """Return the list of subchannels that the attempts of this call were sent to."""
        tried = TRIED.get() if self.attempts.hedged else self._tried
        if tried is None:
            tried = self._tried = []
        return tried

    # --- The end ---

    def end(self, call: AnyCall, error: BaseException, *, received: bool = False) -> AnyCall:
        """Return the call for the caller after a failure that is not retried.

        Runs users' predicates. `received`: the caller has received messages of the failed attempt.

        Raises:
            FailbackFull, FailbackClosed: The call can't be queued. The exception is also a
                `grpc.RpcError`; its cause is `error`.
        """
        attempts = self.attempts
        if is_channel_closed_error(error):  # the error of a blocking retry has no status
            return call if has_status(error) or attempts.number == 1 else channel_closed()
        if not has_status(error):
            return call
        buffered = self.requests is None or self.requests.buffer.has_all
        now_ns = self.state.now_ns()
        result: Any = attempts.decide_response(now_ns, error, received=received, buffered=buffered)
        if isinstance(result, ReadRequests) and self.requests is not None:
            self.requests.read_rest(self.seconds_left())
            buffered = self.requests.buffer.has_all
            result = attempts.requests_read(result.policy, error, buffered=buffered)
        if isinstance(result, Enqueue):
            outcome = self._enqueue(result.policy, error)
            result = attempts.queued(result.policy, error, outcome)
        if isinstance(result, FailbackError):
            raise refused_by(result, error) from error
        return call if result is None else self._respond(result, error)

    def end_late(self) -> AnyCall:
        """Return the call for the caller if the deadline had passed before the call began."""
        self.attempts.late()
        error = FinishedError(grpc.StatusCode.DEADLINE_EXCEEDED, LATE)
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

    def _respond(self, response: Response, error: BaseException) -> FinishedResponse:
        streams = self.kind.streams_responses
        return (FinishedStream if streams else FinishedResponse)(
            default_messages(response.default) if streams else response.default,
            **response_status(response.outcome, error),
        )

    def _enqueue(self, policy: FailbackPolicy, error: BaseException) -> str | Exception | None:
        """Give the call to failback. Returns what its queue returned, or what was raised."""
        requests, original = self.requests, self._details
        details = original._replace(
            timeout=delivery_timeout(original.timeout, self.config),
            metadata=queued_metadata(original.metadata, policy),
        )
        try:
            messages = (
                [queued_request(self._request)] if requests is None else requests.read_rest() or []
            )
            if self.config.durable:
                stored = details._replace(metadata=original.metadata)
                failed = self.state.failback.failed_rpc(
                    policy, self.kind, stored, messages, self._serialize
                )
                queue = self.state.failback.queue_of(policy, self.config.queue)
                outcome: str | None = queue.enqueue_rpc(error, failed)
                return outcome
            delivery = Delivery(
                self.method,
                self.kind,
                self._start_delivery,
                details,
                self.attempts.number,
                self.state.failback.key,
                self.state.channel_calls,
            )
            return self.state.failback.enqueue(policy, self.config, error, delivery, *messages)
        except Exception as raised:  # noqa: BLE001 - a refusal, or of user code
            return raised

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
        error: BaseException | None = None
        try:
            while (error := failure_of(call)) is not None:
                attempts = self.attempts
                attempts.failed()
                attempts.decided(self.decide(error))
                step = self._next_step(attempts)
                if not isinstance(step, NextAttempt):
                    return self.end(call, error)
                call = self.next_attempt(step)
            return call
        finally:
            del call, error  # else a cycle: the traceback of an attempt has this frame

    def _next_step(self, attempts: Attempts) -> Step | None:
        """Wait on this thread until the next attempt is due; Stop if there is none."""
        state = self.state
        step = attempts.next(state.now_ns(), can_resend=self.can_resend)
        while isinstance(step, Wait):
            if not self._wait_until(step.at_ns):
                attempts.timer_stopped()
            now_ns = max(state.now_ns(), step.at_ns)
            step = attempts.next(now_ns, can_resend=self.can_resend)
        return step

    def _wait_until(self, at_ns: int) -> bool:
        """Wait on this thread; False if the timer was stopped or takes no timeout.

        If the channel is closed, returns at once: the next attempt ends the call. Does not wait
        past the deadline, even if a task blocks the timer's thread.
        """
        state, deadline_ns = self.state, self._deadline_ns
        pause = _BackoffWait()
        if not state.channel_calls.add_waiting(pause):
            return True
        delay_s = (at_ns - state.now_ns()) / 1e9
        timeout = state.schedule(pause.end_waiting, max(0, delay_s), f"retry of {self.method}")
        if timeout is None:
            return False
        try:
            while not pause.over.wait(
                min(TIMER_CHECK_INTERVAL_S, (deadline_ns - state.now_ns()) / 1e9)
            ):
                if state.timer.stopped:
                    return False
                if state.now_ns() >= at_ns:
                    break
            return True
        finally:
            timeout.cancel()


class Delivery(KeptDelivery):
    """Makes a queued call again. Failback calls it with the requests."""

    __slots__ = ("_channel_calls", "_details", "_kind", "_start")

    def __init__(
        self,
        method: str,
        kind: Kind,
        start: Start,
        details: Details,
        attempts: int,
        channel: object = None,
        channel_calls: ChannelCalls | None = None,
    ) -> None:
        """Keep what is needed to make the call, after a number of attempts.

        Deliveries of calls with the same `channel` are paced together. They do not end with the
        `channel_calls`, which are None if the channel has no policies.
        """
        super().__init__(method, channel, details.timeout, attempts)
        self._kind = kind
        self._start = start
        self._details = details
        self._channel_calls = channel_calls

    def __call__(self, *requests: Any) -> Any:
        """Return the call, for whose end failback waits. Reads a response stream to its end."""
        self.attempts += 1
        metadata = with_current_trace(with_attempt(self._details.metadata, self.attempts))
        request = iter(requests) if self._kind.streams_requests else requests[0]
        details = self._details._replace(metadata=metadata)
        if self._channel_calls is None:
            call = self._start(details, request)
        else:
            with self._channel_calls.delivery():
                call = self._start(details, request)
        if not self._kind.streams_responses:
            return call
        for _ in call:
            pass
        return None


def channel_closed() -> FinishedError:
    """The end of a call whose channel was closed while no attempt ran, as in grpc."""
    return FinishedError(grpc.StatusCode.CANCELLED, CLOSED_DURING_CALL)


# --- Calls of `.future()` and response streams ---


def begin(call: ClientCall, *, may_block: bool = False) -> AnyCall:
    """Begin a call of `.future()`, or a response stream.

    `may_block`: the first attempt may block until its end, see `is_blocking_unary`.
    """
    if call.is_late:
        return call.end_late()
    if call.may_hedge:
        return copy_context().run(_begin_hedged, call, may_block=may_block)
    config = call.config
    stalls = call.kind.streams_responses and config.has_message_timeout
    if config.handles_failures or stalls:
        return _begin_attempts(call, may_block=may_block)
    return _begin_plain(call)


def _begin_hedged(call: ClientCall, *, may_block: bool) -> AnyCall:
    """Begin in a new context, which all attempts share, so that each goes to another server."""
    TRIED.set([])
    return _begin_attempts(call, may_block=may_block)


def _begin_attempts(call: ClientCall, *, may_block: bool) -> AnyCall:
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
    if call.may_hedge:
        call.hedge()
    attempts = StreamAttempts(call) if call.kind.streams_responses else CallAttempts(call)
    retrying = attempts.make_retrying_call()
    attempts.start(attempt)
    return retrying


def _begin_plain(call: ClientCall) -> AnyCall:
    """Begin a call that is gRPC's own; emits `CallSlow` if it is slow."""
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

    def __init__(self, attempts: CallAttempts) -> None:
        self._attempts = attempts

    @property
    def _state(self) -> CallAttempts:
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
        if attempts is not None and attempts.final is None:
            attempts.cancel(COLLECTED)

    def __repr__(self) -> str:
        final = self._attempts.final
        return f"<{type(self).__name__} object>" if final is None else repr(final)


class RetryingStream(RetryingCall):
    """A response stream that may need several attempts."""

    _attempts: StreamAttempts

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


class CallAttempts:
    """The attempts of one call of `.future()`, or of a response stream."""

    def __init__(self, call: ClientCall) -> None:
        """Begin without a first attempt; `start` follows it."""
        self.call = call
        self.final: AnyCall = None
        """The call that has the result of the caller; None before the end."""
        self._hedged = call.may_hedge
        self._context = copy_context()  # of the caller, for other interceptors
        self._lock = threading.RLock()  # entered itself: see the module `executor`
        self._changed = threading.Condition(self._lock)
        self._running: list[AnyCall] = []
        self._failed: tuple[AnyCall, BaseException] | None = None  # the attempt that failed last
        self._received = False  # the caller has received a message or metadata
        self._callbacks: list[Callback] = []
        self._timeout: Timeout | None = None  # of the wait for the next attempt
        self._timer: Timer | None = None  # in which it waits
        self._watch: Timeout | None = None

    @property
    def _attempts(self) -> Attempts:
        """The decisions. Methods of `Attempts` that run no user code are called under the lock."""
        return self.call.attempts

    @property
    def _is_over(self) -> bool:
        return self.final is not None or self.call.is_over

    def make_retrying_call(self) -> RetryingCall:
        """Make the call for the caller."""
        streams = self.call.kind.streams_responses
        return (RetryingStream if streams else RetryingCall)(self)

    # --- Attempts ---

    def start(self, attempt: AnyCall) -> None:
        """Follow the first attempt."""
        self._watch = self.call.state.watch_slow_call(self.call.method, self.call.config)
        self._follow(attempt)
        if self._hedged:
            self._go_on()

    def _follow(self, attempt: AnyCall) -> None:
        with self._lock:
            over = self._is_over
            if not over:
                self._running.append(attempt)
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
        with self._lock:
            if attempt not in self._running or self._is_over:
                return
            if failure is None:
                self.call.ended()  # here: a fatal failure of another attempt must not end it too
            else:
                self._running.remove(attempt)
                self._attempts.failed()
        if failure is None:
            self._finish(attempt)
        else:
            self._run_on_worker(partial(self._decide, attempt, failure))

    def _decide(self, attempt: AnyCall, failure: BaseException) -> None:
        """Decide what follows a failed attempt. On a worker."""
        step = self.call.decide(failure, received=self._has_received(attempt))
        with self._lock:
            self._failed = attempt, failure
            self._attempts.decided(step)
        self._go_on()

    def _has_received(self, attempt: AnyCall) -> bool:
        """Whether the caller has received something of a failed attempt."""
        return self._received

    def _go_on(self) -> None:
        """Make the attempts that are due, wait for the next one, or end the call."""
        call = self.call
        while True:
            with self._lock:
                step = self._attempts.next(call.state.now_ns(), can_resend=call.can_resend)
                self._changed.notify_all()
            match step:
                case NextAttempt():
                    self._follow(call.next_attempt(step))
                case Wait(at_ns):
                    self._wait_until(at_ns)
                    return
                case Stop():
                    self._end()
                    return
                case None:
                    return

    # --- The wait for the next attempt ---

    def _wait_until(self, at_ns: int) -> None:
        call, state = self.call, self.call.state
        if not state.channel_calls.add_waiting(self):
            return
        self._timer = state.timer
        delay_s = max(0, at_ns - state.now_ns()) / 1e9
        name = "hedging" if self._hedged else "retry"
        timeout = state.schedule(
            lambda _: self._run_on_worker(self._go_on), delay_s, f"{name} of {call.method}"
        )
        if timeout is None:
            self._timer_stopped()
            return
        with self._lock:
            if self._attempts.next_ns == at_ns:  # not changed meanwhile
                timeout, self._timeout = self._timeout, timeout
        if timeout is not None:
            timeout.cancel()

    def _timer_stopped(self) -> None:
        with self._lock:
            self._attempts.timer_stopped()
        self._go_on()

    def check_timer(self) -> None:
        """Continue without the timer if it is late or was stopped."""
        if self._timer is None:
            return
        with self._lock:
            next_ns, timer = self._attempts.next_ns, self._timer
            if next_ns == NEVER or timer is None:
                return
            if not timer.stopped and self.call.state.now_ns() < next_ns:
                return
            self._timer = None  # until the next wait
        self._run_on_worker(self._timer_stopped if timer.stopped else self._go_on)

    def end_waiting(self) -> None:
        """Make no more attempts, and end the call if none runs; its channel is closed."""
        with self._lock:
            over = self._attempts.channel_closed()
        if over:
            self._finish(channel_closed())

    # --- The end ---

    def _end(self) -> None:
        """End the call after its last attempt has failed. On a worker."""
        self._cancel_running()  # before the call is queued: it must not succeed as well
        if self._failed is None:
            return
        call, failure = self._failed
        try:
            call = self.call.end(call, failure, received=self._received)
        except FailbackError as refusal:
            call = refusal  # it is a call too
        self._finish(call)

    def _finish(self, final: AnyCall) -> bool:
        """End the call with the result of `final`; False if it has ended already."""
        with self._lock:
            if self.final is not None:
                return False
            self.final = final
            self.call.ended()
            if final in self._running:
                self._running.remove(final)
            callbacks, self._callbacks = self._callbacks, []
            timeouts = (self._watch, self._timeout)
            self._changed.notify_all()
        for timeout in timeouts:
            if timeout is not None:
                timeout.cancel()
        if self._running:
            self._cancel_running()
        self.call.close()
        run_callbacks(self.call.method, callbacks)
        return True

    def _cancel_running(self) -> None:
        with self._lock:
            running, self._running = self._running, []
            if running:
                self._attempts.canceled(len(running))
        for attempt in running:
            attempt.cancel()

    def _run_on_worker(self, job: Callable[[], object]) -> None:
        EXECUTOR.submit(("calls", self.call.method), partial(self._run, job))

    def _run(self, job: Callable[[], object]) -> None:
        try:
            self._context.copy().run(job)
        except BaseException as error:  # noqa: BLE001 - for the caller
            self._finish(_raised(error))

    # --- For the caller ---

    def cancel(self, details: str = CANCELLED_HERE) -> bool:
        """Cancel the call; False if it has ended, or its last attempt has failed."""
        with self._lock:
            if self._is_over:
                return False
            retried = [] if self._hedged else self._running
            attempt = retried[0] if retried else None
        if attempt is not None:
            if attempt.cancel():
                # gRPC's thread may have ended this call with the canceled attempt meanwhile.
                return self._finish(attempt) or self.final is attempt
            if has_ended(attempt) and failure_of(attempt) is None:
                return False
        return self._finish(FinishedError(grpc.StatusCode.CANCELLED, details, cancelled=True))

    def code(self) -> grpc.StatusCode | None:
        """Return the status code; None before the end."""
        return None if self.final is None else self.final.code()

    def seconds_left(self) -> float | None:
        """Return the seconds until the deadline; None without a deadline."""
        return self.call.seconds_left()

    def add_callback(self, callback: Callable[..., object], *args: object) -> bool:
        """Call a function at the end, see `run_callbacks`; False if the call has ended."""
        with self._lock:
            if self.final is None:
                self._callbacks.append((callback, args))
                return True
        return False

    def wait(self, timeout: float | None = None) -> AnyCall:
        """Wait for the end and return the call that has the caller's result.

        Raises:
            grpc.FutureTimeoutError: The call has not ended within `timeout` seconds.
        """
        with self._lock:
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

    def _current(self) -> AnyCall:
        """Wait under the lock for a running attempt or the end; None at the end."""
        self._wait_for(lambda: self.final is not None or bool(self._running))
        return None if self.final is not None else self._running[0]

    def initial_metadata(self) -> Metadata:
        """Wait for the initial metadata. If it is not empty, no retry follows.

        If the call is hedged, waits for the end, which decides whose metadata the caller gets.
        """
        while not self._hedged:
            with self._lock:
                attempt = self._current()
            if attempt is None:
                break
            metadata = metadata_tuple(attempt.initial_metadata())
            with self._lock:
                if not metadata:  # a failure without metadata looks the same until its status
                    ended = partial(self._has_ended, attempt)
                    self._changed.wait_for(ended, TRAILERS_TIMEOUT_S)
                if not self._has_ended(attempt):
                    self._received = self._received or metadata != ()
                    return metadata
        return metadata_tuple(self.wait().initial_metadata())

    def _has_ended(self, attempt: AnyCall) -> bool:
        return attempt not in self._running


class _Reader:
    """A thread that waits for the next message of an attempt."""

    def __init__(self, attempt: AnyCall) -> None:
        self.attempt = attempt


class StreamAttempts(CallAttempts):
    """The attempts of one call that has a response stream, or may have one."""

    def __init__(self, call: ClientCall) -> None:
        super().__init__(call)
        self._readers: list[_Reader] = []
        self._stalled: AnyCall = None  # an attempt that was canceled by message_timeout

    def next_message(self) -> Any:
        """Wait for the next message of the current attempt, or of the one that follows it."""
        while True:
            with self._lock:
                attempt = self._current()
                if attempt is None:
                    break
                reader = _Reader(attempt)
                self._readers.append(reader)
            try:
                message, is_current = self._read(reader)
            except (StopIteration, grpc.RpcError) as end:
                if not has_ended(attempt):  # of another interceptor, without `done()`
                    self._attempt_ended(attempt, None if isinstance(end, StopIteration) else end)
                with self._lock:
                    self._wait_for(partial(self._is_settled, attempt))
                if self.final is attempt:
                    raise
                end.__traceback__ = None  # the error is the attempt; its frames would keep it
            else:
                if is_current:
                    return message
        return next(self.final)

    def _is_settled(self, attempt: AnyCall) -> bool:
        """Whether the caller gets nothing more of this attempt, or the call has ended."""
        return self.final is not None or self._is_superseded(attempt)

    def _is_superseded(self, attempt: AnyCall) -> bool:
        """Whether another attempt has followed this one, or will."""
        if self.final is not None or attempt in self._running:
            return False
        return self._attempts.state is State.RUNNING or self._attempts.state is State.WAITING

    def _read(self, reader: _Reader) -> tuple[Any, bool]:
        """Read the next message of an attempt. Returns it and whether the attempt is current."""
        arrived = False
        try:
            message = self._next_in_time(reader)
            arrived = True
        finally:
            with self._lock:  # after a message for the caller, no retry follows
                self._readers.remove(reader)
                superseded = self._is_superseded(reader.attempt)
                is_current = not superseded and self.final in (None, reader.attempt)
                self._received = self._received or (arrived and is_current)
                if reader.attempt not in self._running:
                    self._changed.notify_all()  # `_has_received` waits for the readers
        return message, is_current

    def _has_received(self, attempt: AnyCall) -> bool:
        """Whether the caller has received, or is receiving, something of the failed attempt.

        A thread of the caller may have read a message that arrived before the failure without
        having recorded it. No other thread begins to read now, and the readers need not wait for
        the server, so they finish soon. A reader that does not finish reads a call of another
        interceptor; its message is dropped.
        """
        with self._lock:
            self._changed.wait_for(
                lambda: all(reader.attempt is not attempt for reader in self._readers),
                READERS_TIMEOUT_S,
            )
            return self._received

    def wait(self, timeout: float | None = None) -> AnyCall:
        """Wait for the end. Refused for a single-threaded stream, which must be read to its end."""
        if any(map(is_single_threaded, tuple(self._running))):
            raise grpc.experimental.UsageError(
                "a single-threaded stream has no end before it was read to its end"
            )
        return super().wait(timeout)

    # --- message_timeout ---

    def _next_in_time(self, reader: _Reader) -> Any:
        call = self.call
        if not call.config.has_message_timeout:
            return next(reader.attempt)
        timeout = call.state.schedule(
            lambda _: self._run_on_worker(partial(self._stall, reader)),
            to_seconds(call.config.message_timeout_ns),
            f"message_timeout of {call.method}",
        )
        try:
            return next(reader.attempt)
        finally:
            if timeout is not None:
                timeout.cancel()

    def _stall(self, reader: _Reader) -> None:
        """Cancel an attempt whose reader has waited longer than message_timeout."""
        attempt = reader.attempt
        with self._lock:
            if (
                reader not in self._readers
                or attempt not in self._running
                or self.final is not None
            ):
                return
            self._stalled = attempt
        if not attempt.cancel():
            self._stalled = None  # the attempt has just ended

    def _decide(self, attempt: AnyCall, failure: BaseException) -> None:
        # If it has ended by itself meanwhile, that counts.
        if self._stalled is attempt and attempt.code() is grpc.StatusCode.CANCELLED:
            call = self.call
            self._has_received(attempt)  # waits for its readers; none reads the error below
            attempt = failure = FinishedError(
                grpc.StatusCode.DEADLINE_EXCEEDED,
                call.state.report_stall(call.method, call.config),
                initial=metadata_tuple(attempt.initial_metadata()),
            )
        super()._decide(attempt, failure)


class DeferredCall(StreamAttempts):
    """A call whose only attempt begins later, for example when a subchannel is READY."""

    def __init__(self, state: ClientState, kind: Kind, details: Details, request: Any) -> None:
        """Begin a call without an attempt, with a state without policies.

        The metadata in `details` can be read more than once.
        """
        now_ns, timeout = state.now_ns(), details.timeout
        deadline_ns = (
            NEVER if timeout is None else now_ns + max(0, to_ns(timeout, subject="timeout"))
        )
        if not kind.streams_requests:
            request = copy_of(request)  # the caller may change it before it is sent
        begun = state.configs.config_for(details.method), now_ns, deadline_ns, deadline_ns
        super().__init__(ClientCall(state, kind, _begins_itself, details, request, begun))
        self.request = request
        """The message or the iterator of messages, for the attempt."""

    def begin(self, attempt: AnyCall) -> None:
        """Follow the attempt, which has begun."""
        is_call = hasattr(attempt, "add_done_callback")
        self._follow(attempt if is_call else _Generator(attempt))


class _Generator(FinishedResponse):
    """A response stream that an interceptor has wrapped in a generator, as OpenTelemetry's does.

    Its status is OK; its end is known only to its reader.
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
        with contextlib.suppress(ValueError, AttributeError):  # it is running on another thread
            self._messages.close()
        return True


def _begins_itself(*_: object) -> None:
    raise AssertionError("a deferred call begins its attempt by itself")


def _raised(error: BaseException) -> FinishedError:
    """A call that ends with an exception, as grpc ends one whose interceptor raised."""
    details = f"Exception raised while intercepting the RPC: {error}"
    return FinishedError(grpc.StatusCode.INTERNAL, details, error=error)
