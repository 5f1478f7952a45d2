"""The calls of `grpc` that callers hold while attempts are made: `.future()` and response streams.

There are two cases:

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
    COLLECTED,
    InternalCallback,
    copy_of,
    failure_of,
    has_ended,
    is_single_threaded,
    metadata_tuple,
    run_at_end,
)
from rpcwheel._grpc.finished import FinishedError, FinishedResponse
from rpcwheel.durations import NEVER, to_ns, to_seconds
from rpcwheel.errors import FailbackError
from rpcwheel.rpc import TRIED, NextAttempt, Stop

from .attempts import Attempts, State, Wait
from .client_state import TIMER_CHECK_INTERVAL_S
from .sync_call import ClientCall, channel_closed

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from rpcwheel._grpc.calls import AnyCall, Details, Metadata
    from rpcwheel.rpc import Kind
    from rpcwheel.timer import Timeout
    from rpcwheel.timer.api import Timer

    from .client_state import ClientState

READERS_TIMEOUT_S: Final = 0.5
"""How long to wait, after an attempt has failed, for threads that still read its last message."""

TRAILERS_TIMEOUT_S: Final = 0.02
"""How long to wait, after empty initial metadata, for a failure that may follow at once."""


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
