"""The settings of retries and hedging, their metadata, and their budgets.

* `with_attempt`, `pushback_ns` and `result_of` write and read the metadata of gRFC A6, and that of
  refusals by servers of rpcwheel.
* `RetryConfig` and `HedgingConfig` are the policies of a method, as `attempts` uses them.
* A `Budget` counts the calls of a target and their failed attempts, and decides whether another
  attempt is allowed. `RetryBudget` has the rule of Finagle and Envoy, `RetryThrottle` that of gRPC.

Nothing in this module waits or reads a clock: times are arguments, in nanoseconds. Budgets may be
used by any thread and have no lock.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from rpcwheel._grpc.calls import value_of, was_not_sent
from rpcwheel.backoff import Backoff
from rpcwheel.durations import NEVER, to_ns
from rpcwheel.rpc import (
    CODES,
    NONCE_KEY,
    PUSHBACK_KEY,
    REFUSAL_CODES,
    REFUSED_KEY,
    AttemptResult,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .policy import HedgingPolicy, RetryPolicy, RetryThrottling

BudgetKey: TypeAlias = "tuple[float, int] | RetryThrottling"
"""The settings of a budget: the arguments of `RetryBudget`, or those of `RetryThrottle`. Policies
with equal settings share one budget, so they are its key."""

Budget: TypeAlias = "RetryBudget | RetryThrottle"
"""Limits further attempts (retries and hedges) to one target."""

Metadata: TypeAlias = "tuple[tuple[str, str | bytes], ...]"

# --- Metadata of attempts, and the result of an attempt ---

ATTEMPTS_KEY: Final = "grpc-previous-rpc-attempts"
"""The number of previous attempts (gRFC A6). gRPC's core removes it if its own retries are enabled,
which is the default."""

RETRY_KEY: Final = "x-retry-attempt"
"""The number of previous attempts, under the key of go-grpc-middleware. gRPC's core keeps it."""

FORBID_NS: Final = -1
"""The pushback of a server that asks for no further attempt."""

MAX_PUSHBACK_DIGITS: Final = 12
"""Longer values are invalid. 10**12 ms are 30 years, and Python refuses to parse thousands of
digits."""


def with_attempt(
    metadata: Iterable[tuple[str, str | bytes]] | None, number: int, nonce: str | None = None
) -> Metadata:
    """Return the metadata of an attempt; from the second on with the number of previous attempts.

    From the second attempt on, values that the caller gave are replaced: a server may pass on the
    metadata of a call that was itself a retry.

    Args:
        metadata: That of the call, without a nonce.
        number: 1 for the first attempt.
        nonce: That of the attempt; None for none.
    """
    pairs = () if metadata is None else tuple((key, value) for key, value in metadata)
    if nonce is not None:
        pairs = (*pairs, (NONCE_KEY, nonce))
    if number <= 1:
        return pairs
    others = (pair for pair in pairs if pair[0] not in {ATTEMPTS_KEY, RETRY_KEY})
    before = str(number - 1)
    return (*others, (ATTEMPTS_KEY, before), (RETRY_KEY, before))


def pushback_ns(trailing: Iterable[tuple[str, str | bytes]] | None) -> int | None:
    """Return how long the server asks to wait before a retry; None if it does not ask.

    `FORBID_NS` if it asks for no retry, by a value that is not a number of milliseconds (gRFC A6):
    negative, invalid, or with more than `MAX_PUSHBACK_DIGITS` digits.
    """
    for key, value in trailing or ():
        if key == PUSHBACK_KEY:
            text = value.decode("ascii", "replace") if isinstance(value, bytes) else value
            is_digits = text.isascii() and text.isdecimal()
            is_valid = is_digits and len(text) <= MAX_PUSHBACK_DIGITS
            return int(text) * 1_000_000 if is_valid else FORBID_NS
    return None


def result_of(
    error: Any, *, committed: bool = False, nonce: str | None = None, server: Any = None
) -> AttemptResult:
    """Return the result of an attempt that failed with `error`.

    Args:
        error: A finished call of `grpc`, or an exception of `grpc` or `grpc.aio`. An exception of
            an inner interceptor may have only a code, or no code.
        committed: Whether the attempt can't be repeated, see `AttemptResult.committed`.
        nonce: That of the attempt; None if it had none.
        server: The subchannel of the attempt; None if the channel has only one server.
    """
    code = getattr(value_of(error, "code"), "name", None)
    if code not in CODES:  # it is no status of gRPC, but perhaps a bug: not to be repeated
        return AttemptResult(code="UNKNOWN", error=error, committed=True)
    trailing = value_of(error, "trailing_metadata")
    result = AttemptResult(code, error, pushback_ns(trailing), committed)
    if was_not_sent(error):
        return replace(result, not_sent=True)
    if code == "UNIMPLEMENTED" and server is not None:
        gone = server.lacks_service(value_of(error, "details"))
        return replace(result, refused=True, is_proven=True) if gone else result
    if code not in REFUSAL_CODES:
        return result
    echoes = [value for key, value in trailing or () if key == REFUSED_KEY]
    is_proven = nonce is not None and echoes == [nonce]
    return replace(result, refused=bool(echoes), is_proven=is_proven)


def not_sent_metadata(pushback_ns: int | None) -> Metadata:
    """Return the trailing metadata of an attempt that the client has refused, without sending it.

    Args:
        pushback_ns: How long to wait before the next call; None if that is not known.
    """
    return () if pushback_ns is None else ((PUSHBACK_KEY, str(-(-pushback_ns // 1_000_000))),)


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


# --- Settings ---


@dataclass(frozen=True, slots=True)
class RetryConfig:
    """The retry settings of one method."""

    retry_on: frozenset[str]
    max_attempts: int
    backoff: Backoff
    attempt_timeout_ns: int
    """`NEVER` for no limit."""
    idempotent: bool
    max_pushback_ns: int
    """`NEVER` for no limit."""
    replay_buffer_bytes: int
    budget: BudgetKey | None
    """The key of the budget for further attempts; None for no limit."""

    def retries_after(self, result: AttemptResult) -> bool:
        """Whether such a failure is retried: one of `retry_on`, or a refusal before the handler.

        If the method is not idempotent, the refusal must be proven.
        """
        if result.code in self.retry_on:
            return True
        return result.refused and (self.idempotent or result.is_proven)

    @classmethod
    def from_policy(cls, policy: RetryPolicy, *, idempotent: bool) -> RetryConfig:
        """Make the settings from the user's policy.

        A method that is not idempotent is not retried after a timeout, so its attempts have none of
        their own.
        If attempts have a timeout, an attempt that exceeds it is retried.
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


@dataclass(frozen=True, slots=True)
class HedgingConfig:
    """A hedging policy as it applies to one idempotent method."""

    delay_ns: int
    max_attempts: int
    non_fatal: frozenset[str]
    budget: BudgetKey | None
    """The key of the budget for further attempts; None for no limit."""
    max_pushback_ns: int = NEVER

    @classmethod
    def from_policy(cls, policy: HedgingPolicy) -> HedgingConfig:
        """Make the settings from the user's policy."""
        return cls(
            delay_ns=to_ns(policy.delay),
            max_attempts=policy.max_attempts,
            non_fatal=policy.non_fatal_codes,
            budget=budget_key(policy),
            max_pushback_ns=NEVER if policy.max_pushback is None else to_ns(policy.max_pushback),
        )


def budget_key(policy: RetryPolicy | HedgingPolicy) -> BudgetKey | None:
    """Return the key of the budget of a policy; None for no limit."""
    share_or_throttling = policy.retry_budget
    if isinstance(share_or_throttling, (int, float)):
        return share_or_throttling, policy.min_retries
    return share_or_throttling


def attempt_deadline_ns(config: RetryConfig | None, at_ns: int, deadline_ns: int) -> int:
    """Return the deadline of an attempt that is made at `at_ns`, within that of the call."""
    return deadline_ns if config is None else min(deadline_ns, at_ns + config.attempt_timeout_ns)


# --- The budgets of a target ---

RECENT_SECONDS: Final = 10
"""Seconds that count as recent, including the current one."""

SLOT_NS: Final = 1_000_000_000
"""The length of a slot: one second."""

SECOND, CALLS, RETRIES = range(3)
"""The items of a slot: which second it is for, and its numbers of calls and retries."""


class RetryBudget:
    """The calls and retries of one target in the last ten seconds.

    Retries may be at most a share of the recent calls, as in Finagle and Envoy; a minimum number is
    always allowed. There is one slot for each recent second, and each retry computes the sums.

    Without a lock, a count may be lost on Python without the GIL if two threads write at the same
    time; the error disappears with the slot. A retry is counted before it is allowed: threads that
    ask at the same time may get one retry too few, never one too many.
    """

    __slots__ = ("_min_retries", "_share", "_slots")

    def __init__(self, share: float, min_retries: int) -> None:
        """Make a budget without counts.

        Args:
            share: Retries for each call: 0.2 allows one retry for every five calls.
            min_retries: The number of retries that is always allowed.
        """
        self._share = share
        self._min_retries = min_retries
        self._slots: list[list[int]] = [[0, 0, 0] for _ in range(RECENT_SECONDS)]

    def call(self, now_ns: int) -> None:
        """Count a call; retries are not calls."""
        self._slot(now_ns // SLOT_NS)[CALLS] += 1

    def failed(self, *, by_server: bool) -> None:
        """Do nothing: failures are not counted."""

    def take(self, now_ns: int) -> bool:
        """Return whether a retry is allowed, and count it if so."""
        second = now_ns // SLOT_NS
        slot = self._slot(second)
        slot[RETRIES] += 1
        recent = [each for each in self._slots if each[SECOND] > second - RECENT_SECONDS]
        retries = sum(each[RETRIES] for each in recent)
        calls = sum(each[CALLS] for each in recent)
        if retries <= max(self._min_retries, self._share * calls):
            return True
        slot[RETRIES] -= 1
        return False

    def give_back(self, now_ns: int) -> None:
        """Do not count a retry that was allowed, because it was not sent."""
        oldest = now_ns // SLOT_NS - RECENT_SECONDS
        counted = (slot for slot in self._slots if slot[RETRIES] > 0 and slot[SECOND] > oldest)
        newest = max(counted, key=itemgetter(SECOND), default=None)
        if newest is not None:
            newest[RETRIES] -= 1

    def _slot(self, second: int) -> list[int]:
        """Return the slot of a second, in place of the slot of ten seconds before.

        A thread that read the clock more than ten seconds ago gets the newer slot in that place.
        """
        slot = self._slots[second % RECENT_SECONDS]
        if slot[SECOND] < second:
            slot = self._slots[second % RECENT_SECONDS] = [second, 0, 0]
        return slot


class RetryThrottle:
    """The token bucket of one target (gRFC A6).

    A failure of the server removes one token, a success adds `token_ratio`. Another attempt is
    allowed while the bucket is more than half full.

    An attempt counts as a success when it begins, which is corrected if it fails; so a successful
    call costs nothing at its end, and running calls count as successes. A full bucket has room for
    one such success. If several calls run while it is full and fail, each further one of them
    removes `token_ratio` too much.
    """

    __slots__ = ("_max", "_ratio", "_tokens")

    def __init__(self, max_tokens: int, token_ratio: float) -> None:
        """Make a full bucket.

        Args:
            max_tokens: The size of the bucket.
            token_ratio: How many tokens a success adds.
        """
        self._max = max_tokens * 1000  # in thousandths, the precision of gRFC A6
        self._ratio = int(token_ratio * 1000 + 1e-6)  # 1.001 * 1000 is 1000.9999999999999
        self._tokens = self._max

    def call(self, now_ns: int) -> None:
        """Count an attempt that begins as a success."""
        # May exceed the maximum by one success, so that a failure removes what was added here.
        self._tokens = min(self._tokens, self._max) + self._ratio

    def failed(self, *, by_server: bool) -> None:
        """Remove the tokens that `call` has added, and one token if `by_server`."""
        self._tokens = max(0, self._tokens - self._ratio - (1000 if by_server else 0))

    def take(self, now_ns: int) -> bool:
        """Return whether the bucket is more than half full, and count an attempt if so."""
        if min(self._tokens, self._max) * 2 <= self._max:
            return False
        self.call(now_ns)
        return True

    def give_back(self, now_ns: int) -> None:
        """Do nothing: an attempt that was not sent counts as a failure, see `failed`."""
