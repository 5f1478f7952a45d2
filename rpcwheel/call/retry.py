"""Decides about the attempts of one call: their deadlines, the retries, the retry budget.

All attempts share one deadline: a retry gets the time that the attempts before it have left, and is
not begun if the deadline would pass before it starts. Pure: time comes in as nanoseconds, the next
step goes out.

Two kinds of budget limit how many calls of one target are sent again. Any thread may use them,
without a lock. Each counts calls that begin and attempts that failed, and is asked before
a call is sent again.

A `RetryBudget` limits the retries to one target, so that retries do not overload a server that is
down already. Finagle's and Envoy's rule: at most a share of the recent calls, and a small number
always. It keeps one slot for each recent second, and no sums. A count that is lost because two
threads wrote at once (only without the GIL) is forgotten with its slot. A retry is counted first
and then judged: threads that ask at the same moment may get one retry too few, never one too many.

A `RetryThrottle` is gRPC's own rule (gRFC A6). It counts an attempt as a success from its beginning
and takes that back when the attempt fails, so that calls that succeed need not come back here. So
calls that still run count as successes, and of calls that fail at the same time while the bucket is
full each takes `token_ratio` too much.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias

from rpcwheel.backoff import Backoff
from rpcwheel.durations import NEVER, to_ns, to_seconds
from rpcwheel.rpc import CODES, AttemptResult, NextAttempt, Stop

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .policy import HedgingPolicy, RetryPolicy, RetryThrottling

BudgetKey: TypeAlias = "tuple[float, int] | RetryThrottling"
"""What a budget is made with: a share and a least number, or gRPC's throttling."""

__all__ = [
    "FORBID_NS",
    "Budget",
    "BudgetKey",
    "Metadata",
    "RetryBudget",
    "RetryConfig",
    "RetryPlan",
    "RetryThrottle",
    "budget_key",
    "cut_short",
    "pushback_ns",
    "result_of",
    "with_attempt",
]

Metadata: TypeAlias = "tuple[tuple[str, str | bytes], ...]"

# --- What client and server tell each other (gRFC A6) ---

ATTEMPTS_KEY: Final = "grpc-previous-rpc-attempts"
"""Tells a server that a call is a retry (gRFC A6). Where gRPC's own retries are on, as they are by
default, its core removes it."""

RETRY_KEY: Final = "x-retry-attempt"
"""Tells it in any case: what go-grpc-middleware's retries send."""

PUSHBACK_KEY: Final = "grpc-retry-pushback-ms"
FORBID_NS: Final = -1
LONGEST_DIGITS: Final = 12
"""Thirty years. Python refuses to read a number of thousands of digits, which a server may send."""


def with_attempt(given: Iterable[tuple[str, str | bytes]] | None, number: int) -> Metadata:
    """The metadata of the `number`-th attempt: from the second on it says how many preceded it.

    It replaces what the caller gave: a server that passes on its metadata may itself have been
    called by a retry.
    """
    pairs = () if given is None else tuple((key, value) for key, value in given)
    if number <= 1:
        return pairs
    others = (pair for pair in pairs if pair[0] not in {ATTEMPTS_KEY, RETRY_KEY})
    before = str(number - 1)
    return (*others, (ATTEMPTS_KEY, before), (RETRY_KEY, before))


def pushback_ns(trailing: Iterable[tuple[str, str | bytes]] | None) -> int | None:
    """How long a server asks a retry to wait; `FORBID_NS` for never, None if it does not ask.

    A value that is no number means never (gRFC A6), and so does one of more than `LONGEST_DIGITS`.
    """
    for key, value in trailing or ():
        if key == PUSHBACK_KEY:
            text = value.decode("ascii", "replace") if isinstance(value, bytes) else value
            number = text.isascii() and text.isdecimal() and len(text) <= LONGEST_DIGITS
            return int(text) * 1_000_000 if number else FORBID_NS
    return None


def result_of(error: Any, *, committed: bool = False) -> AttemptResult:
    """How an attempt ended that gave `error`, a `grpc.RpcError`.

    Takes the finished calls of `grpc` and the errors of both worlds, whose methods return at once,
    and errors of inner interceptors, which may have no more than a code, or none.

    Args:
        error: What the attempt gave.
        committed: Whether it can't be made again.
    """
    code = getattr(_asked(error, "code"), "name", None)
    if code not in CODES:
        return AttemptResult(code="UNKNOWN", error=error, committed=True)
    asked_ns = pushback_ns(_asked(error, "trailing_metadata"))
    return AttemptResult(code=code, error=error, pushback_ns=asked_ns, committed=committed)


def _asked(error: object, name: str) -> Any:
    method = getattr(error, name, None)
    return method() if callable(method) else None


# --- What follows an attempt ---

RECENT_SECONDS: Final = 10
"""Seconds that count as recent, the one that runs included."""

SLOT_NS: Final = 1_000_000_000

SECOND, CALLS, RETRIES = range(3)

NO_TIME: Final = Stop("its deadline has passed")
NOT_NAMED: Final = Stop("its status is not one that `retry_on` names")
COMMITTED: Final = Stop("it can't be made again: messages were handed on")
NOT_IDEMPOTENT: Final = Stop(
    "its method is not marked idempotent; if the server may execute a call twice, set "
    "MethodPolicy(idempotent=True) for the method"
)
FORBIDDEN: Final = Stop("the server asked not to try again")
NO_ATTEMPTS_LEFT: Final = Stop("no attempts left")
NO_TIME_LEFT: Final = Stop("its deadline would pass before the next attempt")
TIMER_STOPPED: Final = Stop("its timer was stopped, or takes no more timeouts")
NO_BUDGET: Final = Stop("too many of this target's calls are retries already")


@dataclass(frozen=True, slots=True)
class RetryConfig:
    """A retry policy as it applies to one method."""

    retry_on: frozenset[str]
    max_attempts: int
    backoff: Backoff
    attempt_timeout_ns: int
    """`NEVER` for no limit of its own."""
    idempotent: bool
    max_pushback_ns: int
    """`NEVER` for no limit."""
    replay_buffer_bytes: int
    budget: BudgetKey | None
    """What the target's budget is made with; None for no limit."""

    @classmethod
    def from_policy(cls, policy: RetryPolicy, *, idempotent: bool) -> RetryConfig:
        """Make them of what the user has set.

        A call of a method that is not idempotent is never retried, so its one attempt has all the
        time of the call.
        """
        retry_on: frozenset[str] = policy.retry_on
        limit = policy.attempt_timeout if idempotent else None
        return cls(
            retry_on=retry_on if limit is None else retry_on | {"DEADLINE_EXCEEDED"},
            max_attempts=policy.max_attempts,
            backoff=Backoff(policy.backoff),
            attempt_timeout_ns=NEVER if limit is None else to_ns(limit),
            idempotent=idempotent,
            max_pushback_ns=NEVER if policy.max_pushback is None else to_ns(policy.max_pushback),
            replay_buffer_bytes=policy.replay_buffer_bytes,
            budget=budget_key(policy),
        )


def budget_key(policy: RetryPolicy | HedgingPolicy) -> BudgetKey | None:
    """What the budget of a policy is made with. Policies with equal keys share one budget."""
    limit = policy.retry_budget
    return (limit, policy.min_retries) if isinstance(limit, (int, float)) else limit


class Budget(Protocol):
    """Limits how many calls of one target are sent again."""

    def call(self, now_ns: int) -> None:
        """Count a call that begins."""

    def failed(self, *, by_server: bool) -> None:
        """Count an attempt that failed, for a reason that says something of the server or not."""

    def take(self, now_ns: int) -> bool:
        """Whether a call may be sent again; counts that."""


class RetryPlan:
    """The attempts of one call whose first attempt was made. Not thread-safe."""

    __slots__ = ("_budget", "_config", "_deadline_ns", "_number", "_started_ns", "attempt_ns")

    def __init__(
        self,
        started_ns: int,
        deadline_ns: int,
        config: RetryConfig | None,
        budget: Budget | None,
    ) -> None:
        """Go on with a call.

        Args:
            started_ns: When its first attempt was made.
            deadline_ns: When all must have ended; `NEVER` for no limit.
            config: Which failures are followed by another attempt; None is no retry.
            budget: That of the call's target, which has counted the call; None is no limit.
        """
        self._started_ns = started_ns
        self._deadline_ns = deadline_ns
        self._config = config
        self._budget = budget
        self._number = 1
        self.attempt_ns = cut_short(config, started_ns, deadline_ns)
        """When the newest attempt must have ended."""

    def ended(self, now_ns: int, result: AttemptResult) -> NextAttempt | Stop:
        """Decide what follows after an attempt that has failed.

        Raises:
            Exception: What a wait strategy of the user's raised.
        """
        config = self._config
        if config is None:
            return NOT_NAMED
        if self._budget is not None:
            forbidden = result.pushback_ns is not None and result.pushback_ns < 0
            self._budget.failed(by_server=forbidden or result.code in config.retry_on)
        refusal = self._refusal(config, result)
        if refusal is not None:
            return refusal
        delay_ns = result.pushback_ns
        if delay_ns is None:
            delay_ns = config.backoff.next_delay_ns(
                self._number, elapsed_ns=now_ns - self._started_ns, error=result.error
            )
        if delay_ns is None or now_ns + delay_ns >= self._deadline_ns:
            return NO_TIME_LEFT
        if self._budget is not None and not self._budget.take(now_ns):
            return NO_BUDGET
        at_ns = now_ns + delay_ns
        self._number += 1
        self.attempt_ns = cut_short(config, at_ns, self._deadline_ns)
        return NextAttempt(self._number, at_ns, self.attempt_ns)

    def _refusal(self, config: RetryConfig, result: AttemptResult) -> Stop | None:
        """Why this failure is not followed by another attempt, time and budget apart."""
        if result.code not in config.retry_on:
            return NOT_NAMED
        if result.committed:
            return COMMITTED
        if not config.idempotent:
            return NOT_IDEMPOTENT
        if self._number >= config.max_attempts:
            return NO_ATTEMPTS_LEFT
        return None if result.pushback_ns is None else _refused_by(result.pushback_ns, config)


def _refused_by(pushback_ns: int, config: RetryConfig) -> Stop | None:
    """Why the wait that a server asks for ends the retries; None if it does not."""
    if pushback_ns < 0:
        return FORBIDDEN
    if pushback_ns <= config.max_pushback_ns:
        return None
    asked_s, most_s = to_seconds(pushback_ns), to_seconds(config.max_pushback_ns)
    return Stop(
        f"the server asked to wait {asked_s:.15g} s, which is longer than max_pushback "
        f"({most_s:.15g} s)"
    )


def cut_short(config: RetryConfig | None, at_ns: int, deadline_ns: int) -> int:
    """The deadline of an attempt that is made at `at_ns`, in a call that ends at `deadline_ns`."""
    return deadline_ns if config is None else min(deadline_ns, at_ns + config.attempt_timeout_ns)


class RetryBudget:
    """The calls and retries of one target in the last ten seconds."""

    __slots__ = ("_min_retries", "_share", "_slots")

    def __init__(self, share: float, min_retries: int) -> None:
        """Begin with nothing counted.

        Args:
            share: How many of the calls may be retries: 0.2 is one for every five calls.
            min_retries: How many retries are allowed in any case.
        """
        self._share = share
        self._min_retries = min_retries
        self._slots: list[list[int]] = [[0, 0, 0] for _ in range(RECENT_SECONDS)]

    def call(self, now_ns: int) -> None:
        """Count a call (not its retries)."""
        self._slot(now_ns // SLOT_NS)[CALLS] += 1

    def failed(self, *, by_server: bool) -> None:
        """Do nothing: calls and retries are counted, failures are not."""

    def take(self, now_ns: int) -> bool:
        """Count a retry, if there is one left; False if not."""
        second = now_ns // SLOT_NS
        slot = self._slot(second)
        slot[RETRIES] += 1
        recent = [one for one in self._slots if one[SECOND] > second - RECENT_SECONDS]
        retries = sum(one[RETRIES] for one in recent)
        if retries <= max(self._min_retries, self._share * sum(one[CALLS] for one in recent)):
            return True
        slot[RETRIES] -= 1
        return False

    def _slot(self, second: int) -> list[int]:
        """Where to count what happens now; what its place held ten seconds ago is forgotten.

        A thread that read the clock long ago counts in the newer slot that it finds.
        """
        slot = self._slots[second % RECENT_SECONDS]
        if slot[SECOND] < second:
            slot = self._slots[second % RECENT_SECONDS] = [second, 0, 0]
        return slot


class RetryThrottle:
    """The tokens of one target."""

    __slots__ = ("_max", "_ratio", "_tokens")

    def __init__(self, max_tokens: int, token_ratio: float) -> None:
        """Begin with a full bucket.

        Args:
            max_tokens: Its size.
            token_ratio: What a success puts back.
        """
        self._max = max_tokens * 1000  # in thousandths, as gRFC A6 wants the ratio
        self._ratio = int(token_ratio * 1000 + 1e-6)
        self._tokens = self._max

    def call(self, now_ns: int) -> None:
        """Count an attempt as a success until it fails."""
        self._tokens = min(self._tokens, self._max) + self._ratio

    def failed(self, *, by_server: bool) -> None:
        """Take back that success; and a token, if the failure says something of the server."""
        self._tokens = max(0, self._tokens - self._ratio - (1000 if by_server else 0))

    def take(self, now_ns: int) -> bool:
        """Whether the bucket is more than half full; if so, another attempt begins."""
        if min(self._tokens, self._max) * 2 <= self._max:
            return False
        self.call(now_ns)
        return True
