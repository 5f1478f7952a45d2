"""Calls of `grpc.aio` and their attempts, for the channels, the interceptors and failback.

A `CallFactory` begins the calls of one method. The caller gets one of two objects:

* If the method needs only a deadline: gRPC's own call.
* Otherwise a `RetryingCall`, a `grpc.aio.Call` of the same kind. It makes the attempts, returns
  default responses, passes calls to failback, and watches for slow calls and stalled streams, as
  its `Attempts` decide.

The user of a factory provides `start(request, timeout=..., metadata=..., wait_for_ready=...)`,
which begins an attempt. It returns a call, as a multicallable does, or a coroutine that returns a
call, as the continuation of an interceptor does. For a coroutine, attempts after the first one need
a task.

All code runs on the event loop; the timer's thread submits to it. Code of users (iterators,
predicates, wait objects) runs in the context of the caller.
"""

from __future__ import annotations

import asyncio
import contextlib
from contextvars import copy_context
from functools import partial
from types import CoroutineType
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import grpc

from rpcwheel._concurrency.callbacks import weak_callback
from rpcwheel._concurrency.loop import call_on_loop, running_loop
from rpcwheel._grpc.aio_finished import (
    CANCELLED,
    OK,
    FinishedCall,
    failed_call,
    failed_with,
    finished_call,
    refused_by,
)
from rpcwheel._grpc.aio_relay import (
    RELAYS,
    AwaitedRelay,
    Relay,
    abandon_attempt,
    has_ended,
)
from rpcwheel._grpc.calls import (
    CANCELLED_HERE,
    Details,
    copy_of,
    reusable_metadata,
    server_of,
)
from rpcwheel.durations import NEVER, to_ns, to_seconds
from rpcwheel.errors import FailbackError
from rpcwheel.events import HedgeSent, emit
from rpcwheel.rpc import TRIED, Kind, NextAttempt, Stop, classes_by_kind
from rpcwheel.telemetry.tracing import with_current_trace

from .aio_requests import RequestStream
from .attempts import (
    CHANNEL_CLOSED,
    LATE,
    NO_MORE_HEDGES,
    Attempts,
    Enqueue,
    ReadRequests,
    Response,
    Wait,
    with_other_server,
)
from .client_state import TIMER_CHECK_INTERVAL_S, seconds_left
from .config import CALL_OPTIONS, MethodConfig
from .failed_calls import (
    default_messages,
    delivery_timeout,
    queued_metadata,
    queued_request,
    read_timeout_s,
    response_status,
)
from .idempotency import with_key
from .keeper import KeptDelivery
from .metadata import call_metadata, new_nonce, result_of, with_attempt

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from contextvars import Context

    from rpcwheel.timer import Timeout

    from .client_state import ClientState
    from .failback_policy import FailbackPolicy
    from .metadata import Metadata

Start: TypeAlias = "Callable[..., Any]"
"""Begins an attempt: `start(request, timeout=..., metadata=..., wait_for_ready=...)` returns a
call, or a coroutine that returns a call."""

TIMER_GRACE_S: Final = 1.0
"""How late a timer may be, within the deadline, before the loop continues without it."""

NO_POLICY: Final = MethodConfig()


class CallFactory:
    """Begins the calls of one method of one client."""

    def __init__(
        self,
        state: ClientState,
        method: str,
        kind: Kind,
        config: MethodConfig | None = None,
        serialize: Callable[[Any], bytes] | None = None,
    ) -> None:
        """Make the factory, with the configuration of the client's policies if `config` is None.

        A journal needs the serializer of requests; None if they are bytes.
        """
        self.state = state
        self.method = method
        self.kind = kind
        self.serialize = serialize
        config = self.config = state.configs.config_for(method) if config is None else config
        self.has_final_policy = config.failback is not None or config.default_response is not None
        stalls = kind.streams_responses and config.has_message_timeout
        hedged = config.hedging is not None and kind is Kind.UNARY_UNARY
        # A stream that its caller drops must free its place; gRPC does not end its own calls then.
        admission = config.admission
        is_limited = kind.streams_responses and bool(admission and admission.concurrency)
        self.is_native = not (
            config.handles_failures or hedged or stalls or is_limited or config.slow_ns != NEVER
        )
        self.call_class: type[RetryingCall] = _HedgedCall if hedged else _CALLS[kind]

    def _in_context(self) -> CallFactory:
        """Make a factory with the `call_options` of the running context."""
        config = self.state.current_config(self.method)
        return CallFactory(self.state, self.method, self.kind, config, self.serialize)

    def begin(
        self,
        start: Start,
        request: Any,
        timeout: float | None,
        metadata: Iterable[tuple[str, str | bytes]] | None,
        wait_for_ready: bool | None,
    ) -> Any:
        """Begin a call, with arguments as its caller gave them.

        The request of a stream is an iterator, or None if the requests will be written.

        Returns:
            The call for the caller; or a coroutine that returns it, if `start` returns a coroutine.

        Raises:
            Exception: Whatever `start` raised.
        """
        calls = self if CALL_OPTIONS.get() is None else self._in_context()
        config = calls.config
        now_ns, deadline_ns, attempt_ns = self.state.begin(config, timeout)
        is_late = now_ns >= deadline_ns
        if is_late and not calls.has_final_policy:
            return _late(self.kind)
        left_s = seconds_left(attempt_ns, now_ns)
        if wait_for_ready is None:
            wait_for_ready = config.wait_for_ready
        complete = call_metadata(reusable_metadata(metadata), config.criticality)
        if complete is not metadata:
            metadata = grpc.aio.Metadata(*complete)
        if calls.is_native:
            return start(request, timeout=left_s, metadata=metadata, wait_for_ready=wait_for_ready)
        if config.durable:
            metadata = with_key(metadata)
        arguments = start, request, timeout, metadata, wait_for_ready
        call = calls.call_class(calls, config, *arguments, now_ns, deadline_ns)
        if is_late:
            return call.fail_late()
        return call.first_attempt(left_s)


class RetryingCall(Relay):
    """A call that makes its attempts one after the other.

    Most calls succeed, so values that only a failed attempt needs are computed after a failure.
    """

    _hedged = False  # whether attempts may run at the same time
    # Class attributes are the initial values: a call that succeeds sets few of them.
    _requests: RequestStream | None = None  # an iterator of requests that may be sent again
    _attempts: Attempts | None = None  # made after the first failure
    _failed: tuple[Any, Any] = (None, None)  # the attempt that failed last, and its error
    _wait: _TimerWait | None = None  # for the next attempt
    _task: asyncio.Task[None] | None = None  # begins an attempt, or reads the requests
    _tried: list[object] | None = None  # subchannels, appended by the balancer, after a refusal
    _nonce: str | None = None  # of the newest attempt
    on_end: Callable[[], object] | None = None
    """Called when the call has ended or was dropped."""

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
        self._start: Any = start  # None after the end
        self._own_timeout = timeout
        self._metadata: Metadata | None = None if metadata is None else tuple(metadata)
        self._wait_for_ready = wait_for_ready
        self._started_ns = started_ns
        self._deadline_ns = deadline_ns
        self._context = copy_context()
        if config.keeps_requests or config.hedging is not None:
            if self.kind.streams_requests:
                if request is not None and config.buffer_bytes is not None:
                    self._requests = RequestStream(request, config.buffer_bytes)
            elif request.__class__ is not bytes:
                request = copy_of(request)  # 2 µs for a small message
        self._request = request
        self._slow = factory.state.watch_slow_call(factory.method, config)

    def time_remaining(self) -> float | None:
        """Return the seconds until the deadline of all attempts; None without a deadline."""
        return seconds_left(self._deadline_ns, self._state.now_ns())

    @property
    def rpcwheel_server(self) -> Any:
        """The server of the last attempt, for `server_of` if this call is an attempt of another."""
        return server_of(self._source)

    def end_waiting(self) -> None:
        """Plan no further attempt, and cancel the call if none runs; its channel is closed."""
        if self.attempts.channel_closed():
            self.cancel()

    # --- The first attempt ---

    def first_attempt(self, timeout: float | None) -> Any:
        """Make the first attempt. Returns this call, or a coroutine that returns it."""
        try:
            pairs = self._metadata
            if self._config.sends_nonces:
                self._nonce = new_nonce()
                pairs = with_attempt(pairs, 1, self._nonce)
            metadata = None if pairs is None else grpc.aio.Metadata(*pairs)
            attempt = self._begin_attempt(timeout, metadata)
        except BaseException:  # such as `UsageError` of a closed channel
            self._release()
            raise
        return self._follow_first(attempt)

    def _follow_first(self, attempt: Any) -> Any:
        if isinstance(attempt, CoroutineType):
            return self._first_awaited(attempt)
        self.begin(attempt)
        return self

    async def _first_awaited(self, attempt: Any) -> RetryingCall:
        try:
            call = await attempt
        except grpc.RpcError as error:  # of an inner interceptor that awaited the call
            call = failed_call(self.kind, error)
        except BaseException:
            self._release()
            raise
        self.begin(call)
        return self

    def first_attempt_later(self, timeout: float | None) -> RetryingCall:
        """Make the first attempt, which `start` begins in a coroutine, in a task."""
        pairs = self._metadata
        metadata = None if pairs is None else grpc.aio.Metadata(*pairs)
        self._begin_later(self._begin_attempt(timeout, metadata))
        return self

    def fail_late(self) -> RetryingCall:
        """End the call without an attempt: its deadline had passed before it began."""
        self._failed = _late(self.kind), failed_with(grpc.StatusCode.DEADLINE_EXCEEDED, LATE)
        self.attempts.late()
        self._end_failed()
        if isinstance(self._final, FinishedCall):
            self._final.is_new = True  # the first `write` raises its status
        return self

    def _begin_attempt(self, timeout: float | None, metadata: Any) -> Any:
        token = None if self._tried is None else TRIED.set(self._tried)
        try:
            return self._start(
                self._request if self._requests is None else self._requests.replay(),
                timeout=timeout,
                metadata=metadata,
                wait_for_ready=self._wait_for_ready,
            )
        finally:
            if token is not None:
                TRIED.reset(token)

    # --- After an attempt ---

    def _attempt_failed(self, call: Any, error: BaseException) -> None:
        if not isinstance(error, grpc.RpcError) or not self._config.handles_failures:
            self.finish_failed(call, error)
        else:  # later: this runs inside of grpc, and not in the caller's context
            soon = asyncio.get_running_loop().call_soon
            soon(self._attempt_ended, call, error, context=self._context)

    def _attempt_ended(self, call: Any, error: grpc.RpcError) -> None:
        if self.is_current(call):  # not canceled meanwhile
            self.attempts.failed()
            self._decide(call, error)

    @property
    def attempts(self) -> Attempts:
        """The decisions about the attempts."""
        if self._attempts is None:
            config, times = self._config, (self._started_ns, self._deadline_ns)
            budget = self._state.budget_of(config)
            self._attempts = Attempts(self.method, config, *times, budget, hedged=self._hedged)
        return self._attempts

    def _decide(self, call: Any, error: grpc.RpcError) -> None:
        """Decide what follows an attempt that has failed with a status."""
        attempts = self.attempts
        if self._state.refuse is not None and not attempts.hedged:  # a hedged call plans no more
            attempts.decided(CHANNEL_CLOSED)
            self._failed = call, error
            self._go_on()
            return
        committed = self.received or not self._can_resend
        server = server_of(call, error)
        result = result_of(error, committed=committed, nonce=self._nonce, server=server)
        if result.refused:
            self._tried = [] if self._tried is None else self._tried
            result = with_other_server(result, server, self._tried)
        attempts.decided(attempts.decide(self._state.now_ns(), result))
        self._failed = call, error
        self._go_on()

    def _go_on(self) -> None:
        """Make the attempts that are due, wait for the next one, or end the call."""
        while True:
            now_ns = self._state.now_ns()
            match self.attempts.next(now_ns, can_resend=self._can_resend):
                case NextAttempt() as step:
                    self._begin_next(step)
                case Wait(at_ns):
                    self._wait_until(at_ns)
                    return
                case Stop():
                    self._end_failed()
                    return
                case None:
                    return

    @property
    def _was_written(self) -> bool:
        """Whether the caller writes the requests, which are then not kept."""
        return bool(self.kind.streams_requests) and self._request is None

    @property
    def _can_resend(self) -> bool:
        if self._requests is None:
            return not self._was_written
        return self._requests.buffer.replayable

    # --- The next attempt ---

    def _wait_until(self, at_ns: int) -> None:
        """Wait for the next attempt; the relay has none meanwhile, unless the call is hedged."""
        if self._wait is not None:
            self._wait.cancel()
        self.pause()
        if self._state.channel_calls.add_waiting(self):
            go_on, stopped = self._go_on, self._timer_stopped
            if self._cancels_when_dropped:
                # A stream that its caller drops ends at once, so nothing else may keep it.
                go_on, stopped = weak_callback(go_on), weak_callback(stopped)
            self._wait = _TimerWait(self._state, self._context, go_on, stopped)
            self._wait.start(at_ns, self._deadline_ns)

    def _timer_stopped(self) -> None:
        self.attempts.timer_stopped()
        self._go_on()

    def _begin_next(self, step: NextAttempt) -> None:
        attempt = self._next_attempt(step)
        if isinstance(attempt, CoroutineType):
            self._begin_later(attempt)
        else:
            self.begin(attempt)

    def _begin_later(self, attempt: CoroutineType[Any, Any, Any]) -> None:
        """Begin, in a task, an attempt that `start` begins in a coroutine."""
        task = self._run_task(self._begin_awaited(attempt))
        task.add_done_callback(lambda _: attempt.close())  # if canceled before its first step

    def _next_attempt(self, step: NextAttempt) -> Any:
        """Make an attempt after the first one. Returns a call, or a coroutine that returns it."""
        left_s = seconds_left(step.deadline_ns, self._state.now_ns())
        self._nonce = new_nonce() if self._config.sends_nonces else None
        metadata = grpc.aio.Metadata(*with_attempt(self._metadata, step.number, self._nonce))
        try:
            return self._begin_attempt(left_s, metadata)
        except Exception as error:  # noqa: BLE001 - for the caller
            return self._failed_to_begin(error)

    async def _begin_awaited(self, attempt: Any) -> None:
        call = await self._await_attempt(attempt)
        self._task = None
        if self.done():
            call.cancel()
        else:
            self.begin(call)

    async def _await_attempt(self, attempt: Any) -> Any:
        """Return the call of a coroutine, or a failed call if it raised."""
        try:
            return await attempt
        except asyncio.CancelledError as error:
            if self.done():  # canceled by `_release`
                raise
            return failed_call(self.kind, error)
        except Exception as error:  # noqa: BLE001 - for the caller
            return self._failed_to_begin(error)

    def _failed_to_begin(self, error: Exception) -> FinishedCall:
        if isinstance(error, grpc.aio.UsageError):  # the channel was closed
            return finished_call(self.kind, CANCELLED, CANCELLED_HERE)
        return failed_call(self.kind, error)

    # --- The end ---

    def _release(self) -> None:
        self._start = None  # a continuation of grpc.aio has its call, whose task has this one
        if self._slow is not None:
            self._slow.cancel()
            self._slow = None
        if self._attempts is not None:
            self._attempts.ended()
            self._failed = None, None  # the traceback of the error may have frames of this call
        if self._wait is not None:
            self._wait.cancel()
            self._wait = None
        if self._task is not None:
            self._task.cancel()
            self._task = None
        if self._requests is not None:
            self._requests.close()
        if self.on_end is not None:
            self.on_end()

    def _end_failed(self) -> None:
        """End the call after its last attempt has failed, as its policies say."""
        error, requests = self._failed[1], self._requests
        buffered = not self.kind.streams_requests or (
            requests is not None and requests.buffer.has_all
        )
        now_ns, received = self._state.now_ns(), self.received
        self._carry_out(
            self.attempts.decide_response(now_ns, error, received=received, buffered=buffered)
        )

    def _carry_out(self, command: ReadRequests | Enqueue | Response | Exception | None) -> None:
        """End with what the policies have decided, after the steps of failback."""
        call, error = self._failed
        requests = self._requests
        match command:
            case ReadRequests() if requests is not None and not requests.buffer.is_over:
                self._run_task(self._read_rest(requests, command))
            case ReadRequests():
                self._requests_read(command)
            case Enqueue() if self._config.durable:
                self._run_task(self._store(command, error))
            case Enqueue():
                outcome = self._enqueue(command.policy, error)
                self._carry_out(self.attempts.queued(command.policy, error, outcome))
            case Response():
                self.finish(_response(self.kind, command, error))
            case FailbackError():
                self.finish(failed_call(self.kind, refused_by(command, error)))
            case _:
                self.finish_failed(call, error)

    def _run_task(self, coroutine: Any) -> asyncio.Task[None]:
        self.pause()
        self._task = task = self._new_task(coroutine)
        return task

    def _new_task(self, coroutine: Any) -> asyncio.Task[None]:
        loop = asyncio.get_running_loop()
        return loop.create_task(coroutine, context=self._context.copy())

    # --- Failback ---

    async def _read_rest(self, requests: RequestStream, command: ReadRequests) -> None:
        with contextlib.suppress(Exception):  # of the user's iterator
            async with asyncio.timeout(read_timeout_s(self.time_remaining())):
                await requests.read_rest()
        self._task = None
        self._requests_read(command)

    def _requests_read(self, command: ReadRequests) -> None:
        error, requests = self._failed[1], self._requests
        buffered = requests is not None and requests.buffer.has_all
        why = "its requests were written" if self._was_written else "not all requests are known"
        self._carry_out(
            self.attempts.requests_read(command.policy, error, buffered=buffered, why=why)
        )

    def _requests_of_delivery(self) -> list[Any]:
        if self._requests is None:
            return [queued_request(self._request)]
        return self._requests.buffer.messages

    def _enqueue(self, policy: FailbackPolicy, error: grpc.RpcError) -> str | Exception | None:
        """Give the call to failback. Returns what its queue returned, or what was raised."""
        delivery = Delivery(
            self._factory,
            self._start,
            timeout=delivery_timeout(self._own_timeout, self._config),
            metadata=queued_metadata(self._metadata, policy),
            wait_for_ready=self._wait_for_ready,
            attempts=self.attempts.number,
        )
        try:
            requests = self._requests_of_delivery()
            return self._state.failback.enqueue(policy, self._config, error, delivery, *requests)
        except Exception as raised:  # noqa: BLE001 - a refusal, or of user code
            return raised

    async def _store(self, command: Enqueue, error: grpc.RpcError) -> None:
        """Store the call in the journal, and end it when it is durable."""
        timeout_s = delivery_timeout(self._own_timeout, self._config)
        details = Details(self.method, timeout_s, self._metadata, None, self._wait_for_ready, None)
        outcome: str | Exception | None
        try:
            requests = self._requests_of_delivery()
            failed = self._state.failback.failed_rpc(
                command.policy, self.kind, details, requests, self._factory.serialize
            )
            queue = self._state.failback.queue_of(command.policy, self._config.queue)
            outcome = await queue.enqueue_rpc(error, failed)
        except Exception as raised:  # noqa: BLE001 - a refusal, or of user code
            outcome = raised
        self._task = None
        self._carry_out(self.attempts.queued(command.policy, error, outcome))

    # --- message_timeout ---

    def _limit_silence(self, call: Any) -> _SilenceLimit | None:
        """Limit the wait for a message; see `Relay`."""
        if not self._config.has_message_timeout:
            return None
        limit = _SilenceLimit()
        loop = asyncio.get_running_loop()
        end = partial(self._context.run, self._end_silence, call, limit)
        delay_s = to_seconds(self._config.message_timeout_ns)
        schedule = self._state.schedule
        limit.timeout = schedule(lambda _: call_on_loop(loop, end), delay_s, "message_timeout")
        return limit

    def _end_silence(self, call: Any, limit: _SilenceLimit) -> None:
        """End an attempt whose message has not arrived in time."""
        if limit.over or not self.is_current(call):
            return
        details = self._state.report_stall(self.method, self._config)
        self.begin(finished_call(self.kind, grpc.StatusCode.DEADLINE_EXCEEDED, details))
        call.cancel()


class _TimerWait:
    """A wait for the next attempt, which ends too if the timer is late or was stopped."""

    def __init__(
        self,
        state: ClientState,
        context: Context,
        go_on: Callable[[], object],
        stopped: Callable[[], object],
    ) -> None:
        """Make a wait that calls `go_on()`, or `stopped()` if the timer was stopped, on the loop.

        Both are called in the context, and not after `cancel`.
        """
        self._state, self._context = state, context
        self._go_on, self._stopped = go_on, stopped
        self._timeout: Timeout | None = None
        self._check: asyncio.TimerHandle | None = None

    def start(self, at_ns: int, deadline_ns: int) -> None:
        """Wait until `at_ns`; the timer is checked at the latest at the deadline of the call."""
        self._deadline_ns = deadline_ns
        self._loop = loop = asyncio.get_running_loop()
        wait_s = max(0, at_ns - self._state.now_ns()) / 1e9
        end = partial(self._context.run, self._end, self._go_on)
        self._timeout = self._state.schedule(lambda _: call_on_loop(loop, end), wait_s, "retry")
        if self._timeout is None:
            self._stopped()
        else:
            self._check_later(min(wait_s, TIMER_CHECK_INTERVAL_S) + TIMER_GRACE_S, at_ns)

    def _check_later(self, delay_s: float, at_ns: int) -> None:
        left_s = seconds_left(self._deadline_ns, self._state.now_ns())
        delay_s = delay_s if left_s is None else min(delay_s, left_s)
        check = partial(self._check_timer, self._state.timer, at_ns)
        later = asyncio.get_running_loop().call_later
        self._check = later(delay_s, check, context=self._context)

    def _check_timer(self, timer: Any, at_ns: int) -> None:
        if self._timeout is None:  # it was canceled on another thread
            return
        if timer.stopped:
            self._end(self._stopped)
        elif self._state.now_ns() >= at_ns:
            self._end(self._go_on)
        else:  # a long wait, or a `ManualTimer`
            self._check_later(TIMER_GRACE_S, at_ns)

    def _end(self, then: Callable[[], object]) -> None:
        if self._timeout is not None:  # the wait has not ended
            self.cancel()
            then()

    def cancel(self) -> None:
        """End the wait. Idempotent; on any thread, as a garbage collection is."""
        timeout, self._timeout = self._timeout, None
        if timeout is not None:
            timeout.cancel()
        check, self._check = self._check, None
        if check is not None and running_loop() is self._loop:  # else the check ends by itself
            check.cancel()


_CALLS: Final = classes_by_kind(RetryingCall, RELAYS)


class _HedgedCall(RetryingCall, AwaitedRelay, grpc.aio.UnaryUnaryCall[Any, Any]):
    """A unary call whose attempts may run at the same time (gRFC A6).

    As a relay it has no running attempt; it ends with the attempt that decides the call.
    """

    _hedged = True

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._running: list[Any] = []
        self._tasks: set[asyncio.Task[None]] = set()  # that begin attempts
        self._awaiting: set[asyncio.Task[None]] = set()  # one for each running attempt
        self._tried = []

    def _follow_first(self, attempt: Any) -> Any:
        self._state.channel_calls.add_waiting(self)
        self._follow(attempt)
        self._go_on()
        return self

    def _begin_next(self, step: NextAttempt) -> None:
        emit(HedgeSent(self.method, step.number))
        self._follow(self._next_attempt(step))

    def _follow(self, attempt: Any) -> None:
        """Wait for the end of an attempt, or for the coroutine that returns the attempt."""
        if isinstance(attempt, CoroutineType):
            self._tasks.add(task := self._new_task(self._begin_awaited(attempt)))
            task.add_done_callback(partial(self._has_begun, attempt))
        elif self.done():
            attempt.cancel()
        else:
            self._running.append(attempt)
            self._awaiting.add(task := self._new_task(self._await_end(attempt)))
            task.add_done_callback(self._awaiting.discard)

    async def _await_end(self, attempt: Any) -> None:
        """Wait for the end of an attempt, and handle it.

        A done-callback does not suffice: if a request can't be sent, such as one of a wrong type,
        grpc.aio (1.85) raises that from `await`, and the call does not end. If this task is
        canceled, so is the attempt.
        """
        error: BaseException | None = None
        try:
            await attempt
        except (Exception, asyncio.CancelledError) as raised:  # noqa: BLE001 - for the caller
            error = raised
        try:
            if attempt not in self._running:  # it was overtaken
                return
            self._running.remove(attempt)
            if error is None:
                self.finish(attempt)
            else:
                self.attempts.failed()
                self._hedge_failed(attempt, error)
        finally:
            del error  # else a cycle: the error, its traceback, and this frame

    def _has_begun(self, attempt: Any, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        attempt.close()  # for a task that was canceled before its first step

    async def _begin_awaited(self, attempt: Any) -> None:
        self._follow(await self._await_attempt(attempt))

    def _hedge_failed(self, attempt: Any, error: BaseException) -> None:
        if isinstance(error, grpc.RpcError):
            self._decide(attempt, error)
        elif (
            isinstance(error, asyncio.CancelledError)
            and self._running
            and self._state.channel_calls.is_closed
        ):  # during the grace of `close`
            self.attempts.decided(NO_MORE_HEDGES)
        else:
            self.finish(attempt if has_ended(attempt) else failed_call(self.kind, error))

    def _end_failed(self) -> None:
        self._cancel_running()  # before the call is queued: it must not succeed as well
        super()._end_failed()

    def _cancel_running(self) -> None:
        running, self._running = self._running, []
        if self._attempts is not None:
            self._attempts.canceled(len(running))
        for attempt in running:
            abandon_attempt(attempt)
        for task in tuple(self._tasks):
            task.cancel()

    def _release(self) -> None:
        super()._release()
        self._cancel_running()


class _SilenceLimit:
    """A limit of the wait for a message."""

    def __init__(self) -> None:
        self.over = False
        self.timeout: Timeout | None = None

    def cancel(self) -> None:
        """The wait has ended."""
        self.over = True
        if self.timeout is not None:
            self.timeout.cancel()


class Delivery(KeptDelivery):
    """Makes a queued call again, in one attempt. Failback calls it with the requests."""

    __slots__ = ("_metadata", "_wait_for_ready", "calls", "start")

    def __init__(
        self,
        calls: CallFactory,
        start: Start,
        *,
        timeout: float,
        metadata: Metadata,
        wait_for_ready: bool | None,
        attempts: int,
    ) -> None:
        """Store the arguments of an attempt; `attempts` is the number of attempts so far."""
        super().__init__(calls.method, calls.state.failback.key, timeout, attempts)
        self.calls = calls
        self.start = start
        self._metadata = metadata
        self._wait_for_ready = wait_for_ready

    async def __call__(self, *requests: Any) -> Any:
        """Make an attempt and wait for its end; raises its failure."""
        self.attempts += 1
        with self.calls.state.channel_calls.delivery():
            call = _CALLS[self.calls.kind](
                self.calls,
                NO_POLICY,
                self.start,
                requests if self.calls.kind.streams_requests else requests[0],
                self.timeout_s,
                with_current_trace(with_attempt(self._metadata, self.attempts)),
                self._wait_for_ready,
                started_ns=0,
                deadline_ns=NEVER,
            ).first_attempt(self.timeout_s)
        if isinstance(call, CoroutineType):
            call = await call
        if not self.calls.kind.streams_responses:
            return await call
        async for _ in call:
            pass
        return None


def begin_deferred(
    calls: CallFactory,
    start: Start,
    request: Any,
    timeout: float | None,
    metadata: Iterable[tuple[str, str | bytes]] | None,
    wait_for_ready: bool | None,
    on_end: Callable[[], object],
) -> RetryingCall:
    """Return a call whose only attempt begins in a task: `start` returns a coroutine.

    No policies apply to it. `on_end` is called when the call has ended or was dropped, perhaps
    before its task has run.
    """
    if not calls.kind.streams_requests:
        request = copy_of(request)  # the caller may change it before it is sent
    now_ns = calls.state.now_ns()
    deadline_ns = NEVER if timeout is None else now_ns + max(0, to_ns(timeout))
    arguments = start, request, timeout, metadata, wait_for_ready
    call: RetryingCall = _CALLS[calls.kind](calls, NO_POLICY, *arguments, now_ns, deadline_ns)
    call.on_end = on_end
    return call.first_attempt_later(timeout)


def _response(kind: Kind, response: Response, error: BaseException) -> FinishedCall:
    """Make a call with status OK and a response of a policy."""
    default, outcome = response
    result = default_messages(default) if kind.streams_responses else default
    return finished_call(kind, OK, result=result, **response_status(outcome, error))


def _late(kind: Kind) -> FinishedCall:
    """Make the end of a call whose deadline had passed before it began."""
    call = finished_call(kind, grpc.StatusCode.DEADLINE_EXCEEDED, LATE)
    call.is_new = True
    return call
