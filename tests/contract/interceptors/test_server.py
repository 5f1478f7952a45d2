"""The server interceptor of grpc, on real servers."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from scenarios.served import KINDS, ROUNDED, STREAMS, answering, ask, begin, handler

from fixtures.grpc_servers import IMPATIENT
from fixtures.small_servers import IN_TIME, METHOD, Gate, serving
from fixtures.waiting import WAIT_S, wait_until
from rpcwheel.deadline import DeadlinePolicy, current_deadline
from rpcwheel.interceptors import CallPolicy, MethodPolicy, aio
from rpcwheel.interceptors._server import server_interceptors
from rpcwheel.observe import CallLate

LOOKED_AT = ContextVar("looked_at", default=None)


class Other(grpc.ServerInterceptor):
    """An interceptor of somebody else's, that calls `look` before each answer's making."""

    def __init__(self, kind, look):
        self.kind, self.look = kind, look

    def intercept_service(self, continuation, details):
        behavior = getattr(continuation(details), self.kind)

        def wrapped(request, context):
            self.look(context)
            return behavior(request, context)

        return handler(self.kind, wrapped)


class Once(grpc.ServerInterceptor):
    """Has another interceptor asked for the first call only."""

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
    """What a client sees of a call that fails."""
    with pytest.raises(grpc.RpcError) as caught:
        ask(target, kind)
    error = caught.value
    return error.code(), error.details(), [tuple(pair) for pair in error.trailing_metadata()]


def test_interceptors_of_the_other_world_fail_calls_readably_and_the_server_lives(caplog):
    behavior = answering("unary_unary", left)
    others = [Once(*aio.server_interceptors())]
    with serving(handler("unary_unary", behavior), interceptors=others) as target:
        assert status(target, "unary_unary")[0] is grpc.StatusCode.UNKNOWN
        assert ask(target, "unary_unary", timeout=None) == [b"None"]
    assert "are for grpc.aio.server(), and this is a grpc.server()" in caplog.text
    assert "rpcwheel.Kit" in caplog.text


@pytest.mark.parametrize("kind", KINDS)
def test_a_handler_sees_the_deadline_of_its_caller(kind):
    behavior = answering(kind, left)
    with serving(handler(kind, behavior), interceptors=server_interceptors()) as target:
        assert 0 < seconds(ask(target, kind, timeout=15)) <= 15 * ROUNDED


@pytest.mark.parametrize("kind", KINDS)
def test_a_deadline_does_not_leak_into_the_next_call_on_the_same_thread(kind):
    behavior = answering(kind, left)
    interceptors = server_interceptors()
    with serving(handler(kind, behavior), interceptors=interceptors, workers=1) as target:
        ask(target, kind, timeout=15)
        assert ask(target, kind, timeout=None) == [b"None"]


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_left_in_the_threads_of_the_pool(kind):
    behavior = answering(kind, left)
    with ThreadPoolExecutor(1) as pool:
        behavior.experimental_thread_pool = pool
        with serving(handler(kind, behavior), interceptors=server_interceptors()) as target:
            ask(target, kind, timeout=15)
        assert pool.submit(left).result() is None


@pytest.mark.parametrize(("own", "policy"), [(100, 10), (10, 100), (None, 10)])
def test_the_policy_of_the_server_shortens_the_deadline_that_handlers_see(own, policy):
    behavior = answering("unary_unary", left)
    interceptors = server_interceptors(CallPolicy(timeout=policy))
    with serving(handler("unary_unary", behavior), interceptors=interceptors) as target:
        assert 1 < seconds(ask(target, "unary_unary", timeout=own)) <= 10 * ROUNDED


def test_each_method_has_the_limits_of_its_own():
    behavior = answering("unary_unary", left)
    policy = CallPolicy(timeout=5.0, methods={METHOD: MethodPolicy(timeout=15.0)})
    interceptors = server_interceptors(policy)
    with serving(handler("unary_unary", behavior), interceptors=interceptors) as target:
        assert 5 < seconds(ask(target, "unary_unary")) <= 15 * ROUNDED


@pytest.mark.parametrize("kind", KINDS)
def test_a_call_whose_deadline_passed_before_its_turn_is_not_handed_to_its_handler(kind, events):
    served, held_up = [], []
    behavior = answering(kind, served.append)

    def hold_up(_context):
        held_up.append(timeout)
        time.sleep(timeout + 0.3)

    interceptors = [Other(kind, hold_up), *server_interceptors()]
    with serving(handler(kind, behavior), interceptors=interceptors) as target:
        for timeout in IN_TIME:
            with pytest.raises(grpc.RpcError) as caught:
                ask(target, kind, timeout=timeout)
            assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            if held_up:
                break
        assert wait_until(lambda: [event for event in events if isinstance(event, CallLate)])
    assert served == []
    late = next(event for event in events if isinstance(event, CallLate))
    assert late.method == METHOD
    assert 0 < late.late_s < WAIT_S


@pytest.mark.parametrize("kind", KINDS)
def test_a_call_that_waited_in_the_queue_too_long_is_not_handed_to_its_handler(kind):
    """Without request stream grpc itself lets go of it; with one it would be served."""
    gate, served = Gate(), []

    def behavior(request, context):
        if not served:
            gate(request)
        served.append(request)
        return b"" if kind not in STREAMS else iter([b""])

    made = handler(kind, behavior)
    with (
        serving(made, interceptors=server_interceptors(), workers=1) as target,
        grpc.insecure_channel(target, options=IMPATIENT) as channel,
    ):
        first = begin(channel, kind)
        assert gate.entered.wait(WAIT_S)
        with pytest.raises(grpc.RpcError):
            ask(target, kind, timeout=0.1)
        time.sleep(0.1)  # the server's own clock may be a little behind
        gate.opened.set()
        assert (list(first) if kind in STREAMS else [first.result()]) == [b""]
        ask(target, kind)  # the one in between has had its turn
    assert len(served) == 2


def test_a_method_that_does_not_exist_stays_unknown():
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


@pytest.mark.parametrize("look", [aborting, failing, marking])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("slow_after", [None, 30.0])
def test_a_status_reaches_the_client_unchanged(kind, look, slow_after):
    made = handler(kind, answering(kind, look))
    ours = server_interceptors(CallPolicy(timeout=DeadlinePolicy(slow_after=slow_after)))
    with serving(made) as plain, serving(made, interceptors=ours) as target:
        assert status(target, kind) == status(plain, kind)


def test_an_abort_raises_in_the_handler_what_it_always_raises():
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


@pytest.mark.parametrize("kind", KINDS)
def test_interceptors_before_and_after_it_do_their_work_on_the_same_context(kind):
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


def test_what_a_handler_sets_in_its_context_is_seen_by_the_interceptors_around_it():
    """Access logs rest on it."""
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


def test_a_handler_runs_in_the_pool_of_its_own():
    with ThreadPoolExecutor(1, thread_name_prefix="its-own") as pool:
        behavior = answering("unary_unary", lambda _context: threading.current_thread().name)
        behavior.experimental_thread_pool = pool
        made = handler("unary_unary", behavior)
        with serving(made, interceptors=server_interceptors()) as target:
            assert b"its-own" in ask(target, "unary_unary")[0]


@pytest.mark.parametrize("kind", STREAMS)
def test_a_handler_that_pushes_its_answers_goes_on_pushing_them(kind):
    def behavior(request, context, push):
        push(repr(left()).encode())
        threading.Thread(target=push, args=(None,)).start()

    behavior.experimental_non_blocking = True
    made = handler(kind, behavior)
    with serving(made, interceptors=server_interceptors(), workers=1) as target:
        assert 0 < seconds(ask(target, kind, timeout=15)) <= 15 * ROUNDED


def test_watchers_of_grpcs_health_service_do_not_hold_a_thread_each():
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
            assert stub.Check(request, timeout=5).status == health_pb2.HealthCheckResponse.SERVING
            servicer.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
            for watcher in watchers:
                assert next(watcher).status == health_pb2.HealthCheckResponse.NOT_SERVING
                watcher.cancel()
        server.stop(None).wait()
