"""Calls that the caller holds while they run: `.future()`, and response streams.

The caller has a `LiveCall`; the tries behind it are made by a `Course`. gRPC's threads, which tell
the course how a try ended, take note of a success and hand everything else to a worker: deciding
may run users' wait objects and predicates, making a try runs other interceptors, and none of those
belongs there. Nor on the timer's thread, which only hands over.

The course does not know the caller's object, so that dropping it is noticed: it cancels, as grpc's
own does. One lock for each course; nothing of grpc's or the user's is called under it.
"""

from __future__ import annotations

import threading
import time
from contextvars import copy_context
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import grpc

from rpcwheel._concurrency.executor import EXECUTOR
from rpcwheel._grpc import styles
from rpcwheel._grpc.calls import EndedCall
from rpcwheel._grpc.details import metadata_of
from rpcwheel._grpc.styles import failure_of, has_ended, has_status, is_single_threaded
from rpcwheel.durations import to_seconds
from rpcwheel.errors import FailbackError
from rpcwheel.rpc import NextAttempt

from ._client_hooks import run_hooks
from .config import LOOK_INTERVAL_S

if TYPE_CHECKING:
    from collections.abc import Callable

    from rpcwheel._grpc.details import Metadata
    from rpcwheel._grpc.styles import AnyCall
    from rpcwheel.rpc import Stop
    from rpcwheel.timer import Timeout
    from rpcwheel.timer.api import Timer

    from ._client_hooks import Hook
    from .sync_call import Outgoing

__all__ = ["Course"]

BY_USER: Final = "Locally cancelled by application!"
DROPPED: Final = "Cancelled upon garbage collection!"

READERS_S: Final = 0.5
"""How long to wait, when a try has failed, for who still reads what came of it."""

TRAILERS_S: Final = 0.02
"""How long to wait, on empty initial metadata, for the failure that may come right behind them."""


class Course:
    """The tries of one call, from the first to what the caller gets in the end."""

    def __init__(self, outgoing: Outgoing) -> None:
        self.outgoing = outgoing
        self._context = copy_context()  # of the caller: what other interceptors look at
        self._changed = threading.Condition()
        self.final: AnyCall = None
        """The call whose outcome is the caller's; None while it is open."""
        self._try: Any = None  # the try that runs, or that ended last
        self._judging = False  # the try has failed, and it is not decided what follows
        self._answering = False  # what follows is an answer: too late to cancel
        self._handed = False  # something of the try is in the caller's hands
        self._readers = 0  # that wait for a message of the try
        self._silenced: Any = None  # the try that was cancelled because it was silent
        self._reading: object = None  # the read that waits for a message
        self._hooks: list[Hook] = []
        self._timeout: Timeout | None = None
        self._backoff: tuple[Timer, NextAttempt, Callable[[], object]] | None = None
        """While it waits for a retry: on which timer, which, and what to do if that is stopped."""
        self._watch: Timeout | None = None

    # --- Tries ---

    def start(self, call: AnyCall) -> None:
        """Go on from the first try."""
        outgoing = self.outgoing
        self._watch = outgoing.state.watch(outgoing.method, outgoing.config)
        self._follow(call)

    def _follow(self, call: AnyCall) -> None:
        with self._changed:
            self._try = call
            self._readers = 0
            self._judging = False
            over = self.final is not None
            self._changed.notify_all()
        if over:
            call.cancel()  # the caller's cancel came while it was made
        call.add_done_callback(styles.InternalCallback(self._ended, call))

    def _ended(self, call: AnyCall, _: object) -> None:  # a wrapped call gives what it wraps
        """Take note of a try's end. On gRPC's thread, or wherever it was cancelled."""
        try:
            failure = failure_of(call)
        except BaseException as error:  # noqa: BLE001 - of a foreign call; gRPC's thread must go on
            failure = error
        self._judge(call, failure)

    def _judge(self, call: AnyCall, failure: BaseException | None) -> None:
        with self._changed:
            if self.final is not None or self._try is not call or self._judging:
                return
            self._judging = failure is not None
        if failure is None:
            self._finish(call)
        else:
            self._hand_over(partial(self._decide, call, failure))

    def _decide(self, call: AnyCall, failure: BaseException) -> None:
        outgoing = self.outgoing
        if self._silenced is call:
            call = failure = self._silent(call)
        handed = self._has_handed()
        step: NextAttempt | Stop | None = None
        if has_status(failure):
            step = outgoing.after(failure, handed=handed)
        if isinstance(step, NextAttempt):
            end = partial(self._end, call, failure, handed=handed)
            with self._changed:
                self._try = None
                self._changed.notify_all()
            if self._wait(step, end):
                return
        self._end(call, failure, handed=handed)

    def _end(self, call: AnyCall, failure: BaseException, *, handed: bool) -> None:
        with self._changed:
            if self.final is not None:
                return
            self._answering = True
        try:
            call = self.outgoing.end(call, failure, handed=handed)
        except FailbackError as refusal:
            call = refusal  # a whole call, too
        self._finish(call)

    def _has_handed(self) -> bool:
        """Whether something of the try that has failed is in the caller's hands, or on its way.

        A reader may have a message that came before the failure, and not have told yet. None begins
        to read now, and those who do have all there is: they will be through in no time. One that
        is not has a foreign call; what it gets in the end is nobody's.
        """
        with self._changed:
            self._changed.wait_for(lambda: not self._readers, READERS_S)
            return self._handed

    def _wait(self, step: NextAttempt, end: Callable[[], object]) -> bool:
        """Have a try made when it is due, `end` if the timer is stopped; False if it is now."""
        state = self.outgoing.state
        timer = state.timer
        delay_s = (step.at_ns - state.now_ns()) / 1e9
        if delay_s <= 0:
            self._make(step)
            return True
        self._backoff = (timer, step, end)
        timeout = state.wake(partial(self._due, step), delay_s, f"retry of {self.outgoing.method}")
        if timeout is None:
            with self._changed:
                waited, self._backoff = self._backoff is not None, None
            return not waited  # who has looked meanwhile ends it
        with self._changed:
            self._timeout = timeout
            over = self.final is not None
        if over:
            timeout.cancel()
        return True

    def _due(self, step: NextAttempt, _: Timeout) -> None:
        with self._changed:
            backoff = self._backoff
            if backoff is None or backoff[1] is not step:  # made already, as the timer was late
                return
            self._backoff = None
        self._hand_over(partial(self._make, step))

    def look(self) -> None:
        """Do what the timer of a retry does not: if it is late, retry; if stopped, end the call."""
        backoff = self._backoff
        if backoff is None:
            return
        timer, step, job = backoff
        if not timer.stopped:
            if self.outgoing.state.now_ns() < step.at_ns:
                return
            job = partial(self._make, step)
        with self._changed:
            waited, self._backoff = self._backoff is backoff, None
        if waited:
            self._hand_over(job)

    def _wait_for(self, happened: Callable[[], bool], limit_s: float | None = None) -> bool:
        """Wait under the lock until something has happened; False if it has not in time."""
        until = None if limit_s is None else time.monotonic() + limit_s
        while True:
            left_s = (
                LOOK_INTERVAL_S if until is None else min(LOOK_INTERVAL_S, until - time.monotonic())
            )
            if self._changed.wait_for(happened, max(0, left_s)):
                return True
            if left_s < LOOK_INTERVAL_S:
                return False
            self.look()

    def _make(self, step: NextAttempt) -> None:
        if self.final is None:
            self._follow(self.outgoing.make(step))

    def _hand_over(self, job: Callable[[], object]) -> None:
        EXECUTOR.submit(("calls", self.outgoing.method), partial(self._run, job))

    def _run(self, job: Callable[[], object]) -> None:
        try:
            self._context.copy().run(job)
        except BaseException as error:  # noqa: BLE001 - it is the caller's
            self._finish(_broken(error))

    # --- The end ---

    def _finish(self, final: AnyCall) -> bool:
        """Let the call end with this; False if it has ended already."""
        with self._changed:
            if self.final is not None:
                return False
            self.final = final
            self._judging = False
            hooks, self._hooks = self._hooks, []
            self._backoff = None
            timeouts = (self._watch, self._timeout)
            self._changed.notify_all()
        for timeout in timeouts:
            if timeout is not None:
                timeout.cancel()
        self.outgoing.close()
        run_hooks(self.outgoing.method, hooks)
        return True

    def cancel(self, details: str = BY_USER) -> bool:
        """End the call; False if it has ended, or is about to."""
        with self._changed:
            if self.final is not None or self._answering:
                return False
            call = None if self._judging else self._try
        if call is not None:
            if call.cancel():
                return self._finish(call)
            if has_ended(call) and failure_of(call) is None:
                return False
        return self._finish(EndedCall(grpc.StatusCode.CANCELLED, details, cancelled=True))

    def drop(self) -> None:
        """End the call because nobody holds it any more."""
        if self.final is None:
            self.cancel(DROPPED)

    def seconds_left(self) -> float | None:
        return self.outgoing.seconds_left()

    def add_hook(self, hook: Callable[..., object], *args: object) -> bool:
        """Have a function called at the end, a user's on a worker; False if that is past."""
        with self._changed:
            if self.final is None:
                self._hooks.append((hook, args))
                return True
        return False

    def wait(self, timeout: float | None = None) -> AnyCall:
        """Wait for the end, and give the call whose outcome is the caller's.

        Raises:
            grpc.FutureTimeoutError: It took longer than so many seconds.
        """
        with self._changed:
            if self.final is None and is_single_threaded(self._try):
                raise grpc.experimental.UsageError(
                    "the end of a single-threaded stream is known when it was read to its end"
                )
            if not self._wait_for(lambda: self.final is not None, timeout):
                raise grpc.FutureTimeoutError
        return self.final

    # --- What comes before the end ---

    def initial_metadata(self) -> Metadata:
        """Wait for the server's first metadata; once handed out, the call is not made again."""
        while True:
            call = self._current()
            if call is self.final:
                return metadata_of(call.initial_metadata())
            metadata = metadata_of(call.initial_metadata())
            with self._changed:
                if not metadata:  # a failure without any looks the same, until its status comes
                    self._changed.wait_for(partial(self._is_closed, call), TRAILERS_S)
                if self._is_open(call):
                    self._handed = self._handed or metadata != ()
                    return metadata

    def next_message(self) -> Any:
        """Give the caller the next message, from whichever try it is to come."""
        while True:
            call = self._current(reads=True)
            if call is self.final:
                return next(call)
            try:
                message, is_callers = self._read(call)
            except (StopIteration, grpc.RpcError) as end:
                if not has_ended(call):  # a foreign call, which does not know its own end
                    self._judge(call, None if isinstance(end, StopIteration) else end)
                with self._changed:
                    self._wait_for(partial(self._is_settled, call))
                if self.final is call:
                    raise
            else:
                if is_callers:
                    return message

    def _current(self, *, reads: bool = False) -> AnyCall:
        """The try that is worth waiting for, to read its messages or not, or the final call."""
        with self._changed:
            self._wait_for(lambda: self.final is not None or self._is_open(self._try))
            if self.final is not None:
                return self.final
            self._readers += reads
            return self._try

    def _is_open(self, call: AnyCall) -> bool:
        """Whether it is the try whose messages the caller gets, as far as is known."""
        return call is not None and self._try is call and not self._judging

    def _is_closed(self, call: AnyCall) -> bool:
        return not self._is_open(call)

    def _is_settled(self, call: AnyCall) -> bool:
        return self.final is not None or self._try is not call

    def _read(self, call: AnyCall) -> tuple[Any, bool]:
        """Read the next message of a try, and say whether it is the caller's."""
        came = False
        try:
            message = self._listen(call)
            came = True
        finally:
            is_callers = self._has_read(call, came=came)
        return message, is_callers

    def _has_read(self, call: AnyCall, *, came: bool) -> bool:
        """Note a message that came; if it is the caller's, the call is not made again."""
        with self._changed:
            if self._try is not call:
                return False
            self._readers -= 1
            is_callers = self.final in (None, call)
            self._handed = self._handed or (came and is_callers)
            if self._judging:
                self._changed.notify_all()  # who judges waits for the readers
            return is_callers

    # --- Silence ---

    def _listen(self, call: AnyCall) -> Any:
        outgoing = self.outgoing
        if not outgoing.config.has_message_timeout:
            return next(call)
        reading = self._reading = object()
        limit_s = to_seconds(outgoing.config.message_timeout_ns)
        timeout = outgoing.state.wake(
            lambda _: self._hand_over(partial(self._silence, call, reading)),
            limit_s,
            f"message_timeout of {outgoing.method}",
        )
        try:
            return next(call)
        finally:
            self._reading = None
            if timeout is not None:
                timeout.cancel()

    def _silence(self, call: AnyCall, reading: object) -> None:
        """Cancel a try whose reader has waited for too long."""
        with self._changed:
            if self._reading is not reading or not self._is_open(call) or self.final is not None:
                return
            self._silenced = call
        if not call.cancel():
            self._silenced = None  # it has just ended by itself

    def _silent(self, call: AnyCall) -> EndedCall:
        outgoing = self.outgoing
        return EndedCall(
            grpc.StatusCode.DEADLINE_EXCEEDED,
            outgoing.state.silent(outgoing.method, outgoing.config),
            initial=metadata_of(call.initial_metadata()),
        )


def _broken(error: BaseException) -> EndedCall:
    """The call that ends with an error of no status, as grpc makes it of an interceptor's."""
    said = f"Exception raised while intercepting the RPC: {error}"
    return EndedCall(grpc.StatusCode.INTERNAL, said, error=error)
