"""The server interceptor of `grpc`, on real servers: deadlines, statuses, slow calls."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from scenarios.served import KINDS, ONE_ANSWER, ROUNDED, STREAMS, answering, ask, begin, handler

from fixtures.grpc_servers import IMPATIENT
from fixtures.small_servers import IN_TIME, METHOD, Gate, serving
from fixtures.waiting import WAIT_S, wait_until
from rpcwheel.call import CallPolicy, DeadlinePolicy, MethodPolicy, current_deadline
from rpcwheel.events import CallSlow, DeadlineExceededBeforeStart
from rpcwheel.interceptors import aio, server_interceptors
from rpcwheel.timer import WheelTimer

TWO_KINDS = ["unary_unary", "stream_stream"]
"""For rules that differ at most by what is answered."""

LOOKED_AT = ContextVar("looked_at", default=None)


class Other(grpc.ServerInterceptor):
    """Another interceptor, which calls `look` before each response."""

    def __init__(self, kind, look):
        self.kind, self.look = kind, look

    def intercept_service(self, continuation, details):
        behavior = getattr(continuation(details), self.kind)

        def wrapped(request, context):
            self.look(context)
            return behavior(request, context)

        return handler(self.kind, wrapped)


class Once(grpc.ServerInterceptor):
    """Calls the inner interceptor for the first call only."""

    def __init__(self, other):
        self.asked = iter([other.intercept_service])

    def intercept_service(self, continuation, details):
        ask_other = next(self.asked, None)
        return continuation(details) if ask_other is None else ask_other(continuation, details)


def left(_context=None):
    deadline = current_deadline()
    return None if deadline is None else deadline.remaining()


def seconds(answers):
    return float(answers[0])


def status(target, kind):
    """Return what a client sees of a call that fails."""
    with pytest.raises(grpc.RpcError) as caught:
        ask(target, kind)
    error = caught.value
    return error.code(), error.details(), [tuple(pair) for pair in error.trailing_metadata()]


def test_aio_interceptors_on_a_sync_server_fail_calls_with_a_clear_error(caplog):
    behavior = answering("unary_unary", left)
    others = [Once(*aio.server_interceptors())]
    with serving(handler("unary_unary", behavior), interceptors=others) as target:
        assert status(target, "unary_unary")[0] is grpc.StatusCode.UNKNOWN
        assert ask(target, "unary_unary", timeout=None) == [b"None"]
    assert "are for grpc.aio.server(); for a grpc.server() use" in caplog.text
    assert "rpcwheel.Kit" in caplog.text


@pytest.mark.parametrize("kind", KINDS)
def test_a_handler_sees_the_deadline_of_its_caller(kind):
    behavior = answering(kind, left)
    with serving(handler(kind, behavior), interceptors=server_interceptors()) as target:
        assert 0 < seconds(ask(target, kind, timeout=WAIT_S)) <= WAIT_S * ROUNDED


@pytest.mark.parametrize("kind", TWO_KINDS)
def test_the_deadline_of_a_call_is_not_seen_by_the_next_call_on_its_thread(kind):
    behavior = answering(kind, left)
    interceptors = server_interceptors()
    with serving(handler(kind, behavior), interceptors=interceptors, workers=1) as target:
        ask(target, kind)
        assert ask(target, kind, timeout=None) == [b"None"]


def test_the_policy_of_the_server_shortens_the_deadline_that_handlers_see():
    behavior = answering("unary_unary", left)
    for own, policy in ((100, WAIT_S), (WAIT_S, 100), (None, WAIT_S)):
        interceptors = server_interceptors(CallPolicy(timeout=policy))
        with serving(handler("unary_unary", behavior), interceptors=interceptors) as target:
            assert 1 < seconds(ask(target, "unary_unary", timeout=own)) <= WAIT_S * ROUNDED


def test_each_method_has_its_own_limits():
    behavior = answering("unary_unary", left)
    methods = {METHOD: MethodPolicy(timeout=WAIT_S)}
    interceptors = server_interceptors(CallPolicy(timeout=WAIT_S / 3, methods=methods))
    with serving(handler("unary_unary", behavior), interceptors=interceptors) as target:
        assert WAIT_S / 3 < seconds(ask(target, "unary_unary", timeout=None)) <= WAIT_S


@pytest.mark.parametrize("kind", ["stream_unary", "unary_stream"])
def test_a_call_whose_deadline_has_passed_is_refused(kind, events):
    served, held_up = [], []
    behavior = answering(kind, served.append)

    def hold_up(context):
        held_up.append(context)
        while context.time_remaining() > 0:
            time.sleep(0.01)

    interceptors = [Other(kind, hold_up), *server_interceptors()]
    with serving(handler(kind, behavior), interceptors=interceptors) as target:
        for timeout in IN_TIME:
            with pytest.raises(grpc.RpcError) as caught:
                ask(target, kind, timeout=timeout)
            assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            if held_up:
                break
        wait_until(
            lambda: [event for event in events if isinstance(event, DeadlineExceededBeforeStart)]
        )
    assert served == []
    late = next(event for event in events if isinstance(event, DeadlineExceededBeforeStart))
    assert late.method == METHOD
    assert late.late_s >= 0


def test_an_unknown_method_is_unimplemented():
    made = handler("unary_unary", None)
    with (
        serving(made, interceptors=server_interceptors()) as target,
        grpc.insecure_channel(target, options=IMPATIENT) as channel,
        pytest.raises(grpc.RpcError) as caught,
    ):
        channel.unary_unary("/test.Small/Other")(b"x", timeout=WAIT_S)
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


def aborting(context):
    context.set_trailing_metadata((("because", "of it"),))
    context.abort(grpc.StatusCode.NOT_FOUND, "not here")


def failing(context):
    context.set_code(grpc.StatusCode.DATA_LOSS)
    context.set_details("set")
    raise KeyError("a bug")


def marking(context):
    context.set_code(grpc.StatusCode.ABORTED)
    context.set_details("set, not raised")


@pytest.mark.parametrize(
    ("look", "kind", "slow_call_threshold"),
    [
        (aborting, "unary_unary", None),
        (aborting, "unary_stream", 30.0),
        (failing, "stream_unary", 30.0),
        (failing, "stream_stream", None),
        (marking, "unary_unary", 30.0),
        (marking, "unary_stream", None),
    ],
)
def test_a_status_reaches_the_client_unchanged(kind, look, slow_call_threshold):
    made = handler(kind, answering(kind, look))
    ours = server_interceptors(
        CallPolicy(timeout=DeadlinePolicy(slow_call_threshold=slow_call_threshold))
    )
    with serving(made) as plain, serving(made, interceptors=ours) as target:
        assert status(target, kind) == status(plain, kind)


def test_abort_raises_grpcs_exception_in_the_handler():
    seen = []

    def behavior(request, context):
        try:
            context.abort(grpc.StatusCode.NOT_FOUND, "not here")
        except Exception as error:  # grpc's, and a bare one
            seen.append(type(error))
            raise

    made = handler("unary_unary", behavior)
    with serving(made, interceptors=server_interceptors()) as target:
        assert status(target, "unary_unary")[0] is grpc.StatusCode.NOT_FOUND
    assert seen == [Exception]


@pytest.mark.parametrize("kind", TWO_KINDS)
def test_other_interceptors_get_the_same_context(kind):
    seen = []

    def first(context):
        LOOKED_AT.set("first")
        seen.append(("first", left(), context))

    def second(context):
        seen.append(("second", left(), context))

    def last(context):
        seen.append((LOOKED_AT.get(), left(), context))

    interceptors = [Other(kind, first), *server_interceptors(), Other(kind, second)]
    with serving(handler(kind, answering(kind, last)), interceptors=interceptors) as target:
        ask(target, kind)
    assert [name for name, _, _ in seen] == ["first", "second", "first"]
    assert seen[0][1] is None
    assert 0 < seen[2][1] <= seen[1][1] <= WAIT_S * ROUNDED
    assert len({context for _, _, context in seen}) == 1


def test_outer_interceptors_see_context_variables_that_a_handler_sets():
    """Access logs depend on it."""
    seen = []

    class Log(grpc.ServerInterceptor):
        def intercept_service(self, continuation, details):
            behavior = continuation(details).unary_unary

            def wrapped(request, context):
                answer = behavior(request, context)
                seen.append(LOOKED_AT.get())
                return answer

            return handler("unary_unary", wrapped)

    behavior = answering("unary_unary", lambda _context: LOOKED_AT.set("by the handler"))
    interceptors = [Log(), *server_interceptors()]
    with serving(handler("unary_unary", behavior), interceptors=interceptors) as target:
        ask(target, "unary_unary")
    assert seen == ["by the handler"]


def test_a_handler_with_its_own_thread_pool_runs_there():
    with ThreadPoolExecutor(1, thread_name_prefix="its-own") as pool:
        behavior = answering("unary_unary", lambda _context: threading.current_thread().name)
        behavior.experimental_thread_pool = pool
        made = handler("unary_unary", behavior)
        with serving(made, interceptors=server_interceptors()) as target:
            assert b"its-own" in ask(target, "unary_unary")[0]


def test_a_handler_that_pushes_responses_still_pushes_them():
    def behavior(request, context, push):
        push(repr(left()).encode())
        threading.Thread(target=push, args=(None,)).start()

    behavior.experimental_non_blocking = True
    made = handler("stream_stream", behavior)
    with serving(made, interceptors=server_interceptors(), workers=1) as target:
        assert 0 < seconds(ask(target, "stream_stream")) <= WAIT_S * ROUNDED


def test_watchers_of_grpcs_health_service_do_not_block_a_thread_each():
    with ThreadPoolExecutor(2) as pool:
        server = grpc.server(pool, interceptors=server_interceptors())
        servicer = health.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        with grpc.insecure_channel(f"127.0.0.1:{port}", options=IMPATIENT) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            request = health_pb2.HealthCheckRequest()
            watchers = [stub.Watch(request) for _ in range(2)]
            for watcher in watchers:
                assert next(watcher).status == health_pb2.HealthCheckResponse.SERVING
            assert (
                stub.Check(request, timeout=WAIT_S).status == health_pb2.HealthCheckResponse.SERVING
            )
            servicer.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
            for watcher in watchers:
                assert next(watcher).status == health_pb2.HealthCheckResponse.NOT_SERVING
                watcher.cancel()
        server.stop(None).wait()


SLOW = CallPolicy(timeout=DeadlinePolicy(slow_call_threshold=2.0))


def waiting(kind, gate, act=lambda context: None):
    """A behavior that waits at the gate before its response; a stream, after its first response."""

    def unary(request, context):
        gate(request)
        act(context)
        return b"done"

    def stream(request, context):
        yield b"first"
        gate(request)
        act(context)
        yield b"done"

    return unary if kind in ONE_ANSWER else stream


def slow_calls(events):
    return [event for event in events if isinstance(event, CallSlow)]


@pytest.mark.parametrize("kind", TWO_KINDS)
def test_a_slow_call_is_reported_while_it_runs(kind, timer, events):
    gate = Gate()
    interceptors = server_interceptors(SLOW, timer=timer)
    with (
        serving(handler(kind, waiting(kind, gate)), interceptors=interceptors) as target,
        grpc.insecure_channel(target, options=IMPATIENT) as channel,
    ):
        call = begin(channel, kind)
        assert gate.entered.wait(WAIT_S)
        timer.advance(1.9)
        assert slow_calls(events) == []
        timer.advance(0.2)
        assert wait_until(lambda: slow_calls(events) == [CallSlow(METHOD, "server", 2.0)])
        gate.opened.set()
        assert (list(call) if kind in STREAMS else [call.result()])[-1] == b"done"


def ends_well(context):
    pass


def aborts(context):
    context.abort(grpc.StatusCode.NOT_FOUND, "not here")


def fails(context):
    raise KeyError("a bug")


@pytest.mark.parametrize(
    ("kind", "ending"),
    [
        ("unary_unary", ends_well),
        ("stream_stream", ends_well),
        ("stream_unary", aborts),
        ("unary_stream", fails),
    ],
)
def test_no_timeout_remains_after_the_end_of_a_call(kind, ending, timer, events):
    gate = Gate()
    interceptors = server_interceptors(SLOW, timer=timer)
    with (
        serving(handler(kind, waiting(kind, gate, ending)), interceptors=interceptors) as target,
        grpc.insecure_channel(target, options=IMPATIENT) as channel,
    ):
        call = begin(channel, kind)
        assert gate.entered.wait(WAIT_S)
        assert timer.pending == 1
        gate.opened.set()
        try:
            list(call) if kind in STREAMS else call.result()
        except grpc.RpcError:
            assert ending is not ends_well
        assert wait_until(lambda: timer.pending == 0)
    timer.advance(5)
    assert slow_calls(events) == []


def test_no_timeout_remains_after_the_client_has_canceled_a_stream(timer):
    kind = "unary_stream"

    def behavior(request, context):
        while True:
            yield b"more"

    interceptors = server_interceptors(SLOW, timer=timer)
    with (
        serving(handler(kind, behavior), interceptors=interceptors) as target,
        grpc.insecure_channel(target, options=IMPATIENT) as channel,
    ):
        call = begin(channel, kind)
        assert next(call) == b"more"
        assert timer.pending == 1
        call.cancel()
        assert wait_until(lambda: timer.pending == 0)


def test_no_timeout_remains_after_a_stream_handler_has_raised(timer):
    kind = "stream_stream"

    def behavior(request, context):
        raise KeyError("a bug")

    interceptors = server_interceptors(SLOW, timer=timer)
    with serving(handler(kind, behavior), interceptors=interceptors) as target:
        with pytest.raises(grpc.RpcError) as caught:
            ask(target, kind)
        assert caught.value.details() == "Exception calling application: 'a bug'"
        assert timer.stats().started == 1
        assert wait_until(lambda: timer.pending == 0)


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
    assert wait_until(lambda: len(slow_calls(events)) == 1)


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
            thread = threading.Thread(target=pushes[0], args=(None,))
            thread.start()
            assert list(call) == []
            thread.join()
        assert wait_until(lambda: timer.pending == 0)
    assert slow_calls(events) == []


def test_only_methods_with_slow_call_threshold_set_a_timeout(timer):
    policy = CallPolicy(methods={"/test.Other/*": MethodPolicy(timeout=SLOW.timeout)})
    made = handler("unary_unary", lambda request, context: request)
    with serving(made, interceptors=server_interceptors(policy, timer=timer)) as target:
        ask(target, "unary_unary")
    assert timer.stats().started == 0


@pytest.fixture
def useless_timer(request):
    with WheelTimer(max_pending=1) as timer:
        timer.new_timeout(lambda _: None, 600)
        if request.param == "stopped":
            timer.stop()
        yield timer


@pytest.mark.parametrize(
    ("kind", "useless_timer"),
    [("unary_unary", "stopped"), ("unary_stream", "full")],
    indirect=["useless_timer"],
)
def test_a_timer_that_takes_no_timeout_does_not_affect_calls(kind, useless_timer):
    gate = Gate()
    gate.opened.set()
    interceptors = server_interceptors(SLOW, timer=useless_timer)
    with serving(handler(kind, waiting(kind, gate)), interceptors=interceptors) as target:
        assert ask(target, kind)[-1] == b"done"
