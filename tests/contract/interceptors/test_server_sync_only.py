"""The server interceptor of `grpc`: what `grpc.aio` has no counterpart of."""

import contextlib
import threading
from contextvars import ContextVar

import grpc
import pytest
from scenarios.served import ROUNDED, answering, ask, begin, handler

from fixtures.call_counts import codes_of
from fixtures.grpc_servers import IMPATIENT
from fixtures.handlers import left, seconds, status, wrapping
from fixtures.small_servers import serving
from fixtures.waiting import WAIT_S, Gate, in_thread, wait_until
from rpcwheel.call import CallPolicy, DeadlinePolicy, current_criticality
from rpcwheel.events import CallSlow
from rpcwheel.interceptors import aio, server_interceptors
from rpcwheel.rpc import CRITICALITY_KEY

SET_BY_HANDLER = ContextVar("set_by_handler", default=None)
SLOW = CallPolicy(timeout=DeadlinePolicy(slow_call_threshold=2.0))


class Passing(grpc.ServerInterceptor):
    """An interceptor of another library that calls one of `grpc.aio`."""

    def __init__(self, other):
        self.intercept_service = other.intercept_service

    def intercept_service(self, continuation, details):
        """Replaced."""


def test_aio_interceptors_on_a_sync_server_fail_calls_with_a_clear_error(caplog):
    made = handler("unary_unary", answering("unary_unary", left))
    with serving(made, interceptors=[Passing(*aio.server_interceptors())]) as target:
        assert status(target, "unary_unary")[0] is grpc.StatusCode.UNKNOWN
    assert "are for grpc.aio.server(); for a grpc.server() use" in caplog.text
    assert "rpcwheel.Kit" in caplog.text


def test_outer_interceptors_see_context_variables_that_a_handler_sets():
    """Access logs depend on it."""
    seen = []

    def log(behavior):
        def wrapped(request, context):
            answer = behavior(request, context)
            seen.append(SET_BY_HANDLER.get())
            return answer

        return wrapped

    behavior = answering("unary_unary", lambda _context: SET_BY_HANDLER.set("by the handler"))
    interceptors = [wrapping("unary_unary", log), *server_interceptors()]
    with serving(handler("unary_unary", behavior), interceptors=interceptors) as target:
        ask(target, "unary_unary")
    assert seen == ["by the handler"]


def test_a_handler_that_pushes_responses_pushes_them_and_sees_what_is_current():
    def behavior(request, context, push):
        push(repr(left()).encode())
        push(str(current_criticality()).encode())
        threading.Thread(target=push, args=(None,)).start()

    behavior.experimental_non_blocking = True
    made = handler("stream_stream", behavior)
    with serving(made, interceptors=server_interceptors(), workers=1) as target:
        metadata = ((CRITICALITY_KEY, "sheddable"),)
        answers = ask(target, "stream_stream", metadata=metadata)
    assert 0 < seconds(answers) <= WAIT_S * ROUNDED
    assert answers[1:] == [b"sheddable"]


def test_slow_call_threshold_includes_the_time_until_the_first_response(timer, events):
    gate = Gate()

    def behavior(request, context):
        return iter([gate(request)])

    interceptors = server_interceptors(SLOW, timer=timer)
    with (
        serving(handler("unary_stream", behavior), interceptors=interceptors) as target,
        grpc.insecure_channel(target, options=IMPATIENT) as channel,
    ):
        call = begin(channel, "unary_stream")
        assert gate.entered.wait(WAIT_S)
        timer.advance(3)
        gate.opened.set()
        assert list(call) == [b"x"]
    assert wait_until(lambda: len(events.of(CallSlow)) == 1)


def pushing(pushes):
    """A behavior that pushes one response; the test pushes the others through `pushes`."""

    def behavior(request, context, push):
        push(b"first")
        pushes.append(push)

    behavior.experimental_non_blocking = True
    return behavior


@pytest.mark.parametrize("cancelled", [False, True])
def test_a_stream_of_pushed_responses_is_slow_until_its_end(cancelled, timer, events):
    pushes = []
    interceptors = server_interceptors(SLOW, timer=timer)
    with (
        serving(handler("unary_stream", pushing(pushes)), interceptors=interceptors) as target,
        grpc.insecure_channel(target, options=IMPATIENT) as channel,
    ):
        call = begin(channel, "unary_stream")
        assert next(call) == b"first"
        assert wait_until(lambda: pushes)
        timer.advance(1)
        assert timer.pending == 1
        if cancelled:
            call.cancel()
        else:
            pushing_the_end = in_thread(pushes[0], None)
            assert list(call) == []
            pushing_the_end.result(WAIT_S)
        assert wait_until(lambda: timer.pending == 0)
    # A worker may report a slow call of a client of an earlier test now, on a busy machine.
    assert [event for event in events.of(CallSlow) if event.side == "server"] == []


# --- Counts ---


def push_well(context, push):
    push(b"x")
    push(None)


def push_and_set_code(context, push):
    push(b"x")
    context.set_code(grpc.StatusCode.NOT_FOUND)
    push(None)


def abort(context, push):
    context.abort(grpc.StatusCode.NOT_FOUND, "no")


@pytest.mark.parametrize(
    ("act", "code"),
    [
        (push_well, "OK"),
        (push_and_set_code, "NOT_FOUND"),
        (abort, "NOT_FOUND"),
        (None, "CANCELLED"),
    ],
)
def test_a_call_with_pushed_responses_is_counted(call_counts, act, code):
    entered = threading.Event()

    def behavior(request, context, push):
        entered.set()
        if act is not None:
            act(context, push)

    behavior.experimental_non_blocking = True
    made = handler("unary_stream", behavior)
    with (
        serving(made, interceptors=server_interceptors()) as target,
        grpc.insecure_channel(target, options=IMPATIENT) as channel,
    ):
        call = begin(channel, "unary_stream")
        assert entered.wait(WAIT_S)
        if act is None:
            call.cancel()
        with contextlib.suppress(grpc.RpcError):
            list(call)
        assert call.code().name == code
        assert codes_of(call_counts.server) == {code: 1}
