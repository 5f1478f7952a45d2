"""The calls of `grpc` and their attempts: the one implementation for channels and interceptors.

A blocking call is carried out on its caller's thread, attempts and waits included (`run`). A call
that the caller holds while it runs (`.future()`, response streams) is gRPC's own object if its
configuration asks for no more than a deadline. Otherwise the caller holds a `RetryingCall`, and
`CallAttempts` makes its attempts, one after the other or, hedged, at the same time.

Threads: gRPC's threads, which report how an attempt ended, record a success and leave all else
to a worker. What follows may run users' wait objects, predicates and other interceptors, which must
not block gRPC's threads. The timer's thread only hands over, too.

`CallAttempts` has no reference to the `RetryingCall`: when the caller drops that, it is finalized
and cancels the call, as gRPC's own calls do. Each call has one lock; nothing of gRPC's or the
user's is called under it.
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
    call_at_end,
    details_of,
    details_with,
    failure_of,
    has_ended,
    has_status,
    is_channel_closed,
    is_single_threaded,
    metadata_of,
)
from rpcwheel._grpc.finished import FinishedError, FinishedResponse, FinishedStream, refused_by
from rpcwheel.durations import NEVER, to_ns, to_seconds
from rpcwheel.errors import FailbackError
from rpcwheel.events import CallbackFailed, HedgeSent, RetryStopped, emit
from rpcwheel.rpc import TRIED, Kind, NextAttempt, Stop

from .config import (
    ANSWER_KEY,
    LOOK_INTERVAL_S,
    Outcome,
    answered_by,
    copy_of,
    kept_metadata,
    kept_request,
    messages_of,
    resend_timeout,
    seconds_left,
)
from .retry import TIMER_STOPPED, result_of, with_attempt
from .sync_requests import RequestStream

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from rpcwheel._grpc.calls import AnyCall, Details, Metadata
    from rpcwheel.failback.policy import FailbackPolicy
    from rpcwheel.timer import Timeout
    from rpcwheel.timer.api import Timer

    from .config import ClientState, MethodConfig
    from .hedging import HedgingPlan
    from .retry import RetryPlan

    Start = Callable[[Any, Any], AnyCall]

__all__ = [
    "CallAttempts",
    "ClientCall",
    "RetryingCall",
    "RetryingStream",
    "WaitingCalls",
    "begin_stream",
    "begin_unary",
    "run_callbacks",
    "with_readiness",
]

BY_USER: Final = "Locally cancelled by application!"
DROPPED: Final = "Cancelled upon garbage collection!"

READERS_TIMEOUT_S: Final = 0.5
"""How long to wait, when an attempt has failed, for threads that still read its last message."""

TRAILERS_TIMEOUT_S: Final = 0.02
"""How long to wait, on empty initial metadata, for the failure that may follow them at once."""

CHANNEL_CLOSED: Final = Stop("its channel was closed")
NO_STATUS: Final = Stop("it failed without a status")


def with_readiness(details: Any, config: MethodConfig) -> Any:
    """Call details with the method's `wait_for_ready`, if the caller gave none."""
    if config.wait_for_ready is None or getattr(details, "wait_for_ready", None) is not None:
        return details
    return details_of(details)._replace(wait_for_ready=config.wait_for_ready)


class WaitingCalls:
    """The calls of one channel that wait for their next attempt. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: weakref.WeakSet[Any] = weakref.WeakSet()

    def add(self, call: _Pause | _CallEnd) -> None:
        """Note a call that begins to wait; it is forgotten when it is garbage."""
        with self._lock:
            self._calls.add(call)

    def end_waiting(self) -> None:
        """Let them make their next attempt now, which ends them, as the channel is closed."""
        with self._lock:
            calls = list(self._calls)
        for call in calls:
            call.end_waiting()


class _Pause:
    """The wait of a blocking call for its next attempt."""

    def __init__(self) -> None:
        self.over = threading.Event()

    def end_waiting(self, _: object = None) -> None:
        self.over.set()


class ClientCall:
    """One call of a client: how its attempts are made, and what follows them.

    Not thread-safe: it has one owner at a time.
    """

    __slots__ = (
        "_attempts",
        "_details",
        "_opened",
        "_plan",
        "_request",
        "_start",
        "config",
        "kind",
        "method",
        "requests",
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
        opened: tuple[MethodConfig, int, int, int] | None = None,
        waiting: WaitingCalls | None = None,
    ) -> None:
        """Begin a call, or go on with one after its first attempt.

        Args:
            state: That of its client.
            kind: Of its method.
            start: Makes an attempt of call details and the request.
            details: Those of the caller, or of an outer interceptor.
            request: The message, or the iterator of messages.
            opened: The configuration and what `ClientState.open` returned, if the first attempt was
                made; None if not.
            waiting: The call is added to it while it waits for an attempt.
        """
        self.state = state
        self.kind = kind
        self.waiting = waiting
        self.method: str = details.method
        if opened is None:
            config, timeout = state.config_of(self.method), details.timeout
            own_ns = None if timeout is None else to_ns(timeout, what="timeout")
            opened = (config, *state.open(config, own_ns))
        self.config = opened[0]
        self._opened = opened[1:]
        self._plan: RetryPlan | None = None  # until the first attempt has failed
        self._start = start
        self._details = with_readiness(details, self.config)
        self._request = request
        self._attempts = 1
        self.requests: RequestStream | None = None
        if kind.streams_requests and (limit := self.config.keep_bytes) is not None:
            self.requests = RequestStream(request, limit)

    @property
    def is_late(self) -> bool:
        """Whether its deadline had passed before it began: then no attempt is made."""
        now_ns, deadline_ns, _ = self._opened
        return now_ns >= deadline_ns

    def seconds_left(self) -> float | None:
        """What is left of its deadline; None if it has none."""
        return seconds_left(self._opened[1], self.state.now_ns())

    # --- Attempts ---

    def first(self) -> AnyCall:
        """Make the first attempt."""
        now_ns, _, attempt_ns = self._opened
        details = details_with(self._details, seconds_left(attempt_ns, now_ns))
        return self._start(details, self._next_request())

    def keep_request(self) -> None:
        """Keep the request as it is now: the caller may change it before the next attempt."""
        config = self.config
        if self.requests is None and (config.resends or config.hedging is not None):
            self._request = copy_of(self._request)

    def make(self, attempt: NextAttempt) -> AnyCall:
        """Make another attempt."""
        self._attempts = attempt.number
        left_s = seconds_left(attempt.deadline_ns, self.state.now_ns())
        details = details_with(self._details, left_s)
        details = details._replace(metadata=with_attempt(details.metadata, attempt.number))
        try:
            return self._start(details, self._next_request())
        except ValueError as error:
            if is_channel_closed(error):
                return _closed()
            raise

    def _next_request(self) -> Any:
        return self._request if self.requests is None else self.requests.for_attempt()

    @property
    def hedged(self) -> bool:
        """Whether its attempts may run at the same time."""
        return self.config.hedging is not None and self.kind is Kind.UNARY_UNARY

    def hedging(self) -> HedgingPlan | None:
        """The plan of its attempts after the first one, if it is hedged."""
        if not self.hedged:
            return None
        return self.state.hedged(self.config, *self._opened[:2])

    def after(self, error: BaseException, *, received: bool = False) -> NextAttempt | Stop:
        """Decide what follows after an attempt that failed. May run users' wait objects."""
        if is_channel_closed(error):
            return CHANNEL_CLOSED
        if not has_status(error):
            return NO_STATUS
        if self._plan is None:
            self._plan = self.state.resumed(self.config, *self._opened[:2])
        committed = received or (self.requests is not None and not self.requests.replayable)
        result = result_of(error, committed=committed)
        return self.state.after(self.method, self.config, self._plan, result, self._attempts)

    def stopped(self, error: BaseException) -> Stop:
        """Report that a retry that was decided is not made, as the timer was stopped or is full."""
        code = result_of(error).code
        emit(RetryStopped(self.method, self._attempts, code, TIMER_STOPPED.reason))
        return TIMER_STOPPED

    # --- The end ---

    def end(self, call: AnyCall, error: BaseException, *, received: bool = False) -> AnyCall:
        """Give the call that the caller gets after a failure that no attempt follows.

        May run users' predicates.

        Args:
            call: The failed attempt.
            error: How it failed.
            received: Whether the caller has messages of it.

        Raises:
            FailbackFull, FailbackClosed: The call is to be queued and can't be; from `error`, and
                an error of grpc too.
        """
        if is_channel_closed(error):  # grpc gives a blocking retry's as an outcome without status
            return call if has_status(error) or self._attempts == 1 else _closed()
        if not has_status(error):
            return call
        outcome = self.state.outcome(
            self.method,
            self.config,
            error,
            attempts=self._attempts,
            started_ns=self._opened[0],
            received=received,
        )
        match outcome:
            case Outcome.DEFAULT_RESPONSE if self.config.default_response is not None:
                return self._answered(outcome, error, self.config.default_response.default)
            case Outcome.ENQUEUE if self.config.failback is not None:
                if self._enqueue(self.config.failback, error):
                    return self._answered(outcome, error, self.config.failback.default)
        return call

    def late(self) -> AnyCall:
        """Give the call that the caller gets where no attempt was made at all."""
        self._attempts = 0
        error = FinishedError(
            grpc.StatusCode.DEADLINE_EXCEEDED,
            "Deadline Exceeded before the call began: its deadline has passed",
        )
        try:
            return self.end(error, error)
        except FailbackError as refusal:
            return refusal  # a whole call, too
        finally:
            self.close()

    def close(self) -> None:
        """Let go of what the attempts used. Idempotent; any thread."""
        if self.requests is not None:
            self.requests.close()

    def _answered(self, outcome: Outcome, error: Any, default: Any) -> FinishedResponse:
        made_by, details = answered_by(outcome, error.code().name, error.details())
        streams = self.kind.streams_responses
        return (FinishedStream if streams else FinishedResponse)(
            messages_of(default) if streams else default,
            details,
            initial=metadata_of(error.initial_metadata()),
            trailing=(*metadata_of(error.trailing_metadata()), (ANSWER_KEY, made_by)),
        )

    def _enqueue(self, policy: FailbackPolicy, error: BaseException) -> bool:
        """Queue the call for a later delivery; False if the caller gets its failure."""
        if self.requests is None:
            messages: list[Any] | None = [kept_request(self._request)]
        elif self.requests.known or self.state.queues(self.method, self.config, error):
            messages = self.requests.gather(self.method, self.seconds_left())
        else:
            return False
        if messages is None:
            error.add_note(f"{self.method}: not queued by failback, its requests are not all known")
            return False
        given = details_of(self._details)
        details = given._replace(
            timeout=resend_timeout(given.timeout, self.config),
            metadata=kept_metadata(given.metadata, policy),
        )
        delivery = _Delivery(self.method, self.kind, self._start, details, self._attempts)
        try:
            queue = self.state.queue_of(policy, self.config.queue)
            return queue.park(error, delivery, *messages)
        except FailbackError as refusal:
            raise refused_by(refusal, error) from error
        except Exception as raised:  # noqa: BLE001 - a user's predicate or wait object
            emit(CallbackFailed(self.method, "failback", raised))
            return False

    # --- On the caller's thread ---

    def run(self, call: AnyCall = None) -> AnyCall:
        """Carry the call out on this thread to its end; `call` is its first attempt, if made."""
        if self.is_late:
            return self.late()
        watch = self.state.watch(self.method, self.config)
        try:
            return self.resume(self.first() if call is None else call)
        finally:
            if watch is not None:
                watch.cancel()
            self.close()

    def resume(self, call: AnyCall) -> AnyCall:
        """Wait for the end of an attempt, and make the attempts that follow it."""
        while (error := failure_of(call)) is not None:
            step = self.after(error)
            if isinstance(step, NextAttempt) and not self._wait_until_due(step):
                step = self.stopped(error)
            if isinstance(step, Stop):
                return self.end(call, error)
            call = self.make(step)
        return call

    def _wait_until_due(self, attempt: NextAttempt) -> bool:
        """Wait on this thread; False if the timer takes no more timeouts.

        If a task blocks the timer's thread, this does not wait past the deadline for it.
        """
        state = self.state
        delay_s = (attempt.at_ns - state.now_ns()) / 1e9
        if delay_s <= 0:
            return True
        pause = _Pause()
        if self.waiting is not None:
            self.waiting.add(pause)
        timeout = state.wake(pause.end_waiting, delay_s, f"retry of {self.method}")
        if timeout is None:
            return False
        try:
            while not pause.over.wait(
                min(LOOK_INTERVAL_S, (attempt.deadline_ns - state.now_ns()) / 1e9)
            ):
                if state.timer.stopped:
                    return False
                if state.now_ns() >= attempt.at_ns:
                    break
            return True
        finally:
            timeout.cancel()


class _Delivery:
    """Makes a queued call again. Called by failback with the call's requests."""

    __slots__ = ("_details", "_kind", "_number", "_start", "label")

    def __init__(
        self, method: str, kind: Kind, start: Start, details: Details, attempts: int
    ) -> None:
        self.label = method
        """What failback calls it in events."""
        self._kind = kind
        self._start = start
        self._details = details
        self._number = attempts

    def __call__(self, *requests: Any) -> Any:
        """Give the call, whose end failback waits for; a response stream is read to its end."""
        self._number += 1
        metadata = with_attempt(self._details.metadata, self._number)
        request = iter(requests) if self._kind.streams_requests else requests[0]
        call = self._start(self._details._replace(metadata=metadata), request)
        if not self._kind.streams_responses:
            return call
        for _ in call:
            pass
        return None


def _closed() -> FinishedError:
    """The end of a call whose channel was closed between two attempts, as grpc ends one."""
    return FinishedError(grpc.StatusCode.CANCELLED, "Channel closed!")


# --- Calls that the caller holds while they run ---


def begin_unary(call: ClientCall, *, known: bool = True) -> AnyCall:
    """Begin a call with one response by `.future()`, if it is `known` to be one."""
    if not (call.config.recovers or call.hedged):
        return _begin_plain(call)
    return _begin(call, RetryingCall, known=known)


def begin_stream(call: ClientCall) -> AnyCall:
    """Begin a call with a response stream."""
    if call.config.recovers or call.config.has_message_timeout:
        return _begin(call, RetryingStream, known=True)
    return _begin_plain(call)


def _begin(call: ClientCall, kind: type[RetryingCall], *, known: bool) -> AnyCall:
    if call.is_late:
        return call.late()
    if call.hedged:
        return copy_context().run(_begin_hedged, call, kind, known=known)
    return _begin_attempts(call, kind, known=known)


def _begin_hedged(call: ClientCall, kind: type[RetryingCall], *, known: bool) -> AnyCall:
    """In a context of its own, which its later attempts share: each goes to another server."""
    TRIED.set([])
    return _begin_attempts(call, kind, known=known)


def _begin_attempts(call: ClientCall, kind: type[RetryingCall], *, known: bool) -> AnyCall:
    try:
        attempt = call.first()
    except BaseException:
        call.close()
        raise
    if not hasattr(attempt, "add_done_callback"):  # another interceptor's generator
        call.state.note_bare(call.method)
        return attempt
    if not known and has_ended(attempt):  # another interceptor's continuation may have blocked
        return call.run(attempt)
    call.keep_request()
    hedging = call.hedging()
    attempts = CallAttempts(call) if hedging is None else HedgedAttempts(call, hedging)
    held = kind(attempts)
    attempts.start(attempt)
    return held


def _begin_plain(call: ClientCall) -> AnyCall:
    """Begin a call that is gRPC's own object, and report it if it is slow."""
    if call.is_late:
        return call.late()
    watch = call.state.watch(call.method, call.config)
    if watch is None:
        return call.first()
    try:
        attempt = call.first()
    except BaseException:
        watch.cancel()
        raise
    call_at_end(attempt, watch.cancel)
    return attempt


class RetryingCall(grpc.Call, grpc.Future):
    """One call, whatever number of attempts it takes. Dropping it cancels it, as with gRPC's own.

    Methods block where those of gRPC's own calls do.
    """

    def __init__(self, attempts: _CallEnd) -> None:
        self._attempts = attempts

    # --- grpc.Call ---

    def initial_metadata(self) -> Metadata:
        """Wait for the initial metadata of the server."""
        return self._attempts.initial_metadata()

    def trailing_metadata(self) -> Metadata:
        """Wait for the end, and give the metadata that came with it."""
        metadata: Metadata = self._attempts.wait().trailing_metadata()
        return metadata

    def code(self) -> grpc.StatusCode:
        """Wait for the end, and give its status code."""
        code: grpc.StatusCode = self._attempts.wait().code()
        return code

    def details(self) -> str:
        """Wait for the end, and give its status details."""
        details: str = self._attempts.wait().details()
        return details

    def debug_error_string(self) -> str:
        """Wait for the end, and give gRPC core's description of a failure."""
        describe = getattr(self._attempts.wait(), "debug_error_string", None)
        return "" if describe is None else describe()

    def is_active(self) -> bool:
        return not self.done()

    def time_remaining(self) -> float | None:
        """Seconds until its deadline, for all attempts together; None without one."""
        return self._attempts.seconds_left()

    def add_callback(self, callback: Callable[[], object]) -> bool:
        """Call `callback()` at the end, on a worker thread; False if it has ended."""
        return self._attempts.add_callback(callback)

    # --- grpc.Future ---

    def cancel(self) -> bool:
        """End the call, during an attempt or between two; False if it has ended."""
        return self._attempts.cancel()

    def cancelled(self) -> bool:
        final = self._attempts.final
        return final is not None and bool(final.cancelled())

    def running(self) -> bool:
        return not self.done()

    def done(self) -> bool:
        self._attempts.look()
        return self._attempts.final is not None

    def result(self, timeout: float | None = None) -> Any:
        """Wait for the end and give the response.

        Raises:
            grpc.FutureTimeoutError: It took longer than `timeout` seconds; the call goes on.
            grpc.FutureCancelledError: It was canceled on this side.
            grpc.RpcError: It failed.
        """
        return self._attempts.wait(timeout).result()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the end and give the failure, None if it succeeded; raises as `result`."""
        error: BaseException | None = self._attempts.wait(timeout).exception()
        return error

    def traceback(self, timeout: float | None = None) -> TracebackType | None:
        """Wait for the end and give the failure's traceback; raises as `result`."""
        traceback: TracebackType | None = self._attempts.wait(timeout).traceback()
        return traceback

    def add_done_callback(self, fn: Callable[[Self], object]) -> None:
        """Call `fn(self)` at the end, on a worker thread; at once, on this one, if it has ended."""
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
    """The same for a response stream: an iterator too."""

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        """Wait for the next message."""
        return self._attempts.next_message()

    next = __next__


Callback = tuple["Callable[..., object]", tuple[object, ...]]


def run_callbacks(method: str, callbacks: list[Callback]) -> None:
    """Call what was added to a call that has ended, each group in order.

    Callbacks of ours run at once. Those of users run on a worker: one that blocks delays only
    others of the same method.
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


class _CallEnd:
    """How a call ends that its caller holds: what retried and hedged calls have in common."""

    def __init__(self, call: ClientCall) -> None:
        self.call = call
        self._context = copy_context()  # of the caller: other interceptors may read it
        self._changed = threading.Condition()
        self.final: AnyCall = None
        self._answering = False  # the last attempt has failed: too late to cancel
        self._callbacks: list[Callback] = []
        self._timeout: Timeout | None = None
        self._watch: Timeout | None = None

    def wait(self, timeout: float | None = None) -> AnyCall:
        """Wait for the end, and give the call whose outcome is the caller's.

        Raises:
            grpc.FutureTimeoutError: It took longer than so many seconds.
        """
        with self._changed:
            if not self._wait_for(lambda: self.final is not None, timeout):
                raise grpc.FutureTimeoutError
        return self.final

    def _wait_for(self, happened: Callable[[], bool], limit_s: float | None = None) -> bool:
        """Wait under the lock until something has happened; False if it has not in time."""
        until = None if limit_s is None else time.monotonic() + limit_s
        while True:
            left_s = LOOK_INTERVAL_S
            if until is not None:
                left_s = min(left_s, until - time.monotonic())
            if self._changed.wait_for(happened, max(0, left_s)):
                return True
            if left_s < LOOK_INTERVAL_S:
                return False
            self.look()

    def look(self) -> None:
        """Check what no event reports."""

    def end_waiting(self) -> None:
        """Wait for no further attempt: the channel is closed."""
        raise NotImplementedError

    def seconds_left(self) -> float | None:
        """Until its deadline; None without one."""
        return self.call.seconds_left()

    def add_callback(self, callback: Callable[..., object], *args: object) -> bool:
        """Call a function at the end, a user's on a worker; False if the call has ended."""
        with self._changed:
            if self.final is None:
                self._callbacks.append((callback, args))
                return True
        return False

    def cancel(self, details: str = BY_USER) -> bool:
        """End the call; False if it has ended, or is about to."""
        raise NotImplementedError

    def drop(self) -> None:
        """End the call because its caller has dropped it."""
        if self.final is None:
            self.cancel(DROPPED)

    def initial_metadata(self) -> Metadata:
        """Wait for the server's initial metadata."""
        raise NotImplementedError

    def next_message(self) -> Any:
        """Give the next message of a response stream."""
        raise NotImplementedError

    def _end(self, call: AnyCall, failure: BaseException, *, received: bool = False) -> None:
        """End the call after its last attempt, which failed. On a worker."""
        with self._changed:
            if self.final is not None:
                return
            self._answering = True
        try:
            call = self.call.end(call, failure, received=received)
        except FailbackError as refusal:
            call = refusal  # a whole call, too
        self._finish(call)

    def _finish(self, final: AnyCall) -> bool:
        """Let the call end with this; False if it has ended already."""
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
        except BaseException as error:  # noqa: BLE001 - it is the caller's
            self._finish(_broken(error))


class CallAttempts(_CallEnd):
    """The attempts of one call, one after the other."""

    def __init__(self, call: ClientCall) -> None:
        super().__init__(call)
        self._attempt: Any = None  # the one that runs, or ended last
        self._judging = False  # the attempt has failed, and it is not decided what follows
        self._received = False  # the caller has a message or metadata of the attempt
        self._readers = 0  # threads that wait for a message of the attempt
        self._stalled: Any = None  # the attempt that was canceled because it sent nothing
        self._reading: object = None  # the read that waits for a message
        self._backoff: tuple[Timer, NextAttempt, Callable[[], object]] | None = None
        """While it waits for a retry: on which timer, which, and what to do if that is stopped."""

    # --- Attempts ---

    def start(self, attempt: AnyCall) -> None:
        """Go on from the first attempt."""
        self._watch = self.call.state.watch(self.call.method, self.call.config)
        self._follow(attempt)

    def _follow(self, attempt: AnyCall) -> None:
        with self._changed:
            self._attempt = attempt
            self._readers = 0
            self._judging = False
            over = self.final is not None
            self._changed.notify_all()
        if over:
            attempt.cancel()  # the call was canceled while this attempt was made
        attempt.add_done_callback(InternalCallback(self._ended, attempt))

    def _ended(self, attempt: AnyCall, _: object) -> None:  # a wrapped call gives what it wraps
        """Record an attempt's end. On gRPC's thread, or on the thread that canceled it."""
        try:
            failure = failure_of(attempt)
        except BaseException as error:  # noqa: BLE001 - of a foreign call; gRPC's thread must go on
            failure = error
        self._judge(attempt, failure)

    def _judge(self, attempt: AnyCall, failure: BaseException | None) -> None:
        with self._changed:
            if self.final is not None or self._attempt is not attempt or self._judging:
                return
            self._judging = failure is not None
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
            step = self.call.after(failure, received=received)
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
        """End the call although a retry was decided: its timer was stopped or is full."""
        self.call.stopped(failure)
        self._end(attempt, failure, received=received)

    def _has_received(self) -> bool:
        """Whether the caller has got something of the failed attempt, or is about to.

        A thread of the caller's may have read a message that came before the failure, and not have
        counted it yet. No thread begins to read now, and those that read need not wait for the
        server, so they will soon be through. If one is not, it reads a foreign call, and its
        message is dropped.
        """
        with self._changed:
            self._changed.wait_for(lambda: not self._readers, READERS_TIMEOUT_S)
            return self._received

    def _wait_until_due(self, step: NextAttempt, end: Callable[[], object]) -> bool:
        """Make an attempt when it is due, or `end` if the timer is stopped; False if it is now."""
        state = self.call.state
        timer = state.timer
        delay_s = (step.at_ns - state.now_ns()) / 1e9
        if delay_s <= 0:
            self._make(step)
            return True
        self._backoff = (timer, step, end)
        if self.call.waiting is not None:
            self.call.waiting.add(self)
        timeout = state.wake(partial(self._due, step), delay_s, f"retry of {self.call.method}")
        if timeout is None:
            with self._changed:
                waited, self._backoff = self._backoff is not None, None
            return not waited  # `look` has ended it meanwhile
        with self._changed:
            self._timeout = timeout
            over = self.final is not None
        if over:
            timeout.cancel()
        return True

    def _due(self, step: NextAttempt, _: Timeout) -> None:
        with self._changed:
            backoff = self._backoff
            if backoff is None or backoff[1] is not step:  # made already, as the timer was late
                return
            self._backoff = None
        self._run_on_worker(partial(self._make, step))

    def look(self) -> None:
        """Make a retry that the timer is late with; end the call if the timer was stopped."""
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
        """Make the next attempt now, if the call waits for one: its channel is closed."""
        with self._changed:
            backoff, self._backoff = self._backoff, None
        if backoff is not None:
            self._run_on_worker(partial(self._make, backoff[1]))

    def _make(self, step: NextAttempt) -> None:
        if self.final is None:
            self._follow(self.call.make(step))

    # --- The end ---

    def _finish(self, final: AnyCall) -> bool:
        self._backoff = None
        return super()._finish(final)

    def cancel(self, details: str = BY_USER) -> bool:
        """End the call; False if it has ended, or is about to."""
        with self._changed:
            if self.final is not None or self._answering:
                return False
            attempt = None if self._judging else self._attempt
        if attempt is not None:
            if attempt.cancel():
                return self._finish(attempt)
            if has_ended(attempt) and failure_of(attempt) is None:
                return False
        return self._finish(FinishedError(grpc.StatusCode.CANCELLED, details, cancelled=True))

    def wait(self, timeout: float | None = None) -> AnyCall:
        """Wait for the end, as the base does; but never for a single-threaded stream."""
        if self.final is None and is_single_threaded(self._attempt):
            raise grpc.experimental.UsageError(
                "the end of a single-threaded stream is known when it was read to its end"
            )
        return super().wait(timeout)

    # --- What comes before the end ---

    def initial_metadata(self) -> Metadata:
        """Wait for the server's initial metadata. If they are not empty, no retry follows."""
        while True:
            attempt = self._current()
            if attempt is self.final:
                return metadata_of(attempt.initial_metadata())
            metadata = metadata_of(attempt.initial_metadata())
            with self._changed:
                if not metadata:  # a failure without any looks the same, until its status comes
                    self._changed.wait_for(partial(self._is_closed, attempt), TRAILERS_TIMEOUT_S)
                if self._is_open(attempt):
                    self._received = self._received or metadata != ()
                    return metadata

    def next_message(self) -> Any:
        """Give the caller the next message, of whichever attempt it is to come from."""
        while True:
            attempt = self._current(reads=True)
            if attempt is self.final:
                return next(attempt)
            try:
                message, is_callers = self._read(attempt)
            except (StopIteration, grpc.RpcError) as end:
                if not has_ended(attempt):  # a foreign call, which does not know its own end
                    self._judge(attempt, None if isinstance(end, StopIteration) else end)
                with self._changed:
                    self._wait_for(partial(self._is_settled, attempt))
                if self.final is attempt:
                    raise
            else:
                if is_callers:
                    return message

    def _current(self, *, reads: bool = False) -> AnyCall:
        """The attempt that is worth waiting for, to read its messages or not, or the final call."""
        with self._changed:
            self._wait_for(lambda: self.final is not None or self._is_open(self._attempt))
            if self.final is not None:
                return self.final
            self._readers += reads
            return self._attempt

    def _is_open(self, attempt: AnyCall) -> bool:
        """Whether the caller gets the messages of this attempt, as far as is known."""
        return attempt is not None and self._attempt is attempt and not self._judging

    def _is_closed(self, attempt: AnyCall) -> bool:
        return not self._is_open(attempt)

    def _is_settled(self, attempt: AnyCall) -> bool:
        return self.final is not None or self._attempt is not attempt

    def _read(self, attempt: AnyCall) -> tuple[Any, bool]:
        """Read the next message of an attempt; with whether the caller gets it."""
        came = False
        try:
            message = self._next_in_time(attempt)
            came = True
        finally:
            is_callers = self._has_read(attempt, came=came)
        return message, is_callers

    def _has_read(self, attempt: AnyCall, *, came: bool) -> bool:
        """Note a message that came; if the caller gets it, no retry follows."""
        with self._changed:
            if self._attempt is not attempt:
                return False
            self._readers -= 1
            is_callers = self.final in (None, attempt)
            self._received = self._received or (came and is_callers)
            if self._judging:
                self._changed.notify_all()  # `_has_received` waits for the readers
            return is_callers

    # --- message_timeout ---

    def _next_in_time(self, attempt: AnyCall) -> Any:
        call = self.call
        if not call.config.has_message_timeout:
            return next(attempt)
        reading = self._reading = object()
        timeout = call.state.wake(
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
        """Cancel an attempt whose reader has waited for too long."""
        with self._changed:
            over = self.final is not None
            if self._reading is not reading or not self._is_open(attempt) or over:
                return
            self._stalled = attempt
        if not attempt.cancel():
            self._stalled = None  # it has just ended by itself

    def _stalled_error(self, attempt: AnyCall) -> FinishedError:
        call = self.call
        return FinishedError(
            grpc.StatusCode.DEADLINE_EXCEEDED,
            call.state.silent(call.method, call.config),
            initial=metadata_of(attempt.initial_metadata()),
        )


class HedgedAttempts(_CallEnd):
    """The attempts of one hedged unary call, several at the same time (gRFC A6)."""

    def __init__(self, call: ClientCall, plan: HedgingPlan) -> None:
        super().__init__(call)
        self._plan = plan  # under the lock
        self._running: list[AnyCall] = []
        self._failed: tuple[AnyCall, BaseException] | None = None  # the attempt that failed last

    def start(self, attempt: AnyCall) -> None:
        """Go on from the first attempt."""
        self._watch = self.call.state.watch(self.call.method, self.call.config)
        if self.call.waiting is not None:
            self.call.waiting.add(self)
        self._follow(attempt)
        self._go_on()

    def _follow(self, attempt: AnyCall) -> None:
        with self._changed:
            over = self.final is not None or self._answering
            if not over:
                self._running.append(attempt)
        if over:
            attempt.cancel()
        attempt.add_done_callback(InternalCallback(self._ended, attempt))

    def _go_on(self) -> None:
        """Send the attempts that are due, have the next one sent in time, or end the call."""
        state, call = self.call.state, self.call
        while True:
            with self._changed:
                if self.final is not None or self._answering:
                    return
                step = self._plan.due(state.now_ns())
                failed = self._failed if self._plan.is_over else None
                next_ns = self._plan.next_ns
            if step is None:
                break
            emit(HedgeSent(call.method, step.number))
            self._follow(call.make(step))
        if failed is not None:
            self._end(*failed)
        elif next_ns != NEVER:
            self._wake_at(next_ns)

    def _wake_at(self, at_ns: int) -> None:
        """Have the next attempt sent in time; send no more if the timer takes no timeouts."""
        state = self.call.state
        delay_s = max(0, at_ns - state.now_ns()) / 1e9
        timeout = state.wake(self._due, delay_s, f"hedging of {self.call.method}")
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

    def look(self) -> None:
        """Go on without the timer if it is late or was stopped, and no attempt runs."""
        with self._changed:
            next_ns = self._plan.next_ns
            waits = self.final is None and not self._running and next_ns != NEVER
        state = self.call.state
        if waits and (state.timer.stopped or state.now_ns() >= next_ns):
            with self._changed:
                failed = self._failed if state.timer.stopped else None
            self._run_on_worker(self._go_on if failed is None else partial(self._end, *failed))

    def end_waiting(self) -> None:
        """Send no more attempts, and end the call if none runs: its channel is closed."""
        with self._changed:
            self._plan.stop()
            over = self._plan.is_over
        if over:
            self._finish(_closed())

    def _ended(self, attempt: AnyCall, _: object) -> None:
        """Record an attempt's end. On gRPC's thread, or on the thread that canceled it."""
        try:
            failure = failure_of(attempt)
        except BaseException as error:  # noqa: BLE001 - of a foreign call; gRPC's thread must go on
            failure = error
        with self._changed:
            if self.final is not None or self._answering or attempt not in self._running:
                return
            self._running.remove(attempt)
        if failure is None:
            self._finish(attempt)
        else:
            self._run_on_worker(partial(self._has_failed, attempt, failure))

    def _has_failed(self, attempt: AnyCall, failure: BaseException) -> None:
        known = has_status(failure) and not is_channel_closed(failure)
        with self._changed:
            self._failed = attempt, failure
            over = not known or self._plan.ended(self.call.state.now_ns(), result_of(failure))
        if over:
            self._end(attempt, failure)
        else:
            self._go_on()

    def _end(self, call: AnyCall, failure: BaseException, *, received: bool = False) -> None:
        with self._changed:
            if self._answering:  # several attempts may have failed at the same moment
                return
            self._answering = True
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

    def cancel(self, details: str = BY_USER) -> bool:
        """End the call; False if it has ended, or is about to."""
        with self._changed:
            if self.final is not None or self._answering:
                return False
        return self._finish(FinishedError(grpc.StatusCode.CANCELLED, details, cancelled=True))

    def initial_metadata(self) -> Metadata:
        """Wait for the end: before that it is not known which attempt is the caller's."""
        return metadata_of(self.wait().initial_metadata())


def _broken(error: BaseException) -> FinishedError:
    """The call that ends with an error of no status, as grpc makes it of an interceptor's."""
    details = f"Exception raised while intercepting the RPC: {error}"
    return FinishedError(grpc.StatusCode.INTERNAL, details, error=error)
