"""Calls of `grpc.aio` that may need more than one attempt, or another end than their failure.

A `CallFactory` begins the calls of one method. It gives the caller one of two objects:

* If the policies of the method set no more than a deadline: what gRPC itself gives.
* Otherwise a `RetryingCall`, a `grpc.aio.Call` of the same kind that owns the attempts. It retries,
  answers with a default, hands the call to failback, watches slow calls and silent streams.

How an attempt is begun is the caller's matter: `start(request, timeout=..., metadata=...,
wait_for_ready=...)` gives a call (a multicallable of a channel does), or a coroutine that gives one
(a client interceptor does; further interceptors may run in it). Only for a coroutine, and only from
the second attempt on, is there a task.

Everything runs on the loop. The timer calls in through the loop. What decides is pure, in `config`
and `retry`. Code of users (iterators, predicates, wait objects) runs in a copy of the caller's
context.
"""

from __future__ import annotations

import asyncio
import contextlib
from contextvars import copy_context
from functools import partial
from types import CoroutineType
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import grpc

from rpcwheel._concurrency.loop import call_on_loop
from rpcwheel._grpc.aio_finished import (
    CANCELLED,
    CANCELLED_HERE,
    OK,
    failed_call,
    finished_call,
    refused_by,
    status_of,
)
from rpcwheel._grpc.aio_relay import (
    MADE_UP_DETAILS,
    STATUS_CHECK_DELAYS_S,
    AwaitedRelay,
    ReadRelay,
    Relay,
    WouldBlockError,
    WrittenRelay,
    failure_of,
    has_ended,
    has_made_up_status,
)
from rpcwheel.durations import NEVER, to_ns, to_seconds
from rpcwheel.errors import FailbackError
from rpcwheel.events import CallbackFailed, HedgeSent, RetryStopped, emit
from rpcwheel.rpc import TRIED, Kind, NextAttempt, Stop

from .aio_requests import RequestStream
from .config import (
    ANSWER_KEY,
    CALL_OPTIONS,
    GATHER_S,
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
from .retry import COMMITTED, NO_TIME, TIMER_STOPPED, result_of, with_attempt

if TYPE_CHECKING:
    import weakref
    from collections.abc import Callable, Iterable

    from rpcwheel._grpc.aio_finished import FinishedCall
    from rpcwheel.timer import Timeout

    from .config import ClientState, MethodConfig
    from .retry import Metadata, RetryPlan

__all__ = ["CallFactory", "RetryingCall", "Start"]

Start: TypeAlias = "Callable[..., Any]"
"""Begins an attempt: `start(request, timeout=..., metadata=..., wait_for_ready=...)` gives a call,
or a coroutine that gives one."""

TIMER_GRACE_S: Final = 1.0
"""How late a timer may be, within the deadline, before the loop goes on without it."""


class CallFactory:
    """Begins the calls of one method of one client."""

    def __init__(
        self,
        state: ClientState,
        method: str,
        kind: Kind,
        waiting: weakref.WeakSet[RetryingCall] | None = None,
        config: MethodConfig | None = None,
    ) -> None:
        """Note what follows from the method's configuration.

        Args:
            state: What all calls of the client share.
            method: The full name.
            kind: Which of the four.
            waiting: Calls are added to it when they wait for their next attempt.
            config: Another configuration than the method has by the policies of the client.
        """
        self.state = state
        self.method = method
        self.kind = kind
        self.waiting = waiting
        config = self.config = state.configs.config_for(method) if config is None else config
        self.has_other_end = config.failback is not None or config.default_response is not None
        silent = kind.streams_responses and config.has_message_timeout
        hedged = config.hedging is not None and kind is Kind.UNARY_UNARY
        self.is_native = not (config.recovers or hedged or silent or config.slow_ns != NEVER)
        self.call_class: type[RetryingCall] = _HedgedCall if hedged else _CALLS[kind]

    def _in_context(self) -> CallFactory:
        """The factory for calls that follow the `call_options` of the running context."""
        config = self.state.config_of(self.method)
        return CallFactory(self.state, self.method, self.kind, self.waiting, config)

    def begin(
        self,
        start: Start,
        request: Any,
        timeout: float | None,
        metadata: Iterable[tuple[str, str | bytes]] | None,
        wait_for_ready: bool | None,
    ) -> Any:
        """Begin a call.

        Args:
            start: Begins an attempt.
            request: The request, an iterator of requests, or None if they will be written.
            timeout: Seconds, as the caller gave it.
            metadata: As the caller gave it.
            wait_for_ready: As the caller gave it.

        Returns:
            What the caller holds. If `start` gives coroutines: that, or a coroutine that gives it.

        Raises:
            Exception: What `start` raised.
        """
        calls = self if CALL_OPTIONS.get() is None else self._in_context()
        config = calls.config
        own_ns = None if timeout is None else to_ns(timeout, what="timeout")
        now_ns, deadline_ns, attempt_ns = self.state.open(config, own_ns)
        is_late = now_ns >= deadline_ns
        if is_late and not calls.has_other_end:
            return _late(self.kind)
        left_s = seconds_left(attempt_ns, now_ns)
        if wait_for_ready is None:
            wait_for_ready = config.wait_for_ready
        if calls.is_native:
            return start(request, timeout=left_s, metadata=metadata, wait_for_ready=wait_for_ready)
        given = start, request, timeout, metadata, wait_for_ready
        call = calls.call_class(calls, config, *given, now_ns, deadline_ns)
        if is_late:
            return call.fail_late()
        return call.first_attempt(left_s)


class RetryingCall(Relay):
    """A call, and its attempts one after the other.

    Made for every call, and most succeed: what only a failed attempt needs is looked up then.
    """

    # Defaults of the class: a call that succeeds sets few of them.
    _requests: RequestStream | None = None  # from an iterator, and may be sent again
    _plan: RetryPlan | None = None  # once an attempt has failed
    _attempts = 1
    _failed: tuple[Any, grpc.RpcError, NextAttempt] | None = None  # while it waits for the next
    _timeout: Timeout | None = None  # of that wait
    _timer_check: asyncio.TimerHandle | None = None  # whether the timer is late or was stopped
    _task: asyncio.Task[None] | None = None  # that begins an attempt, or that reads the requests

    def __init__(
        self,
        factory: CallFactory,
        config: MethodConfig,
        start: Start,
        request: Any,
        timeout: float | None,
        metadata: Iterable[tuple[str, str | bytes]] | None,
        wait_for_ready: bool | None,
        started_ns: int,
        deadline_ns: int,
    ) -> None:
        """Make a call without an attempt. Arguments as of `CallFactory.begin`."""
        self.kind = factory.kind
        self.method = factory.method
        self._factory = factory
        self._state = factory.state
        self._config = config
        self._start = start
        self._own_timeout = timeout
        self._metadata: Metadata | None = None if metadata is None else tuple(metadata)
        self._wait_for_ready = wait_for_ready
        self._started_ns = started_ns
        self._deadline_ns = deadline_ns
        self._context = copy_context()
        self._slow = factory.state.watch(factory.method, config)
        if config.resends or config.hedging is not None:
            if self.kind.streams_requests:
                if request is not None and config.keep_bytes is not None:
                    self._requests = RequestStream(request, config.keep_bytes)
            elif request.__class__ is not bytes:
                request = copy_of(request)  # the caller may change it; 2 µs for a small message
        self._request = request

    def time_remaining(self) -> float | None:
        """Seconds until the deadline of all attempts together; None without a deadline."""
        return seconds_left(self._deadline_ns, self._state.now_ns())

    def end_waiting(self) -> None:
        """Cancel the call if no attempt runs, and make no more: its channel is closed."""
        if self.is_current(None):
            self.cancel()

    # --- The first attempt ---

    def first_attempt(self, timeout: float | None) -> Any:
        """Make it. Returns this call, or a coroutine that gives it."""
        try:
            metadata = None if self._metadata is None else grpc.aio.Metadata(*self._metadata)
            attempt = self._begin_attempt(timeout, metadata)
        except BaseException:  # such as `UsageError` of a channel that is closed
            self._release()
            raise
        if isinstance(attempt, CoroutineType):
            return self._first_awaited(attempt)
        self.begin(attempt)
        return self

    async def _first_awaited(self, attempt: Any) -> RetryingCall:
        try:
            call = await attempt
        except grpc.RpcError as error:  # of an interceptor below, that has awaited it
            call = failed_call(self.kind, error)
        except BaseException:
            self._release()
            raise
        self.begin(call)
        return self

    def fail_late(self) -> RetryingCall:
        """End the call without an attempt: its deadline had passed before it began."""
        self._attempts = 0
        call = _late(self.kind)
        assert call.error is not None  # noqa: S101 - for mypy
        self._conclude(call, status_of(call.error))
        return self

    def _begin_attempt(self, timeout: float | None, metadata: Any) -> Any:
        return self._start(
            self._request if self._requests is None else self._requests.replay(),
            timeout=timeout,
            metadata=metadata,
            wait_for_ready=self._wait_for_ready,
        )

    # --- After an attempt ---

    def _attempt_failed(self, call: Any, error: BaseException | None) -> None:
        if error is None:
            try:
                error = failure_of(call)
            except WouldBlockError:  # a foreign call, whose `done()` is true too early
                self.finish(call)
                return
        if error is None:
            self.finish(call)
        elif not isinstance(error, grpc.RpcError):
            self.finish(call if has_ended(call) else failed_call(self.kind, error))
        elif not self._config.recovers:
            self._fail(call, error)
        else:  # not here: this is deep inside of grpc, and in no caller's context
            soon = asyncio.get_running_loop().call_soon
            soon(self._judge, call, error, context=self._context)

    def _judge(self, call: Any, error: grpc.RpcError) -> None:
        """Decide what follows an attempt that failed with a status."""
        if not self.is_current(call):
            return  # canceled meanwhile
        state, config = self._state, self._config
        if self._plan is None:
            self._plan = state.resumed(config, self._started_ns, self._deadline_ns)
        result = result_of(error, committed=self.received or not self._can_resend)
        step = state.after(self.method, config, self._plan, result, self._attempts)
        if isinstance(step, NextAttempt):
            self.pause()
            self._failed = call, error, step
            self._wait_for_time(step)
        else:
            self._conclude(call, error)

    @property
    def _was_written(self) -> bool:
        """Whether the caller writes the requests, of which nothing is kept."""
        return bool(self.kind.streams_requests) and self._request is None

    @property
    def _can_resend(self) -> bool:
        if self._requests is None:
            return not self._was_written
        return self._requests.buffer.whole

    # --- The next attempt ---

    def _wait_for_time(self, step: NextAttempt) -> None:
        wait_ns = step.at_ns - self._state.now_ns()
        if wait_ns <= 0:
            self._next_attempt()
            return
        if self._factory.waiting is not None:
            self._factory.waiting.add(self)
        loop, wait_s = asyncio.get_running_loop(), wait_ns / 1e9
        resume = partial(self._context.run, self._resume)
        self._timeout = self._state.wake(lambda _: call_on_loop(loop, resume), wait_s, "retry")
        if self._timeout is None:
            self._stop_waiting(TIMER_STOPPED)
        else:
            left_s = self.time_remaining()
            late_s = min(wait_s, LOOK_INTERVAL_S) + TIMER_GRACE_S
            self._check_later(late_s if left_s is None else min(late_s, left_s), step)

    def _check_later(self, delay_s: float, step: NextAttempt) -> None:
        check = partial(self._check_timer, self._state.timer, step)
        later = asyncio.get_running_loop().call_later
        self._timer_check = later(delay_s, check, context=self._context)

    def _check_timer(self, timer: Any, step: NextAttempt) -> None:
        """Go on without the timer if it is late; end the call if it was stopped."""
        if timer.stopped:
            self._stop_waiting(TIMER_STOPPED)
        elif self._state.now_ns() >= step.at_ns:
            self._resume()
        else:  # a timer whose time is set by hand
            self._check_later(TIMER_GRACE_S, step)

    def _resume(self) -> None:
        if self._timeout is not None:  # else it was given up, or has ended
            self._end_wait()
            self._next_attempt()

    def _end_wait(self) -> None:
        if self._timeout is not None:
            self._timeout.cancel()
            self._timeout = None
        if self._timer_check is not None:
            self._timer_check.cancel()
            self._timer_check = None

    def _stop_waiting(self, why: Stop) -> None:
        """End the call although a retry was decided; `why` is for an event."""
        assert self._failed is not None  # noqa: S101 - for mypy
        call, error, _ = self._failed
        self._end_wait()
        self._failed = None
        code = status_of(error).code().name
        emit(RetryStopped(self.method, self._attempts, code, why.reason))
        self._conclude(call, error)

    def _next_attempt(self) -> None:
        """Make it, unless too many requests have been read since it was decided."""
        if self._failed is None or self.done():
            return
        if not self._can_resend:
            self._stop_waiting(COMMITTED)
            return
        step = self._failed[2]
        self._failed = None
        self._attempts = step.number
        left_s = seconds_left(step.deadline_ns, self._state.now_ns())
        metadata = grpc.aio.Metadata(*with_attempt(self._metadata, step.number))
        try:
            attempt = self._begin_attempt(left_s, metadata)
        except Exception as error:  # noqa: BLE001 - the caller gets it
            attempt = self._failed_to_begin(error)
        if isinstance(attempt, CoroutineType):
            self._task = asyncio.get_running_loop().create_task(self._begin_awaited(attempt))
        else:
            self.begin(attempt)

    async def _begin_awaited(self, attempt: Any) -> None:
        try:
            call = await attempt
        except asyncio.CancelledError as error:
            if self._task is None:  # by `_release`
                raise
            call = failed_call(self.kind, error)
        except Exception as error:  # noqa: BLE001 - the caller gets it
            call = self._failed_to_begin(error)
        self._task = None
        if self.done():
            call.cancel()
        else:
            self.begin(call)

    def _failed_to_begin(self, error: Exception) -> FinishedCall:
        if isinstance(error, grpc.aio.UsageError):  # the channel was closed meanwhile
            return finished_call(self.kind, CANCELLED, CANCELLED_HERE)
        return failed_call(self.kind, error)

    # --- The end ---

    def _release(self) -> None:
        if self._slow is not None:
            self._slow.cancel()
            self._slow = None
        if self._timeout is not None or self._timer_check is not None:
            self._end_wait()
        self._failed = None
        if self._task is not None:
            self._task.cancel()
            self._task = None
        if self._requests is not None:
            self._requests.close()

    def _conclude(self, call: Any, error: grpc.RpcError) -> None:
        """End the call with the failure of its last attempt, or as its policies say instead."""
        config = self._config
        outcome = self._state.outcome(
            self.method,
            config,
            error,
            attempts=self._attempts,
            started_ns=self._started_ns,
            received=self.received,
        )
        match outcome:
            case Outcome.FAIL:
                self._fail(call, error)
            case Outcome.DEFAULT_RESPONSE:
                assert config.default_response is not None  # noqa: S101 - for mypy
                self._answer(outcome, error, config.default_response.default)
            case Outcome.ENQUEUE if self.kind.streams_requests:
                self._enqueue_stream(call, error)
            case Outcome.ENQUEUE:
                self._enqueue(call, error, kept_request(self._request))

    def _fail(self, call: Any, error: grpc.RpcError) -> None:
        """End as the attempt has ended; grpc.aio may yet change the status of a request stream."""
        if self.kind.streams_requests:
            self.finish(failed_call(self.kind, error), source=call)
        else:
            self.finish(call)

    def _answer(self, outcome: Outcome, error: grpc.RpcError, default: object) -> None:
        """End with OK and a default."""
        status = status_of(error)
        by, details = answered_by(outcome, status.code().name, status.details())
        call = finished_call(
            self.kind,
            OK,
            details,
            result=messages_of(default) if self.kind.streams_responses else default,
            initial=status.initial_metadata(),
            trailing=(*(status.trailing_metadata() or ()), (ANSWER_KEY, by)),
        )
        self.finish(call)

    # --- Failback ---

    def _enqueue_stream(self, call: Any, error: grpc.RpcError) -> None:
        """Queue the call, once its requests are known to their end.

        If responses come as a stream, the requests may depend on them, and are not read on.
        """
        requests = self._requests
        is_known = requests is not None and requests.is_known
        if not is_known and not self._state.queues(self.method, self._config, error):
            self._fail(call, error)
            return
        if requests is not None and requests.is_plain and not is_known:
            requests.read_plain_rest()
        if requests is None or requests.is_over or self.kind.streams_responses:
            self._enqueue_known(call, error)
            return
        self.pause()
        rest = self._read_rest(requests, call, error)
        loop = asyncio.get_running_loop()
        self._task = loop.create_task(rest, context=self._context.copy())

    async def _read_rest(self, requests: RequestStream, call: Any, error: grpc.RpcError) -> None:
        left_s = self.time_remaining()
        with contextlib.suppress(Exception):  # the user's iterator raised; then it is not known
            async with asyncio.timeout(GATHER_S if left_s is None else min(GATHER_S, left_s)):
                await requests.read_rest()
        self._task = None
        self._enqueue_known(call, error)

    def _enqueue_known(self, call: Any, error: grpc.RpcError) -> None:
        if self._requests is not None and self._requests.is_known:
            self._enqueue(call, error, *self._requests.buffer.messages)
            return
        why = "were written" if self._was_written else "are not all known"
        error.add_note(f"{self.method}: not queued by failback, its requests {why}")
        self._fail(call, error)

    def _enqueue(self, call: Any, error: grpc.RpcError, *requests: object) -> None:
        config, policy = self._config, self._config.failback
        assert policy is not None  # noqa: S101 - for mypy
        delivery = Delivery(
            self.method,
            self.kind,
            self._start,
            timeout=resend_timeout(self._own_timeout, config),
            metadata=kept_metadata(self._metadata, policy),
            wait_for_ready=self._wait_for_ready,
            attempts=self._attempts,
        )
        try:
            queue = self._state.queue_of(policy, config.queue)
            queued = queue.park(error, delivery, *requests)
        except FailbackError as refusal:
            self.finish(failed_call(self.kind, refused_by(refusal, error)))
            return
        except Exception as raised:  # noqa: BLE001 - a user's predicate or wait object
            emit(CallbackFailed(self.method, "failback", raised))
            queued = False
        if queued:
            self._answer(Outcome.ENQUEUE, error, policy.default)
        else:
            self._fail(call, error)

    # --- Silent response streams ---

    def _limit_silence(self, call: Any) -> _SilenceLimit | None:
        """Limit the wait for a message; the result is to be canceled when the wait is over."""
        if not self._config.has_message_timeout:
            return None
        limit = _SilenceLimit()
        loop = asyncio.get_running_loop()
        end = partial(self._end_silence, call, limit)
        delay_s = to_seconds(self._config.message_timeout_ns)
        wake = self._state.wake
        limit.timeout = wake(lambda _: call_on_loop(loop, end), delay_s, "message_timeout")
        return limit

    def _end_silence(self, call: Any, limit: _SilenceLimit) -> None:
        """End an attempt that sent nothing for too long."""
        if limit.over or not self.is_current(call):
            return
        details = self._state.silent(self.method, self._config)
        self.begin(finished_call(self.kind, grpc.StatusCode.DEADLINE_EXCEEDED, details))
        call.cancel()


class _UnaryUnary(RetryingCall, AwaitedRelay, grpc.aio.UnaryUnaryCall[Any, Any]):
    pass


class _HedgedCall(_UnaryUnary):
    """A unary call whose attempts may run at the same time (gRFC A6).

    It shows no attempt while they run, and ends with the one that decides.
    """

    _last: tuple[Any, grpc.RpcError] | None = None  # the attempt that failed last

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._running: list[Any] = []
        self._tasks: set[asyncio.Task[None]] = set()
        hedges = self._state.hedged(self._config, self._started_ns, self._deadline_ns)
        assert hedges is not None  # noqa: S101 - for mypy
        self._hedges = hedges
        self._tried: list[object] = []  # subchannels, by the balancer

    def _begin_attempt(self, timeout: float | None, metadata: Any) -> Any:
        token = TRIED.set(self._tried)
        try:
            return super()._begin_attempt(timeout, metadata)
        finally:
            TRIED.reset(token)

    def first_attempt(self, timeout: float | None) -> Any:
        try:
            metadata = None if self._metadata is None else grpc.aio.Metadata(*self._metadata)
            attempt = self._begin_attempt(timeout, metadata)
        except BaseException:
            self._release()
            raise
        if self._factory.waiting is not None:
            self._factory.waiting.add(self)
        self._follow(attempt)
        self._send_due()
        return self

    def _follow(self, attempt: Any) -> None:
        """Wait for the end of an attempt, or for the coroutine that gives it."""
        if isinstance(attempt, CoroutineType):
            task = asyncio.get_running_loop().create_task(self._begin_awaited(attempt))
            self._tasks.add(task)
            task.add_done_callback(partial(self._has_begun, attempt))
        elif self.done():
            attempt.cancel()
        else:
            self._running.append(attempt)
            if has_ended(attempt):  # one that an interceptor has answered takes no callbacks
                self._hedge_ended(attempt, None)
            else:
                attempt.add_done_callback(partial(self._hedge_ended, attempt))

    def _has_begun(self, attempt: Any, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        attempt.close()  # it was not started if the task was canceled before its first step

    async def _begin_awaited(self, attempt: Any) -> None:
        try:
            call = await attempt
        except asyncio.CancelledError as error:
            if self.done():
                raise
            call = failed_call(self.kind, error)
        except Exception as error:  # noqa: BLE001 - the caller gets it
            call = self._failed_to_begin(error)
        self._follow(call)

    def end_waiting(self) -> None:
        self._hedges.stop()
        if not self._running and not self._tasks:
            self.cancel()

    def _hedge_ended(self, attempt: Any, _: Any) -> None:
        if self.done() or attempt not in self._running:
            return
        self._running.remove(attempt)
        try:
            error = failure_of(attempt)
        except BaseException as raised:  # noqa: BLE001 - an interceptor's below; the caller gets it
            error = raised
        if error is None:
            self.finish(attempt)
        else:  # not here: this is deep inside of grpc, and in no caller's context
            soon = asyncio.get_running_loop().call_soon
            soon(self._hedge_failed, attempt, error, context=self._context)

    def _hedge_failed(self, attempt: Any, error: BaseException) -> None:
        if self.done():
            return
        if not isinstance(error, grpc.RpcError):
            self.finish(attempt if has_ended(attempt) else failed_call(self.kind, error))
            return
        self._last = attempt, error
        if self._hedges.ended(self._state.now_ns(), result_of(error)):
            self._end_hedging()
        else:
            self._send_due()

    def _send_due(self) -> None:
        """Send the attempts that are due, have the next one sent in time, or end the call."""
        while not self.done() and (step := self._hedges.due(self._state.now_ns())) is not None:
            self._attempts = step.number
            emit(HedgeSent(self.method, step.number))
            left_s = seconds_left(step.deadline_ns, self._state.now_ns())
            metadata = grpc.aio.Metadata(*with_attempt(self._metadata, step.number))
            try:
                attempt = self._begin_attempt(left_s, metadata)
            except Exception as error:  # noqa: BLE001 - the caller gets it
                attempt = self._failed_to_begin(error)
            self._follow(attempt)
        if self.done():
            return
        if self._hedges.is_over:
            self._end_hedging()
        elif self._hedges.next_ns != NEVER:
            self._send_later()

    def _send_later(self) -> None:
        self._end_wait()
        loop = asyncio.get_running_loop()
        delay_s = max(0, self._hedges.next_ns - self._state.now_ns()) / 1e9
        send = partial(self._context.run, self._send_due)
        self._timeout = self._state.wake(lambda _: call_on_loop(loop, send), delay_s, "hedging")
        check = partial(self._check_hedges, self._state.timer)
        self._timer_check = loop.call_later(delay_s + TIMER_GRACE_S, check, context=self._context)

    def _check_hedges(self, timer: Any) -> None:
        """Go on without the timer if it is late; end the call if it was stopped, and none runs."""
        self._timer_check = None
        if self.done() or self._hedges.next_ns == NEVER:
            return
        if self._state.now_ns() >= self._hedges.next_ns:
            self._send_due()
        elif timer.stopped and not self._running and not self._tasks:
            self._end_hedging()
        else:
            check = partial(self._check_hedges, timer)
            later = asyncio.get_running_loop().call_later
            self._timer_check = later(TIMER_GRACE_S, check, context=self._context)

    def _end_hedging(self) -> None:
        """End the call after its last attempt, which failed."""
        assert self._last is not None  # noqa: S101 - for mypy
        self._cancel_running()  # before the call is queued: it must not succeed as well
        self._conclude(*self._last)

    def _cancel_running(self) -> None:
        running, self._running = self._running, []
        self._hedges.canceled(len(running))
        for attempt in running:
            attempt.cancel()
        for task in tuple(self._tasks):
            task.cancel()

    def _release(self) -> None:
        super()._release()
        self._cancel_running()


class _UnaryStream(RetryingCall, ReadRelay, grpc.aio.UnaryStreamCall[Any, Any]):
    pass


class _StreamUnary(RetryingCall, WrittenRelay, AwaitedRelay, grpc.aio.StreamUnaryCall[Any, Any]):
    pass


class _StreamStream(RetryingCall, WrittenRelay, ReadRelay, grpc.aio.StreamStreamCall[Any, Any]):
    pass


_CALLS: Final[dict[Kind, type[RetryingCall]]] = {
    Kind.UNARY_UNARY: _UnaryUnary,
    Kind.UNARY_STREAM: _UnaryStream,
    Kind.STREAM_UNARY: _StreamUnary,
    Kind.STREAM_STREAM: _StreamStream,
}


class _SilenceLimit:
    """A wait for a message that may last for so long only."""

    __slots__ = ("over", "timeout")

    def __init__(self) -> None:
        self.over = False
        self.timeout: Timeout | None = None

    def cancel(self) -> None:
        """The message has come, or the wait was given up."""
        self.over = True
        if self.timeout is not None:
            self.timeout.cancel()


class Delivery:
    """Makes a queued call again, in one attempt. Called by failback with the call's requests."""

    __slots__ = (
        "_attempts",
        "_kind",
        "_metadata",
        "_start",
        "_timeout",
        "_wait_for_ready",
        "label",
    )

    def __init__(
        self,
        method: str,
        kind: Kind,
        start: Start,
        *,
        timeout: float,
        metadata: Metadata,
        wait_for_ready: bool | None,
        attempts: int,
    ) -> None:
        """Keep what an attempt is made with.

        Args:
            method: The full name.
            kind: Of the call.
            start: Begins an attempt.
            timeout: Seconds for each attempt.
            metadata: Of the caller, as far as it is sent again.
            wait_for_ready: Of the call.
            attempts: How many attempts there were.
        """
        self.label = method
        """What failback calls it in events."""
        self._kind = kind
        self._start = start
        self._timeout = timeout
        self._metadata = metadata
        self._wait_for_ready = wait_for_ready
        self._attempts = attempts

    async def __call__(self, *requests: Any) -> Any:
        """Make an attempt, and wait for its end; raises how it failed."""
        self._attempts += 1
        streams = self._kind.streams_requests
        metadata = grpc.aio.Metadata(*with_attempt(self._metadata, self._attempts))
        request = list(requests) if streams else requests[0]
        call = self._start(
            request,
            timeout=self._timeout,
            metadata=metadata,
            wait_for_ready=self._wait_for_ready,
        )
        if isinstance(call, CoroutineType):
            call = await call
        statuses = _Statuses(call) if streams else None
        try:
            if not self._kind.streams_responses:
                return await call
            async for _ in call:
                pass
        except grpc.aio.AioRpcError as error:
            if statuses is None or error.details() != MADE_UP_DETAILS:
                raise
            raise await statuses.own() or error from None


class _Statuses:
    """The statuses of an attempt: the first may be made up by gRPC, before the server's own."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self._own: grpc.aio.AioRpcError | None = None
        call.add_done_callback(self._note)

    def _note(self, call: Any) -> None:
        with contextlib.suppress(Exception):  # a foreign call's; what it raises comes out of it
            failure = failure_of(call)
            if isinstance(failure, grpc.aio.AioRpcError) and not has_made_up_status(call):
                self._own = self._own or failure

    async def own(self) -> grpc.aio.AioRpcError | None:
        """The server's, if it comes in time."""
        for delay_s in STATUS_CHECK_DELAYS_S:
            self._note(self._call)
            if self._own is not None:
                break
            await asyncio.sleep(delay_s)
        return self._own


def _late(kind: Kind) -> FinishedCall:
    """What the caller gets if the deadline had passed before the call began."""
    details = f"Deadline Exceeded before the call began: {NO_TIME.reason}"
    return finished_call(kind, grpc.StatusCode.DEADLINE_EXCEEDED, details)
