"""Attempts of `grpc` that are sent only if the admission of their method allows it.

Made only for methods with a throttle, a circuit breaker, or a limit of the client: around the
multicallable or continuation of the attempts, and outside of the counter of attempts. An attempt
that is not sent ends at once, with a status of the client. One that waits is sent later: a blocking
attempt waits on its caller's thread, any other is a `DeferredCall`.
"""

from __future__ import annotations

import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import grpc

from rpcwheel._concurrency.executor import EXECUTOR
from rpcwheel._grpc import multicallable
from rpcwheel._grpc.calls import (
    Details,
    InternalCallback,
    code_for,
    details_of,
    is_blocking_unary,
    is_channel_closed_error,
    metadata_tuple,
    set_not_sent,
)
from rpcwheel._grpc.counted import begin_observed
from rpcwheel._grpc.finished import FinishedError
from rpcwheel.admission.method import Admitted, NotSent, Reason, Waiting
from rpcwheel.call.client_state import TIMER_CHECK_INTERVAL_S
from rpcwheel.call.metadata import not_sent_metadata
from rpcwheel.call.sync_call import channel_closed
from rpcwheel.call.sync_retrying_call import DeferredCall
from rpcwheel.rpc import classes_by_kind

if TYPE_CHECKING:
    from collections.abc import Callable

    from rpcwheel._grpc.calls import AnyCall
    from rpcwheel.admission.method import MethodAdmission
    from rpcwheel.call.client_state import ClientState
    from rpcwheel.rpc import Kind


def admitted_multicallable(state: ClientState, kind: Kind, method: str, below: Any) -> Any:
    """Return a multicallable that sends attempts only if the policies of a client allow it.

    If the method has no such policies, that is `below` itself.
    """
    admission = state.admission_of(method, kind)
    return below if admission is None else _MULTICALLABLES[kind](below, method, admission, state)


def admitted_continuation(
    state: ClientState, kind: Kind, method: str, continuation: Callable[[Any, Any], AnyCall]
) -> Callable[[Any, Any], AnyCall]:
    """Return a continuation that sends attempts only if the policies of a client allow it.

    If the method has no such policies, that is `continuation` itself.
    """
    admission = state.admission_of(method, kind)
    if admission is None:
        return continuation
    waits_here = is_blocking_unary(continuation) is True

    def start(details: Any, request: Any) -> AnyCall:
        return _begin(
            kind, continuation, details_of(details), request, admission, state, waits_here
        )

    start.__qualname__ = getattr(continuation, "__qualname__", "")  # for `is_blocking_unary`
    return start


def _begin(
    kind: Kind,
    start: Callable[[Details, Any], AnyCall],
    details: Details,
    request: Any,
    admission: MethodAdmission,
    state: ClientState,
    waits_here: bool,
) -> AnyCall:
    """Begin an attempt, and report its end.

    If it may be sent only later, this thread waits (`waits_here`), or the call begins later.
    """
    entered = admission.enter(details.timeout)
    if isinstance(entered, Waiting):
        state.channel_calls.add_waiting(entered)
        if not waits_here:
            waiting = entered
            try:
                call = _AdmittedCall(kind, start, details, request, admission, state, waiting)
            except BaseException:  # such as metadata of a wrong form
                waiting.cancel()
                raise
            return call.make_retrying_call()
        began_s = time.monotonic()
        entered = wait_on_thread(entered)
        if details.timeout is not None:
            left_s = max(0.0, details.timeout - (time.monotonic() - began_s))
            details = details._replace(timeout=left_s)
    if isinstance(entered, NotSent):
        return _not_sent(entered)
    return begin_observed(admission, entered, start, details, request)


def wait_on_thread(waiting: Waiting) -> Admitted | NotSent:
    """Wait on this thread until an attempt may be sent, or must not be sent."""
    # Not an event, which a finalizer on this thread could not set while this waits for it.
    gate = threading.Lock()
    gate.acquire()
    try:
        waiting.then(gate.release)
        while not gate.acquire(timeout=TIMER_CHECK_INTERVAL_S):
            waiting.check_timer()
        return waiting.take()
    except BaseException:  # such as KeyboardInterrupt
        waiting.cancel()
        raise


def _not_sent(result: NotSent) -> FinishedError:
    """Make the end of an attempt that is not sent."""
    if result.reason is Reason.CLOSED:
        return channel_closed()
    error = FinishedError(
        grpc.StatusCode[result.reason.code],
        result.reason.details,
        trailing=not_sent_metadata(result.pushback_ns),
    )
    set_not_sent(error)
    return error


class _AdmittedCall(DeferredCall):
    """An attempt of `.future()` or a response stream that is sent later."""

    def __init__(
        self,
        kind: Kind,
        start: Callable[[Details, Any], AnyCall],
        details: Details,
        request: Any,
        admission: MethodAdmission,
        state: ClientState,
        waiting: Waiting,
    ) -> None:
        metadata = None if details.metadata is None else metadata_tuple(details.metadata)
        details = details._replace(metadata=metadata)
        super().__init__(state.without_policies, kind, details, request)
        self._start = start
        self._details = details
        self._admission = admission
        self._waiting = waiting
        self.add_callback(InternalCallback(waiting.cancel))
        waiting.then(partial(EXECUTOR.submit, ("calls", details.method), self._wait_over))

    def check_timer(self) -> None:
        super().check_timer()
        self._waiting.check_timer()

    def _wait_over(self) -> None:
        """Begin the attempt, or end the call. On a worker."""
        if self.final is None:
            self._run(self._begin_or_end)

    def _begin_or_end(self) -> None:
        entered = self._waiting.take()
        if isinstance(entered, Admitted):
            details = self._details._replace(timeout=self.seconds_left())
            start = self._start
            try:
                attempt = begin_observed(self._admission, entered, start, details, self.request)
            except ValueError as error:
                if not is_channel_closed_error(error):
                    raise
                self._finish(channel_closed())
            else:
                self.begin(attempt)
        else:
            self._finish(_not_sent(entered))


class _AdmittedMulticallable:
    """The part that is common to the four kinds of call."""

    kind: Kind

    def __init__(
        self, below: Any, method: str, admission: MethodAdmission, state: ClientState
    ) -> None:
        self._below = below
        self._method = method
        self._admission = admission
        self._state = state

    def _wait(
        self, name: str, request: Any, timeout: float | None, metadata: Any, *others: Any
    ) -> Any:
        """Make an attempt on the caller's thread and return its response."""
        admission = self._admission
        entered = admission.enter(timeout)
        has_waited = False
        if entered.__class__ is not Admitted:
            began_s = time.monotonic()
            if isinstance(entered, Waiting):
                has_waited = True
                self._state.channel_calls.add_waiting(entered)
                entered = wait_on_thread(entered)
            if isinstance(entered, NotSent):
                raise _not_sent(entered)
            if timeout is not None:
                timeout = max(0.0, timeout - (time.monotonic() - began_s))
        try:
            response = getattr(self._below, name)(request, timeout, metadata, *others)
        except BaseException as error:
            admission.end(entered, code_for(admission, error))
            if has_waited and isinstance(error, ValueError) and is_channel_closed_error(error):
                raise channel_closed() from None
            raise
        admission.end(entered, "OK")
        return response

    def _begin(self, name: str, request: Any, *options: Any) -> Any:
        """Begin an attempt of `.future()`, or of a response stream."""
        start = getattr(self._below, name)
        return _begin(
            self.kind,
            lambda details, request: start(request, *details[1:]),
            Details(self._method, *options),
            request,
            self._admission,
            self._state,
            waits_here=False,
        )


_MULTICALLABLES: Final = classes_by_kind(_AdmittedMulticallable, multicallable.MULTICALLABLES)
