"""One call on its way out: what its tries are made with, and what is decided about them.

Between the plan, which decides, and the two ways to carry it out: on the caller's thread
(`_client.py`), or behind a call that the caller holds already (`_client_live.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import grpc

from rpcwheel._grpc.calls import AnsweredCall, AnsweredStream, EndedCall
from rpcwheel._grpc.details import details_of, details_with, metadata_of, with_attempt
from rpcwheel._grpc.status import outcome_of_error
from rpcwheel._grpc.styles import has_status
from rpcwheel.call import Kind
from rpcwheel.durations import to_ns
from rpcwheel.errors import FailbackError
from rpcwheel.observe import HookFailed, emit

from ._client_requests import Feed
from .core import Answer
from .parked import KEPT_BYTES, kept_metadata, kept_request, resend_timeout
from .state import ANSWER_KEY, answered_by, seconds_left

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rpcwheel._grpc.details import Details
    from rpcwheel._grpc.styles import AnyCall
    from rpcwheel.call import Attempt, Finish
    from rpcwheel.failback.policy import FailbackPolicy
    from rpcwheel.failback.sync import FailbackInvoker

    from .state import ClientState

__all__ = ["Outgoing"]


class Outgoing:
    """One call. Not thread-safe: one owner at a time."""

    __slots__ = (
        "_attempts",
        "_continuation",
        "_details",
        "_request",
        "_started_ns",
        "feed",
        "kind",
        "method",
        "plan",
        "rules",
        "state",
    )

    def __init__(
        self,
        state: ClientState[FailbackInvoker],
        kind: Kind,
        continuation: Callable[[Any, Any], Any],
        details: Any,  # noqa: ANN401 - whatever an outer interceptor made
        request: Any,  # noqa: ANN401
    ) -> None:
        self.state = state
        self.kind = kind
        requests_stream = kind is Kind.STREAM_UNARY or kind is Kind.STREAM_STREAM  # the quick way
        self.method: str = details.method
        self.rules = rules = state.rules.of(self.method)
        timeout = details.timeout
        self._started_ns = now_ns = state.now_ns()
        own_ns = None if timeout is None else to_ns(timeout, what="timeout")
        self.plan = state.plan(rules, own_ns, now_ns)
        self._continuation = continuation
        self._details = details
        self._request = request
        self.feed: Feed | None = None
        self._attempts = 0
        if requests_stream and (rules.retry is not None or rules.failback is not None):
            limit = KEPT_BYTES if rules.retry is None else rules.retry.replay_bytes
            self.feed = Feed(request, limit)

    def begin(self) -> Attempt | Finish:
        """Say whether and until when the first try may run."""
        return self.plan.begin(self._started_ns)

    def make(self, attempt: Attempt) -> AnyCall:
        """Make a try."""
        self._attempts = number = attempt.number
        now_ns = self._started_ns if number == 1 else self.state.now_ns()
        details = details_with(self._details, seconds_left(attempt.deadline_ns, now_ns))
        if number > 1:
            details = details._replace(metadata=with_attempt(details.metadata, number))
        feed = self.feed
        return self._continuation(details, self._request if feed is None else feed.sender())

    def after(self, error: BaseException, *, handed: bool = False) -> Attempt | Finish:
        """Say what follows after a try that failed. May run users' wait objects."""
        committed = handed or (self.feed is not None and not self.feed.replayable)
        outcome = outcome_of_error(error, committed=committed)
        return self.state.after(self.method, self.rules, self.plan, outcome, self._attempts)

    def end(self, call: AnyCall, error: BaseException, *, handed: bool = False) -> AnyCall:
        """Give the caller's call after a failure that no retry follows. May run users' predicates.

        Args:
            call: The failed call.
            error: How it failed.
            handed: Whether messages of it are in the caller's hands.

        Raises:
            FailbackFull, FailbackClosed: The call is to be queued and can't be; from `error`.
        """
        if not has_status(error):
            return call
        answer = self.state.answer(
            self.method,
            self.rules,
            error,
            attempts=self._attempts,
            started_ns=self._started_ns,
            handed=handed,
        )
        match answer:
            case Answer.EXCUSE if self.rules.failsafe is not None:
                return self._answered(answer, error, self.rules.failsafe.default)
            case Answer.PARK if self.rules.failback is not None:
                if self._park(self.rules.failback, error):
                    return self._answered(answer, error, self.rules.failback.default)
        return call

    def late(self, reason: str) -> EndedCall:
        """Give the caller's call where no try was made at all."""
        return EndedCall(
            grpc.StatusCode.DEADLINE_EXCEEDED, f"Deadline Exceeded before the call began: {reason}"
        )

    def close(self) -> None:
        """Let go of what the tries used. Any thread, any number of times."""
        if self.feed is not None:
            self.feed.close()

    def seconds_left(self) -> float | None:
        """What is left of its deadline; None if it has none."""
        return seconds_left(self.plan.deadline_ns, self.state.now_ns())

    def _answered(self, answer: Answer, error: Any, default: Any) -> AnsweredCall:  # noqa: ANN401
        who, details = answered_by(answer, error.code().name, error.details())
        kind = AnsweredStream if self.kind.streams_responses else AnsweredCall
        return kind(
            default,
            details,
            initial=metadata_of(error.initial_metadata()),
            trailing=(*metadata_of(error.trailing_metadata()), (ANSWER_KEY, who)),
        )

    def _park(self, policy: FailbackPolicy, error: BaseException) -> bool:
        """Queue the call for a later delivery; False if its failure is the caller's."""
        requests = (
            [kept_request(self._request)] if self.feed is None else self.feed.gather(self.method)
        )
        if requests is None:
            error.add_note(f"{self.method}: not queued by failback, its requests are not all known")
            return False
        resend = Resend(self, self._continuation, self._later(policy), self._attempts)
        try:
            queue = self.state.invoker_of(policy, self.method)
            return queue.park(error, resend, *requests)  # type: ignore[arg-type]  # it has a status
        except FailbackError:
            raise
        except Exception as raised:  # noqa: BLE001 - a user's predicate or wait object
            emit(HookFailed(self.method, "failback", raised))
            return False

    def _later(self, policy: FailbackPolicy) -> Details:
        """What a delivery in the background is made with: the caller's, but for what is stale."""
        given = details_of(self._details)
        return given._replace(
            timeout=resend_timeout(given.timeout, self.rules),
            metadata=kept_metadata(given.metadata, policy),
        )


class Resend:
    """Makes a parked call again; called with its requests, gives the call or raises its failure."""

    __slots__ = ("_continuation", "_details", "_kind", "_number", "label")

    def __init__(
        self,
        outgoing: Outgoing,
        continuation: Callable[[Any, Any], Any],
        details: Details,
        attempts: int,
    ) -> None:
        self.label = outgoing.method
        self._kind = outgoing.kind
        self._continuation = continuation
        self._details = details
        self._number = attempts

    def __call__(self, *requests: Any) -> Any:  # noqa: ANN401 - a future: failback waits for it
        self._number += 1
        metadata = with_attempt(self._details.metadata, self._number)
        details = self._details._replace(metadata=metadata)
        call = self._continuation(
            details, iter(requests) if self._kind.streams_requests else requests[0]
        )
        if self._kind.streams_responses:
            _drain(call)
            return None
        return call


def _drain(messages: Iterator[Any]) -> None:
    for _ in messages:
        pass
