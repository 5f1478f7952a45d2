"""One call on its way out: what its tries are made with, and what is decided about them.

Between the plan, which decides, and the two ways to carry it out: on the caller's thread
(`_client.py`), or behind a call that the caller holds already (`_client_live.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import grpc

from rpcwheel._grpc.calls import AnsweredCall, AnsweredStream, EndedCall, refused_by
from rpcwheel._grpc.details import details_of, details_with, metadata_of, with_attempt
from rpcwheel._grpc.status import is_channel_closed, outcome_of_error
from rpcwheel._grpc.styles import has_status
from rpcwheel.durations import to_ns
from rpcwheel.errors import FailbackError
from rpcwheel.observe import CallbackFailed, emit
from rpcwheel.rpc import Stop

from ._client_requests import Feed
from .config import (
    ANSWER_KEY,
    Outcome,
    answered_by,
    copy_of,
    kept_metadata,
    kept_request,
    messages_of,
    resend_timeout,
    seconds_left,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rpcwheel._grpc.details import Details
    from rpcwheel._grpc.styles import AnyCall
    from rpcwheel.call.retry import RetryPlan
    from rpcwheel.failback.policy import FailbackPolicy
    from rpcwheel.rpc import Kind, NextAttempt

    from .config import ClientState, MethodConfig

__all__ = ["Outgoing", "opened_for"]

CLOSED: Final = Stop("its channel was closed")


def opened_for(
    state: ClientState,
    config: MethodConfig,
    details: Any,
) -> tuple[int, int, int]:
    """Begin a call with the timeout that its caller gave; see `ClientState.open`."""
    timeout = details.timeout
    return state.open(config, None if timeout is None else to_ns(timeout, what="timeout"))


class Outgoing:
    """One call. Not thread-safe: one owner at a time."""

    __slots__ = (
        "_attempts",
        "_continuation",
        "_details",
        "_opened",
        "_plan",
        "_request",
        "config",
        "feed",
        "kind",
        "method",
        "state",
    )

    def __init__(
        self,
        state: ClientState,
        kind: Kind,
        continuation: Callable[[Any, Any], Any],
        details: Any,
        request: Any,
        opened: tuple[int, int, int] | None = None,
    ) -> None:
        """Begin a call, or go on with one after its first try.

        Args:
            state: That of its client.
            kind: Which of the four.
            continuation: Makes a try.
            details: What it is made with.
            request: The message, or what yields them.
            opened: What `ClientState.open` said when the first try was made; None if none was.
        """
        self.state = state
        self.kind = kind
        self.method: str = details.method
        self.config = config = state.configs.of(self.method)
        self._opened = opened_for(state, config, details) if opened is None else opened
        self._plan: RetryPlan | None = None  # until the first try has failed
        self._continuation = continuation
        self._details = details
        self._request = request
        self._attempts = 1
        self.feed: Feed | None = None
        if kind.streams_requests and (limit := config.keep_bytes) is not None:
            self.feed = Feed(request, limit)

    @property
    def is_late(self) -> bool:
        """Whether its deadline had passed before it began: then no try is made."""
        now_ns, deadline_ns, _ = self._opened
        return now_ns >= deadline_ns

    def first(self) -> AnyCall:
        """Make the first try."""
        now_ns, _, attempt_ns = self._opened
        feed = self.feed
        return self._continuation(
            details_with(self._details, seconds_left(attempt_ns, now_ns)),
            self._request if feed is None else feed.sender(),
        )

    def keep(self) -> None:
        """Keep the request as it is now: the caller goes on, and may change it before a retry."""
        if self.feed is None and self.config.resends:
            self._request = copy_of(self._request)

    def make(self, attempt: NextAttempt) -> AnyCall:
        """Make another try."""
        self._attempts = attempt.number
        left_s = seconds_left(attempt.deadline_ns, self.state.now_ns())
        details = details_with(self._details, left_s)
        details = details._replace(metadata=with_attempt(details.metadata, attempt.number))
        feed = self.feed
        try:
            return self._continuation(details, self._request if feed is None else feed.sender())
        except ValueError as error:
            if is_channel_closed(error):
                return _closed()
            raise

    def after(self, error: BaseException, *, handed: bool = False) -> NextAttempt | Stop:
        """Say what follows after a try that failed. May run users' wait objects."""
        if is_channel_closed(error):
            return CLOSED
        if self._plan is None:
            self._plan = self.state.resumed(self.config, *self._opened[:2])
        committed = handed or (self.feed is not None and not self.feed.replayable)
        outcome = outcome_of_error(error, committed=committed)
        return self.state.after(self.method, self.config, self._plan, outcome, self._attempts)

    def end(self, call: AnyCall, error: BaseException, *, handed: bool = False) -> AnyCall:
        """Give the caller's call after a failure that no retry follows. May run users' predicates.

        Args:
            call: The failed call.
            error: How it failed.
            handed: Whether messages of it are in the caller's hands.

        Raises:
            FailbackFull, FailbackClosed: The call is to be queued and can't be; from `error`, and
                an error of grpc too.
        """
        if is_channel_closed(error):  # grpc gives a blocking retry's as an outcome without status
            return call if has_status(error) or self._attempts == 1 else _closed()
        if not has_status(error):
            return call
        answer = self.state.outcome(
            self.method,
            self.config,
            error,
            attempts=self._attempts,
            started_ns=self._opened[0],
            handed=handed,
        )
        match answer:
            case Outcome.DEFAULT_RESPONSE if self.config.default_response is not None:
                return self._answered(answer, error, self.config.default_response.default)
            case Outcome.ENQUEUE if self.config.failback is not None:
                if self._park(self.config.failback, error):
                    return self._answered(answer, error, self.config.failback.default)
        return call

    def late(self) -> AnyCall:
        """Give the caller's call where no try was made at all. May run users' predicates."""
        self._attempts = 0
        error = EndedCall(
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
        """Let go of what the tries used. Any thread, any number of times."""
        if self.feed is not None:
            self.feed.close()

    def seconds_left(self) -> float | None:
        """What is left of its deadline; None if it has none."""
        return seconds_left(self._opened[1], self.state.now_ns())

    def _answered(self, answer: Outcome, error: Any, default: Any) -> AnsweredCall:
        who, details = answered_by(answer, error.code().name, error.details())
        streams = self.kind.streams_responses
        return (AnsweredStream if streams else AnsweredCall)(
            messages_of(default) if streams else default,
            details,
            initial=metadata_of(error.initial_metadata()),
            trailing=(*metadata_of(error.trailing_metadata()), (ANSWER_KEY, who)),
        )

    def _park(self, policy: FailbackPolicy, error: BaseException) -> bool:
        """Queue the call for a later delivery; False if its failure is the caller's."""
        if self.feed is None:
            requests: list[Any] | None = [kept_request(self._request)]
        elif self.feed.known or self.state.queues(self.method, self.config, error):
            requests = self.feed.gather(self.method, self.seconds_left())
        else:
            return False
        if requests is None:
            error.add_note(f"{self.method}: not queued by failback, its requests are not all known")
            return False
        resend = Resend(self, self._continuation, self._later(policy), self._attempts)
        try:
            queue = self.state.queue_of(policy, self.config.queue)
            return queue.park(error, resend, *requests)
        except FailbackError as refusal:
            raise refused_by(refusal, error) from error
        except Exception as raised:  # noqa: BLE001 - a user's predicate or wait object
            emit(CallbackFailed(self.method, "failback", raised))
            return False

    def _later(self, policy: FailbackPolicy) -> Details:
        """What a delivery in the background is made with: the caller's, but for what is stale."""
        given = details_of(self._details)
        return given._replace(
            timeout=resend_timeout(given.timeout, self.config),
            metadata=kept_metadata(given.metadata, policy),
        )


def _closed() -> EndedCall:
    """The caller's call where the channel was closed between two tries, as grpc ends one then."""
    return EndedCall(grpc.StatusCode.CANCELLED, "Channel closed!")


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

    def __call__(self, *requests: Any) -> Any:
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
