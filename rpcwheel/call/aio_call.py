"""The tries of one call on an event loop: what carries out the plan, through either door.

`Tries` conducts a `Relay` (see `rpcwheel._grpc.aio_relay`), which is what the caller holds. How a
try is made is the door's matter: `_aio_client` awaits the continuation that grpc.aio gave it, in a
task, as it may run other interceptors; `aio_channel` calls the member of a channel, which gives the
try at once. Nothing here waits but those tasks: a try's end and the timer both call.
"""

from __future__ import annotations

import asyncio
import contextlib
from contextvars import copy_context
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

import grpc

from rpcwheel._grpc.aio_finished import failed_call, finished_call, refused_by, status_of
from rpcwheel._grpc.aio_relay import NotAtOnceError, failure_of, has_ended
from rpcwheel._grpc.status import outcome_of_error
from rpcwheel.call.retry import COMMITTED, NO_TIME
from rpcwheel.durations import NEVER, to_seconds
from rpcwheel.errors import FailbackError
from rpcwheel.observe import CallbackFailed, RetryStopped, emit
from rpcwheel.rpc import NextAttempt, Stop

from ._aio_member import Listening
from ._aio_requests import Requests
from .config import (
    ANSWER_KEY,
    GATHER_S,
    Outcome,
    answered_by,
    copy_of,
    kept_request,
    messages_of,
    seconds_left,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from rpcwheel._grpc.aio_finished import FinishedCall
    from rpcwheel._grpc.aio_relay import Relay
    from rpcwheel.call.retry import RetryPlan
    from rpcwheel.failback.policy import FailbackPolicy
    from rpcwheel.rpc import Kind
    from rpcwheel.timer import Timeout
    from rpcwheel.timer.api import Timer

    from ._aio_member import Member
    from ._aio_resend import Resend

GRACE_S: Final = 1.0
"""How late a timer may be, within the deadline, before the loop goes on without it."""

STOPPED: Final = Stop("its timer was stopped")

Start = TypeVar("Start")
Options = TypeVar("Options")

__all__ = ["Tries", "late"]


class Tries(Generic[Start, Options]):
    """The tries of one call. The base of both doors.

    Made for every call, and most go well: it is one plain `__init__`, and what only a failed try
    needs (the plan, the loop) is looked up then.
    """

    # Defaults of the class: a call that goes well sets few of them.
    requests: Requests | None = None
    _plan: RetryPlan | None = None  # once a try has failed
    _attempts = 1
    _timeout: Timeout | None = None  # until the next try
    _look: asyncio.TimerHandle | None = None  # whether the timer is late or was stopped
    _task: asyncio.Task[None] | None = None  # that makes it, or that reads the requests

    def __init__(
        self,
        member: Member,
        started_ns: int,
        deadline_ns: int,
        request: object,
        start: Start,
        options: Options,
        own_timeout: float | None,
    ) -> None:
        """Begin a call; the door makes its first try, and later ones with `start` and `options`."""
        if member.keep_bytes is not None and request is not None:
            self.requests = Requests(request, member.keep_bytes)
        elif member.keeps and request.__class__ is not bytes:
            request = copy_of(request)  # the caller may change it; 2 µs for a small message
        self._request = request
        self._member = member
        self._started_ns = started_ns
        self._deadline_ns = deadline_ns
        self._start = start
        self._options = options
        self._own_timeout = own_timeout
        self._context = copy_context()
        self._slow = member.state.watch(member.method, member.config)

    @property
    def method(self) -> str:
        """In full."""
        return self._member.method

    @property
    def kind(self) -> Kind:
        """Which of the four."""
        return self._member.kind

    def make(self, relay: Relay, timeout: float | None, number: int) -> None:
        """Make a try, and have the relay show it as soon as there is one."""
        raise NotImplementedError

    def resend(self, policy: FailbackPolicy, attempts: int) -> Resend:
        """What failback calls to deliver the call."""
        raise NotImplementedError

    def waits(self, relay: Relay) -> None:
        """Note that there is no try now, and that one will follow."""

    @property
    def sent(self) -> Any:
        """The request of the next try: the message, or what yields them."""
        return self._request if self.requests is None else self.requests.feed()

    # --- For the relay ---

    def failed(self, relay: Relay, call: Any, error: BaseException | None) -> None:
        """Act on a try that has not succeeded."""
        if error is None:
            try:
                error = failure_of(call)
            except NotAtOnceError:  # a foreign call, which says that it is done and is not
                relay.finish(call)
                return
        if error is None:
            relay.finish(call)
        elif not isinstance(error, grpc.RpcError):
            relay.finish(call if has_ended(call) else failed_call(self.kind, error))
        elif not (self._member.config.retry or self._member.answers):
            self._give(relay, call, error)
        else:  # not here: this is deep inside of grpc, and in nobody's context
            soon = asyncio.get_running_loop().call_soon
            soon(self._judge, relay, call, error, context=self._context)

    def finished(self) -> None:
        """Let go of all."""
        if self._slow is not None:
            self._slow.cancel()
            self._slow = None
        self._wait_over()
        if self._task is not None:
            self._task.cancel()
            self._task = None
        if self.requests is not None:
            self.requests.close()

    def time_remaining(self) -> float | None:
        """Seconds until the deadline of the whole call."""
        return seconds_left(self._deadline_ns, self._member.state.now_ns())

    # --- After a try ---

    def _judge(self, relay: Relay, call: Any, error: grpc.RpcError) -> None:
        """Decide what follows after a try that failed with a status."""
        if not relay.shows(call):
            return  # cancelled meanwhile
        member = self._member
        written = self.kind.streams_requests and self._request is None
        whole = not written and (self.requests is None or self.requests.recording.whole)
        outcome = outcome_of_error(error, committed=relay.handed or not whole)
        plan = self._plan
        if plan is None:
            resumed = member.state.resumed
            plan = self._plan = resumed(member.config, self._started_ns, self._deadline_ns)
        step = member.state.after(self.method, member.config, plan, outcome, self._attempts)
        if isinstance(step, NextAttempt):
            relay.pause()
            self._await_time(relay, step, call, error)
        else:
            self._answer(relay, call, error)

    def _await_time(
        self, relay: Relay, step: NextAttempt, call: object, error: grpc.RpcError
    ) -> None:
        wait_ns = step.at_ns - self._member.state.now_ns()
        if wait_ns <= 0:
            self._again(relay, step, call, error)
            return
        woken = partial(self._woken, relay, step, call, error)
        loop = asyncio.get_running_loop()
        wake = partial(_call_soon, loop, partial(self._context.copy().run, woken))
        self.waits(relay)
        state, wait_s = self._member.state, to_seconds(wait_ns)
        self._timeout = state.wake(wake, wait_s, "retry")
        if self._timeout is None:
            self._answer(relay, call, error)
        else:
            left_s = self.time_remaining()
            late_s = wait_s + GRACE_S if left_s is None else min(wait_s + GRACE_S, left_s)
            look = partial(self._overslept, state.timer, relay, step, call, error)
            self._look_later(late_s, look)

    def _look_later(self, delay_s: float, look: Callable[[], None]) -> None:
        loop = asyncio.get_running_loop()
        self._look = loop.call_later(delay_s, look, context=self._context)

    def _overslept(
        self, timer: Timer, relay: Relay, step: NextAttempt, call: object, error: grpc.RpcError
    ) -> None:
        """Go on without the timer if it is late; end the call if it was stopped."""
        if timer.stopped:
            self._wait_over()
            self._give_up(relay, call, error, STOPPED)
        elif self._member.state.now_ns() >= step.at_ns:
            self._woken(relay, step, call, error)
        else:  # time that is set by hand
            look = partial(self._overslept, timer, relay, step, call, error)
            self._look_later(GRACE_S, look)

    def _woken(self, relay: Relay, step: NextAttempt, call: object, error: grpc.RpcError) -> None:
        if self._timeout is not None:  # else it was given up, or has ended
            self._wait_over()
            self._again(relay, step, call, error)

    def _wait_over(self) -> None:
        if self._timeout is not None:
            self._timeout.cancel()
            self._timeout = None
        if self._look is not None:
            self._look.cancel()
            self._look = None

    def _give_up(self, relay: Relay, call: object, error: grpc.RpcError, why: Stop) -> None:
        """End the call though a retry was decided."""
        code = status_of(error).code().name
        emit(RetryStopped(self.method, self._attempts, code, why.reason))
        self._answer(relay, call, error)

    def _again(self, relay: Relay, step: NextAttempt, call: object, error: grpc.RpcError) -> None:
        """Make the next try, unless it is too late."""
        if relay.done():
            return
        if self.requests is not None and not self.requests.recording.whole:
            self._give_up(relay, call, error, COMMITTED)  # it grew too much since
            return
        self._attempts = step.number
        self.make(relay, seconds_left(step.deadline_ns, self._member.state.now_ns()), step.number)

    # --- After the last one ---

    def begun_late(self, relay: Relay) -> None:
        """End a call without a try: its deadline had passed before it began."""
        self._attempts = 0
        call = late(self.kind)
        assert call.error is not None  # noqa: S101 - for mypy
        self._answer(relay, call, status_of(call.error))

    def _answer(self, relay: Relay, call: object, error: grpc.RpcError) -> None:
        """End the call with its failure, or with what its config says instead."""
        member = self._member
        answer = member.state.outcome(
            self.method,
            member.config,
            error,
            attempts=self._attempts,
            started_ns=self._started_ns,
            handed=relay.handed,
        )
        match answer:
            case Outcome.FAIL:
                self._give(relay, call, error)
            case Outcome.DEFAULT_RESPONSE:
                assert member.config.default_response is not None  # noqa: S101 - for mypy
                self._instead(relay, answer, error, member.config.default_response.default)
            case Outcome.ENQUEUE:
                self._park_when_read(relay, call, error)

    def _park_when_read(self, relay: Relay, call: object, error: grpc.RpcError) -> None:
        """Park the call, once its request stream is known to its end.

        A stream that answers may wait for what its caller makes of the answers; it is not read on.
        """
        requests = self.requests
        member = self._member
        if self.kind.streams_requests and self._request is None:
            if member.state.queues(self.method, member.config, error):
                error.add_note(f"{self.method}: not queued by failback, its requests were written")
            self._give(relay, call, error)
            return
        if requests is None:
            self._park(relay, call, error, kept_request(self._request))
            return
        if not requests.known and not member.state.queues(self.method, member.config, error):
            self._give(relay, call, error)
            return
        if requests.is_plain and not requests.complete:
            requests.drain_plain()
        if requests.complete or not requests.recording.whole or self.kind.streams_responses:
            self._park_stream(relay, call, error)
            return
        relay.pause()
        drain = self._drain(relay, call, error)
        loop = asyncio.get_running_loop()
        self._task = loop.create_task(drain, context=self._context.copy())

    async def _drain(self, relay: Relay, call: object, error: grpc.RpcError) -> None:
        assert self.requests is not None  # noqa: S101 - for mypy
        left_s = self.time_remaining()
        patience_s = GATHER_S if left_s is None else min(GATHER_S, left_s)
        with contextlib.suppress(Exception):  # the user's iterator raised; then it is not complete
            async with asyncio.timeout(patience_s):
                await self.requests.drain()
        self._task = None
        self._park_stream(relay, call, error)

    def _park_stream(self, relay: Relay, call: object, error: grpc.RpcError) -> None:
        assert self.requests is not None  # noqa: S101 - for mypy
        if self.requests.known:
            self._park(relay, call, error, *self.requests.recording.messages)
        else:
            note = f"{self.method}: not queued by failback, its requests are not all known"
            error.add_note(note)
            self._give(relay, call, error)

    def _park(self, relay: Relay, call: object, error: grpc.RpcError, *requests: object) -> None:
        policy = self._member.config.failback
        assert policy is not None  # noqa: S101 - for mypy
        try:
            queue = self._member.state.queue_of(policy, self._member.config.queue)
            parked = queue.park(error, self.resend(policy, self._attempts), *requests)
        except FailbackError as refusal:
            relay.finish(failed_call(self.kind, refused_by(refusal, error)))
            return
        except Exception as raised:  # noqa: BLE001 - a user's predicate or wait object
            emit(CallbackFailed(self.method, "failback", raised))
            parked = False
        if parked:
            self._instead(relay, Outcome.ENQUEUE, error, policy.default)
        else:
            self._give(relay, call, error)

    def _give(self, relay: Relay, call: Any, error: grpc.RpcError) -> None:
        """End the call with its failure: the try itself, unless its status may be blurred yet."""
        if self.kind.streams_requests:
            relay.finish(failed_call(self.kind, error), source=call)
        else:
            relay.finish(call)

    def _instead(
        self, relay: Relay, answer: Outcome, error: grpc.RpcError, default: object
    ) -> None:
        """End the call well, with a default."""
        result = messages_of(default) if self.kind.streams_responses else default
        status = status_of(error)
        who, details = answered_by(answer, status.code().name, status.details())
        trailing = (*(status.trailing_metadata() or ()), (ANSWER_KEY, who))
        initial = status.initial_metadata()
        ok = grpc.StatusCode.OK
        relay.finish(
            finished_call(self.kind, ok, details, result=result, initial=initial, trailing=trailing)
        )

    # --- While the caller waits for a message ---

    def listen(self, relay: Relay, call: object) -> Listening | None:
        """Have a silent stream given up; what is returned is to be cancelled when it spoke."""
        member = self._member
        if member.config.message_timeout_ns == NEVER:
            return None
        listening = Listening()
        loop = asyncio.get_running_loop()
        silent = partial(_call_soon, loop, partial(self._silent, relay, call, listening))
        delay_s = to_seconds(member.config.message_timeout_ns)
        listening.timeout = member.state.wake(silent, delay_s, "message_timeout")
        return listening

    def _silent(self, relay: Relay, call: Any, listening: Listening) -> None:
        """End a try that was silent for too long."""
        if listening.over or not relay.shows(call):
            return
        details = self._member.state.silent(self.method, self._member.config)
        relay.begin(finished_call(self.kind, grpc.StatusCode.DEADLINE_EXCEEDED, details))
        call.cancel()


def late(kind: Kind) -> FinishedCall:
    """The caller's call where no try was made at all."""
    return finished_call(
        kind,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        f"Deadline Exceeded before the call began: {NO_TIME.reason}",
    )


def _call_soon(loop: asyncio.AbstractEventLoop, step: Callable[[], object], _: Timeout) -> None:
    """What the timer does, on its own thread: have the loop take the next step."""
    with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
        loop.call_soon_threadsafe(step)
