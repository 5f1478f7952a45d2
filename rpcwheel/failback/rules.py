"""Decides whether and when a queued call is attempted again. The time is an argument."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from rpcwheel._grpc.calls import (
    code_of,
    is_canceled_by_server,
    is_channel_closed_error,
    value_of,
    was_not_sent,
)
from rpcwheel.backoff import Backoff, wait_of_call
from rpcwheel.call.matching import Matcher
from rpcwheel.call.metadata import pushback_ns
from rpcwheel.durations import MAX_NS, NEVER, to_ns
from rpcwheel.errors import BreakerOpen
from rpcwheel.rpc import Stop

from .pacing import BUSY_CODES

if TYPE_CHECKING:
    from rpcwheel.call.failback_policy import FailbackPolicy

    from .queued_call import QueuedCall

NO_ATTEMPTS_LEFT: Final = Stop("no attempts left")
NOT_NAMED: Final = Stop("its error is not one that `retry_on` names")
CHANNEL_CLOSED: Final = Stop(
    "its channel was closed; close the kit, or the queue, before the channel"
)
CANCELLED: Final = Stop(
    "its attempt was cancelled, as by a channel that was closed; "
    "close the kit, or the queue, before the channel"
)

MIN_DELAY_NS: Final = 50_000_000
"""The shortest wait after an attempt that was not sent, and, during `close`, before an attempt that
the policy alone would not allow any more. `close` makes no wait shorter than this."""

CLOSED_CHANNEL_DELAY_NS: Final = 1_000_000_000
"""The wait of a stored call after an attempt that this process has ended, as it has closed the
channel."""


class RetryRules:
    """The rules of one policy. Immutable.

    They run user code, so they must be applied without a lock.
    """

    def __init__(self, policy: FailbackPolicy) -> None:
        self._matches = Matcher(policy.retry_on)
        self._backoff = Backoff(policy.backoff, policy.stop, policy.limit)
        self._backoff_if_not_sent = Backoff(policy.backoff, policy.stop)
        self._unlimited_backoff = Backoff(policy.backoff)
        self._max_delay_ns = NEVER if policy.journal is None else to_ns(policy.max_age)

    def next_delay_ns(
        self, call: QueuedCall, error: BaseException, now_ns: int, closes_at_ns: int | None
    ) -> int | Stop:
        """Decide how long to wait before the next attempt, or that there is none.

        During `close`, the number of attempts of calls in the memory is not limited, and no wait is
        longer than half of the time that is left: a server that comes back in time gets its calls.
        A stored call is attempted after `close` by another process, as the policy says.

        After an attempt that was not sent, the wait is at least the pushback in its metadata, or
        the time until an open circuit breaker sends calls again.

        Args:
            call: The call. An attempt that does not count is not among its `attempts`.
            error: How its last attempt has failed.
            now_ns: Now.
            closes_at_ns: When the drain of `close` ends; None while the queue is open.

        Raises:
            Exception: A predicate, wait or stop object of the user's raised it.
        """
        if call.reason:
            return Stop(call.reason)
        is_closing = closes_at_ns is not None
        if call.stored is not None:
            if was_ended_here(call, error, is_closing=is_closing):
                return CLOSED_CHANNEL_DELAY_NS
            closes_at_ns = None
        delivery_was_not_sent = call.last_attempt_was_delivery and was_not_sent(error)
        least_ns = _least_delay_ns(error)
        attempts, elapsed_ns, idle_ns = call.attempts, now_ns - call.started_ns, call.idle_ns
        if not self._is_retried(call, error, elapsed_ns):
            return why_not_retried(error)

        def delay_by(backoff: Backoff) -> int | None:
            return wait_of_call(
                backoff.next_delay_ns(
                    attempts,
                    elapsed_ns=elapsed_ns,
                    error=error,
                    idle_ns=idle_ns,
                    least_ns=least_ns,
                )
            )

        delay_ns = delay_by(self._backoff_if_not_sent if delivery_was_not_sent else self._backoff)
        if delay_ns is None and closes_at_ns is not None and call.last_attempt_was_delivery:
            delay_ns = max(delay_by(self._unlimited_backoff) or 0, MIN_DELAY_NS)
        if delay_ns is None:
            return NO_ATTEMPTS_LEFT
        if closes_at_ns is not None:
            delay_ns = min(delay_ns, max((closes_at_ns - now_ns) // 2, MIN_DELAY_NS))
        if call.stored is not None:
            delay_ns = min(delay_ns, max(0, call.expires_ns - now_ns), MAX_NS)
        return min(delay_ns, self._max_delay_ns)

    def _is_retried(self, call: QueuedCall, error: BaseException, elapsed_ns: int) -> bool:
        """Whether a call is attempted again after an error, if it has attempts left.

        After the first attempt, `retry_on` decides. The caller of a queued call already has its
        response, so the call is not given up because its server is busy, unavailable or being
        stopped, or because an attempt was not sent.
        """
        is_refused = code_of(error) in BUSY_CODES or is_canceled_by_server(error)
        if call.last_attempt_was_delivery and (is_refused or was_not_sent(error)):
            return True
        if call.retry_on is not None:
            return code_of(error) in call.retry_on
        return self._matches(error, attempt=call.attempts, elapsed_ns=elapsed_ns)


def counts_as_attempt(call: QueuedCall, error: BaseException, *, is_closing: bool) -> bool:
    """Whether an attempt that failed counts: it was sent, and not ended by this process.

    Of a call without a journal, an attempt that this process has ended counts too.
    """
    if was_not_sent(error):
        return False
    return call.stored is None or not was_ended_here(call, error, is_closing=is_closing)


def was_ended_here(call: QueuedCall, error: BaseException, *, is_closing: bool) -> bool:
    """Whether this process ended the attempt, as by closing its channel.

    Such a failure says nothing about the server.
    """
    why = why_not_retried(error)
    if call.stored is None:
        return why is not NOT_NAMED
    is_over = is_closing or not call.is_open()
    if why is CANCELLED and not call.stored.target:  # perhaps by the function itself
        return is_over
    return why in (CHANNEL_CLOSED, CANCELLED) or (is_over and code_of(error) == "CANCELLED")


def why_not_retried(error: BaseException) -> Stop:
    """Say why an error that `retry_on` does not name ends a call."""
    if is_channel_closed_error(error):
        return CHANNEL_CLOSED
    # By name, because `asyncio` and `concurrent.futures` have a class each.
    return CANCELLED if type(error).__name__ == "CancelledError" else NOT_NAMED


def _least_delay_ns(error: BaseException) -> int:
    """Return the shortest wait after an attempt: 0 if it was sent."""
    if not was_not_sent(error):
        return 0
    if isinstance(error, BreakerOpen):
        return max(MIN_DELAY_NS, to_ns(error.retry_after or 0.0))
    return max(MIN_DELAY_NS, pushback_ns(value_of(error, "trailing_metadata")) or 0)
