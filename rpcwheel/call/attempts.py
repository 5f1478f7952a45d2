"""The attempts of one call, as a state machine without I/O.

`Attempts` gets facts and the time, and returns commands, which `sync_call` and `aio_call` carry
out. Retries are made one after the other (`RetryPlan`), hedged attempts at the same time
(`HedgingPlan`, gRFC A6). All else is the same for both::

    attempts.failed()                               # an attempt has failed
    step = attempts.decide(now_ns, result)          # asks the policies; may run code of users
    attempts.decided(step)
    command = attempts.next(now_ns)                 # NextAttempt, Wait, Stop or None

A `NextAttempt` is made now, and `next` is called again, as after a `Wait` is over. `Stop` is
returned once for each call: no further attempt is made, and the attempt that failed last decides
what the caller gets::

    command = attempts.decide_response(now_ns, ...)  # Response, Enqueue, ReadRequests or None
    command = attempts.requests_read(...)            # after ReadRequests
    command = attempts.queued(...)                   # after Enqueue

Nothing here locks. `decide`, `decide_response`, `requests_read` and `queued` may run code of users
and emit events, so they are called without a lock. They change the budget, and what only they read:
the code of the last failure, and the number and the deadline of the planned attempt. All others are
called under the lock of the call, if it has one.
"""

from __future__ import annotations

import enum
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

from rpcwheel.backoff import wait_of_call
from rpcwheel.durations import NEVER, to_seconds
from rpcwheel.errors import FailbackError, time_text
from rpcwheel.events import (
    CallbackFailed,
    DefaultResponseUsed,
    RetryScheduled,
    RetryStopped,
    emit,
)
from rpcwheel.events.events import BUDGET_USED_UP
from rpcwheel.rpc import AttemptResult, NextAttempt, Stop

from .config import attempt_deadline_ns

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .budget import Budget
    from .config import HedgingConfig, MethodConfig, RetryConfig
    from .failback_policy import FailbackPolicy
    from .matching import Matcher

DEADLINE_TOLERANCE_NS: Final = 10_000_000
"""An attempt that ends with CANCELLED, was not canceled by its caller, and ends no earlier than
this before its deadline, counts as DEADLINE_EXCEEDED. A server of grpc-go resets the stream at the
deadline, and the reset may arrive first (4 of 280 calls to grpc-go 1.76 on the same machine)."""

# --- States ---


class State(enum.Enum):
    """The state of a call. `docs/architecture.md` has the table of `TRANSITIONS`."""

    RUNNING = "an attempt runs, or is being started"
    DECIDING = "all attempts have failed; what follows is being decided"
    WAITING = "no attempt runs; the next one is due later"
    ENDING = "no attempt follows; the policies decide what the caller gets"
    ENDED = "the result of the caller is known"


class Fact(enum.Enum):
    """What changes the state of a call."""

    FAILED = "the only running attempt has failed"
    WAIT = "another attempt is made later"
    DUE = "another attempt is made now"
    STOP = "no further attempt is made"
    END = "success, default response, failure for the caller, or canceled"


TRANSITIONS: Final[Mapping[State, Mapping[Fact, State]]] = {
    State.RUNNING: {
        Fact.FAILED: State.DECIDING,
        Fact.DUE: State.RUNNING,  # hedging
        Fact.STOP: State.ENDING,  # hedging: a fatal status; or the deadline had passed, see `late`
        Fact.END: State.ENDED,
    },
    State.DECIDING: {
        Fact.WAIT: State.WAITING,
        Fact.DUE: State.RUNNING,
        Fact.STOP: State.ENDING,
        Fact.END: State.ENDED,
    },
    State.WAITING: {
        Fact.DUE: State.RUNNING,
        Fact.STOP: State.ENDING,
        Fact.END: State.ENDED,
    },
    State.ENDING: {Fact.END: State.ENDED},
    State.ENDED: {},
}
"""The state after each fact that is possible in a state."""

# --- Commands ---


class Wait(NamedTuple):
    """Wait until the next attempt is due."""

    at_ns: int


NO_MORE_HEDGES: Final = Wait(NEVER)
"""A decision of `HedgingPlan`: only attempts that run may still succeed."""


class ReadRequests(NamedTuple):
    """Read the rest of the request stream, which failback needs."""

    policy: FailbackPolicy


class Enqueue(NamedTuple):
    """Let failback deliver the call in the background."""

    policy: FailbackPolicy


class Response(NamedTuple):
    """Give the caller a response that is not from a server."""

    default: Any
    outcome: str | None
    """What failback did with the call, see `response_status`; None for a default response."""


Step: TypeAlias = "NextAttempt | Wait | Stop"
"""What a plan decides about a failed attempt, and what the call does next."""

LATE: Final = "Deadline Exceeded before the call began: its deadline has passed"
"""The status details of a call whose deadline had passed before it began."""

# Why a call has no further attempt. In the texts, "it" is the call.
NOT_NAMED: Final = Stop("`retry_on` does not name its status")
COMMITTED: Final = Stop(
    "it can't be repeated: messages were received, or requests are not buffered"
)
NOT_IDEMPOTENT: Final = Stop(
    "its method is not marked idempotent; if the server may execute a call twice, set "
    "MethodPolicy(idempotent=True) for the method"
)
FORBIDDEN: Final = Stop("the server asked for no retry")
NO_ATTEMPTS_LEFT: Final = Stop("no attempts left")
BACKOFF_INFINITE: Final = Stop("its `backoff` is infinite")
BACKOFF_RAISED: Final = Stop("its `backoff` raised")
CHANNEL_CLOSED: Final = Stop("its channel was closed")
TIMER_STOPPED: Final = Stop("its timer was stopped or takes no more timeouts")
NOT_SENT: Final = Stop("the client itself has not sent it")
FATAL: Final = Stop("`non_fatal_codes` does not name its status")


# --- Plans ---


class RetryPlan:
    """Attempts one after the other. Decides what follows each failed one."""

    # Class attributes are the initial values: a call that succeeds sets none of them.
    next_ns: int = NEVER
    """When the next attempt is due; `NEVER` if none is planned."""
    _next: NextAttempt | None = None
    _number = 1

    def __init__(
        self,
        started_ns: int,
        deadline_ns: int,
        config: RetryConfig | None,
        budget: Budget | None,
    ) -> None:
        """Make the plan of a call; arguments as of `Attempts`.

        Without a config there are no retries.
        """
        self._started_ns = started_ns
        self._deadline_ns = deadline_ns
        self._config = config
        self._budget = budget
        self.attempt_ns = attempt_deadline_ns(config, started_ns, deadline_ns)
        """The deadline of the newest attempt."""

    def after_failure(self, now_ns: int, result: AttemptResult) -> NextAttempt | Stop:
        """Decide what follows the newest attempt, which has failed. `accept` carries it out.

        Raises:
            Exception: Whatever the user's `backoff` raised.
        """
        config = self._config
        if config is None:  # without a retry policy, `retry_on` is empty
            return NOT_NAMED
        if result.not_sent:
            _count_not_sent(self._budget, self._number, now_ns)
            return NOT_SENT
        if self._budget is not None:
            forbidden = result.pushback_ns is not None and result.pushback_ns < 0
            # As gRFC A6 counts failures.
            self._budget.failed(by_server=forbidden or config.retries_after(result))
        refusal = self._refusal(config, result)
        if refusal is not None:
            return refusal
        delay_ns = 0 if result.has_other_server else result.pushback_ns
        if delay_ns is None:
            delay_ns = config.backoff.next_delay_ns(
                self._number, elapsed_ns=now_ns - self._started_ns, error=result.error
            )
        delay_ns = wait_of_call(delay_ns)  # None: the user's `backoff` ends the retries
        if delay_ns is None or delay_ns == NEVER or now_ns + delay_ns >= self._deadline_ns:
            return _no_time_left(self._deadline_ns - now_ns, delay_ns)
        if self._budget is not None and not self._budget.take(now_ns):
            return Stop(BUDGET_USED_UP)
        at_ns = now_ns + delay_ns
        self._number += 1
        self.attempt_ns = attempt_deadline_ns(config, at_ns, self._deadline_ns)
        return NextAttempt(self._number, at_ns, self.attempt_ns)

    def _refusal(self, config: RetryConfig, result: AttemptResult) -> Stop | None:
        """Return why this failure is not retried; None if only time and budget can prevent that."""
        if not config.retries_after(result):
            return NOT_NAMED
        if result.committed:
            return COMMITTED
        if not (config.idempotent or result.is_proven):
            return NOT_IDEMPOTENT
        if self._number >= config.max_attempts:
            return NO_ATTEMPTS_LEFT
        if result.pushback_ns is None or _asks_for_itself(result):
            return None
        return _pushback_refusal(result.pushback_ns, config)

    def accept(self, step: NextAttempt | Wait) -> None:
        """Plan the attempt of a decision."""
        self._next = step if isinstance(step, NextAttempt) else None
        self.next_ns = step.at_ns

    def due(self, now_ns: int) -> NextAttempt | None:
        """Return the planned attempt; the budget has allowed it when it was planned."""
        self.next_ns = NEVER
        return self._next

    def canceled(self, attempts: int) -> None:
        """Do nothing: a canceled attempt counts as a success in the budget."""


def with_other_server(result: AttemptResult, server: Any, tried: list[object]) -> AttemptResult:
    """Return the result of a refused attempt, and whether another server may get the next one.

    Args:
        result: Of the attempt.
        server: The subchannel of the attempt; None if the channel has only one server.
        tried: The subchannels that the call was sent to. This one is added. If there is no other,
            all are removed: the next attempt is made after the pushback, and may go to any.
    """
    if server is None:
        return result
    if server not in tried:
        tried.append(server)
    if server.has_other(tried):
        return replace(result, has_other_server=True)
    tried.clear()
    return result


def _asks_for_itself(result: AttemptResult) -> bool:
    """Whether a pushback is only that of the server that has refused, and another one is ready."""
    return result.has_other_server and result.pushback_ns is not None and result.pushback_ns >= 0


def _no_time_left(left_ns: int, delay_ns: int | None) -> Stop:
    if delay_ns is None or delay_ns == NEVER:
        return BACKOFF_INFINITE
    left_s, delay_s = to_seconds(max(0, left_ns)), to_seconds(delay_ns)
    return Stop(
        f"its deadline is in {time_text(left_s)}, and the next attempt would be in "
        f"{time_text(delay_s)}"
    )


def _pushback_refusal(pushback_ns: int, config: RetryConfig) -> Stop | None:
    """Return why the pushback of a server ends the retries; None if it does not."""
    if pushback_ns < 0:
        return FORBIDDEN
    if pushback_ns <= config.max_pushback_ns:
        return None
    asked_s, most_s = to_seconds(pushback_ns), to_seconds(config.max_pushback_ns)
    return Stop(
        f"the server asked to wait {asked_s:.15g} s, which is longer than max_pushback "
        f"({most_s:.15g} s)"
    )


class HedgingPlan:
    """Attempts at the same time (gRFC A6): another one after each delay, until one succeeds."""

    def __init__(
        self, started_ns: int, deadline_ns: int, config: HedgingConfig, budget: Budget | None
    ) -> None:
        """Make the plan of a call whose first attempt was made; arguments as of `Attempts`."""
        self._config = config
        self._budget = budget
        self._deadline_ns = deadline_ns
        self._number = 1
        self.next_ns = NEVER
        self.accept(Wait(started_ns + config.delay_ns))

    def after_failure(self, now_ns: int, result: AttemptResult) -> Wait | Stop:
        """Decide when another attempt follows a failed one; `accept` carries it out."""
        pushback_ns = result.pushback_ns
        if result.not_sent:
            _count_not_sent(self._budget, self._number, now_ns)
            return NO_MORE_HEDGES
        is_fatal = result.code not in self._config.non_fatal and not result.refused
        forbidden = pushback_ns is not None and pushback_ns < 0
        if self._budget is not None:
            self._budget.failed(by_server=forbidden or not is_fatal)
        if is_fatal:
            return FATAL
        if pushback_ns is None or _asks_for_itself(result):
            return Wait(now_ns)
        if forbidden or pushback_ns > self._config.max_pushback_ns:
            return NO_MORE_HEDGES
        return Wait(now_ns + pushback_ns)

    def accept(self, step: NextAttempt | Wait) -> None:
        """Plan the next attempt, if there may be one."""
        if step.at_ns == NEVER:
            self._number = self._config.max_attempts
        more = self._number < self._config.max_attempts and step.at_ns < self._deadline_ns
        self.next_ns = step.at_ns if more else NEVER

    def due(self, now_ns: int) -> NextAttempt | None:
        """Ask the budget, make the planned attempt, and plan the next one."""
        if self._budget is not None and not self._budget.take(now_ns):
            self.next_ns = NEVER
            return None
        self._number += 1
        self.accept(Wait(now_ns + self._config.delay_ns))
        return NextAttempt(self._number, now_ns, self._deadline_ns)

    def canceled(self, attempts: int) -> None:
        """Correct the budget, in which an attempt that begins counts as a success."""
        if self._budget is not None:
            for _ in range(attempts):
                self._budget.failed(by_server=False)


def _count_not_sent(budget: Budget | None, number: int, now_ns: int) -> None:
    """Count an attempt that the client itself has refused: as a failure, and as no retry."""
    if budget is not None:
        budget.failed(by_server=True)
        if number > 1:
            budget.give_back(now_ns)


# --- The machine ---


class Attempts:
    """The attempts of one call whose first attempt was made, and what its caller gets."""

    # Class attributes are the initial values: a call that succeeds sets only `state`.
    state = State.RUNNING
    number = 1
    """The number of attempts so far."""
    _running = 1
    _undecided = 0  # failed attempts that no decision has followed yet
    _stop: Stop | None = None  # why no further attempt is made, once that is decided
    _abandoned = False  # it was decided during the wait for a retry
    _code = "UNKNOWN"  # of the attempt that failed last

    def __init__(
        self,
        method: str,
        config: MethodConfig,
        started_ns: int,
        deadline_ns: int,
        budget: Budget | None,
        *,
        hedged: bool = False,
    ) -> None:
        """Begin with one running attempt.

        Args:
            method: The full name of the method, for events.
            config: The configuration of the method.
            started_ns: When the first attempt was made.
            deadline_ns: When all attempts must have ended; `NEVER` for no limit.
            budget: The budget of the target, in which the call was counted; None for no limit.
            hedged: Whether several attempts may run at the same time.
        """
        self._method = method
        self._config = config
        self._started_ns = started_ns
        self._plan: RetryPlan | HedgingPlan
        if hedged and config.hedging is not None:
            self._plan = HedgingPlan(started_ns, deadline_ns, config.hedging, budget)
        else:
            self._plan = RetryPlan(started_ns, deadline_ns, config.retry, budget)
        self.hedged = hedged

    def _on(self, fact: Fact) -> None:
        self.state = TRANSITIONS[self.state][fact]

    @property
    def is_over(self) -> bool:
        """Whether no attempt runs or follows any more."""
        return self.state is State.ENDING or self.state is State.ENDED

    @property
    def next_ns(self) -> int:
        """When the next attempt is due; `NEVER` if none is planned."""
        return NEVER if self.is_over else self._plan.next_ns

    # --- Attempts ---

    def failed(self) -> None:
        """Note that an attempt has failed; no effect if the call is over."""
        self._running -= 1
        self._undecided += 1
        if not self._running and self.state is State.RUNNING:
            self._on(Fact.FAILED)

    def decide(self, now_ns: int, result: AttemptResult) -> Step:
        """Decide what follows a failed attempt, and emit the event of a retry.

        Not for attempts that the caller canceled. Runs the user's wait object; if that raises, the
        call is not retried.
        """
        if isinstance(self._plan, HedgingPlan):
            return self._plan.after_failure(now_ns, result)
        if result.code == "CANCELLED" and now_ns >= self._plan.attempt_ns - DEADLINE_TOLERANCE_NS:
            result = replace(result, code="DEADLINE_EXCEEDED")
        self._code = result.code
        try:
            step = self._plan.after_failure(now_ns, result)
        except Exception as error:  # noqa: BLE001 - a user's wait object
            emit(CallbackFailed(self._method, "retry.backoff", error))
            step = BACKOFF_RAISED
        if isinstance(step, NextAttempt):
            delay_s = max(0, step.at_ns - now_ns) / 1e9
            emit(RetryScheduled(self._method, self.number, result.code, delay_s))
        elif step is NOT_SENT:
            if self.number > 1:
                self._report_stop(step)
        elif self._config.retry is not None and self._config.retry.retries_after(result):
            self._report_stop(step)
        return step

    def _report_stop(self, why: Step) -> None:
        if isinstance(why, Stop):
            emit(RetryStopped(self._method, self.number, self._code, why.reason))

    def decided(self, step: Step) -> None:
        """Accept the decision about a failed attempt. `next` carries it out."""
        self._undecided -= 1
        if isinstance(step, Stop):
            self._stop = self._stop or step
        else:
            self._plan.accept(step)

    def next(self, now_ns: int, *, can_resend: bool = True) -> Step | None:
        """Return what to do now; None if that is to wait for attempts that run, or nothing.

        A `NextAttempt` counts as running. A `Stop` is returned once. If not all requests of the
        call can be sent again (`can_resend`), no further attempt is made.
        """
        if self.is_over:
            return None
        if self._plan.next_ns <= now_ns and not can_resend:
            self._abandon(COMMITTED)  # the buffer has overflowed during the wait
        if self._stop is None:
            attempt = self._plan.due(now_ns) if self._plan.next_ns <= now_ns else None
            if attempt is not None:
                self._on(Fact.DUE)
                self._running += 1
                self.number = attempt.number
                return attempt
            if self._plan.next_ns != NEVER:
                if self.state is State.DECIDING:
                    self._on(Fact.WAIT)
                return Wait(self._plan.next_ns)
            if self._running or self._undecided:
                return None
        self._on(Fact.STOP)
        return self._stop or NO_ATTEMPTS_LEFT

    def timer_stopped(self) -> None:
        """Plan no further attempt, because the timer will not report that it is due."""
        if self.hedged:
            self._plan.accept(NO_MORE_HEDGES)
        elif self.state is not State.RUNNING:
            self._abandon(TIMER_STOPPED)

    def channel_closed(self) -> bool:
        """Plan no further attempt; return whether the call must end now, because none runs."""
        if self.hedged:
            self._plan.accept(NO_MORE_HEDGES)
        return self.state is State.WAITING

    def _abandon(self, why: Stop) -> None:
        """Do not make the retry that the call waits for."""
        if self._stop is None:
            self._stop, self._abandoned = why, True

    def canceled(self, attempts: int) -> None:
        """Note that running attempts were canceled because the call ends."""
        self._plan.canceled(attempts)

    # --- The end ---

    def late(self) -> None:
        """Note that the deadline had passed before the call began: there is no attempt."""
        self.number = self._running = 0
        self._on(Fact.STOP)

    def ended(self) -> None:
        """Note that the result of the caller is known. Idempotent."""
        if self.state is not State.ENDED:
            self._on(Fact.END)

    def decide_response(
        self, now_ns: int, error: BaseException, *, received: bool, buffered: bool
    ) -> Response | Enqueue | ReadRequests | None:
        """Decide what the caller gets after the last attempt; None: its failure.

        With a failback policy, its queue decides whether it takes the call. Emits the events of a
        default response, and of a retry that was planned and is not made. Runs users' predicates;
        the policy of one that raises does not apply.

        Args:
            now_ns: The time now.
            error: The status of the last attempt.
            received: Whether the caller has received messages; then only the failure may follow.
            buffered: Whether all requests are known, which failback needs.
        """
        if self._abandoned and self._stop is not None:
            self._report_stop(self._stop)
        policy, default = self._config.failback, self._config.default_response
        if received:
            return None
        if policy is not None:
            if buffered:
                return Enqueue(policy)
            # With the arguments of `FailbackInvoker.enqueue`.
            matches = self._matches(self._config.failback_matcher, "failback", error, 1, 0)
            return ReadRequests(policy) if matches else None
        elapsed_ns = now_ns - self._started_ns
        matcher = self._config.default_matcher
        if default is None or not self._matches(
            matcher, "default_response.on", error, self.number, elapsed_ns
        ):
            return None
        emit(DefaultResponseUsed(self._method, error))
        return Response(default.default, None)

    def _matches(
        self, matcher: Matcher | None, name: str, error: BaseException, number: int, elapsed_ns: int
    ) -> bool:
        """Whether a policy applies to a failure. Runs the user's predicate, `name` in events."""
        try:
            return matcher is not None and matcher(error, attempt=number, elapsed_ns=elapsed_ns)
        except Exception as raised:  # noqa: BLE001 - a user's predicate
            emit(CallbackFailed(self._method, name, raised))
            return False

    def requests_read(
        self,
        policy: FailbackPolicy,
        error: BaseException,
        *,
        buffered: bool,
        why: str = "not all requests are known",
    ) -> Enqueue | None:
        """Decide what follows `ReadRequests`; a note of the error says `why` it is not queued."""
        if buffered:
            return Enqueue(policy)
        error.add_note(f"{self._method}: not queued by failback, as {why}")
        return None

    def queued(
        self, policy: FailbackPolicy, error: BaseException, outcome: str | Exception | None
    ) -> Response | FailbackError | None:
        """Decide what the caller gets after `Enqueue`: a response, a refusal, or the failure.

        `outcome` is what the queue has returned, or what it or user code has raised.
        """
        if isinstance(outcome, FailbackError):
            return outcome.with_traceback(None)  # its frames have the caller's, which has it
        if isinstance(outcome, Exception):  # a user's predicate, wait object or request
            emit(CallbackFailed(self._method, "failback", outcome))
            error.add_note(f"{self._method}: not queued by failback: {outcome}")
            return None
        return None if outcome is None else Response(policy.default, outcome)
