"""One call of `grpc` and its attempts, for the channels, the interceptors and failback.

`Attempts` decides; a `ClientCall` makes the attempts, asks for the decisions, and makes what the
caller gets in place of a failure. A blocking call runs on its caller's thread, including all
attempts and the waits between them (`ClientCall.run`). `sync_retrying_call` uses a `ClientCall` for
`.future()` and response streams, whose further attempts workers begin.

A call that failback has queued is made again by a `Delivery`.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, Final

import grpc

from rpcwheel._grpc.calls import (
    CLOSED_DURING_CALL,
    copy_of,
    details_of,
    failure_of,
    has_status,
    is_channel_closed_error,
    reusable_metadata,
    server_of,
)
from rpcwheel._grpc.finished import FinishedError, FinishedResponse, FinishedStream, refused_by
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

    from rpcwheel._grpc.calls import AnyCall, Details

    from .attempts import Step
    from .client_state import ChannelCalls, ClientState
    from .config import MethodConfig
    from .failback_policy import FailbackPolicy

    Start = Callable[[Any, Any], AnyCall]

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
