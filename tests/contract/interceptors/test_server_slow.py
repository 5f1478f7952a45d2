"""Calls that run for long are told by the server, and nothing of them waits after their end."""

import threading

import grpc
import pytest
from scenarios.served import KINDS, ONE_ANSWER, STREAMS, ask, begin, handler

from fixtures.grpc_servers import IMPATIENT
from fixtures.small_servers import METHOD, Gate, serving
from fixtures.waiting import WAIT_S, wait_until
from rpcwheel.deadline import DeadlinePolicy
from rpcwheel.interceptors import CallPolicy, MethodPolicy
from rpcwheel.interceptors._server import server_interceptors
from rpcwheel.observe import CallSlow
from rpcwheel.timer import WheelTimer

SLOW = CallPolicy(timeout=DeadlinePolicy(slow_after=2.0))


def waiting(kind, gate, act=lambda context: None):
    """A behavior that waits at the gate before it answers, in a stream after the first answer."""

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


@pytest.mark.parametrize("kind", KINDS)
def test_a_call_that_runs_for_long_is_told_while_it_runs(kind, timer, events):
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


@pytest.mark.parametrize("ending", [ends_well, aborts, fails])
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_waits_for_a_call_that_has_ended(kind, ending, timer, events):
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


@pytest.mark.parametrize("kind", STREAMS)
def test_nothing_waits_for_a_stream_that_its_client_left(kind, timer):
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


@pytest.mark.parametrize("kind", STREAMS)
def test_nothing_waits_for_a_stream_that_did_not_come_about(kind, timer):
    def behavior(request, context):
        raise KeyError("a bug")

    interceptors = server_interceptors(SLOW, timer=timer)
    with serving(handler(kind, behavior), interceptors=interceptors) as target:
        with pytest.raises(grpc.RpcError) as caught:
            ask(target, kind)
        assert caught.value.details() == "Exception calling application: 'a bug'"
        assert timer.stats().started == 1
        assert wait_until(lambda: timer.pending == 0)


def test_the_time_to_find_the_answers_of_a_stream_counts(timer, events):
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
    """A behavior that pushes one answer, and leaves the rest to `pushes`."""

    def behavior(request, context, push):
        push(b"first")
        pushes.append(push)

    behavior.experimental_non_blocking = True
    return behavior


@pytest.mark.parametrize("cancelled", [False, True])
def test_a_stream_of_pushed_answers_counts_until_it_ends(cancelled, timer, events):
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


def test_only_the_methods_that_have_a_limit_are_watched(timer):
    policy = CallPolicy(methods={"/test.Other/*": MethodPolicy(timeout=SLOW.timeout)})
    made = handler("unary_unary", lambda request, context: request)
    with serving(made, interceptors=server_interceptors(policy, timer=timer)) as target:
        ask(target, "unary_unary")
    assert timer.stats().started == 0


@pytest.fixture(params=["stopped", "full"])
def useless_timer(request):
    with WheelTimer(max_pending=1) as timer:
        timer.new_timeout(lambda _: None, 600)
        if request.param == "stopped":
            timer.stop()
        yield timer


@pytest.mark.parametrize("kind", KINDS)
def test_a_timer_that_takes_no_more_does_not_harm_a_call(kind, useless_timer):
    gate = Gate()
    gate.opened.set()
    interceptors = server_interceptors(SLOW, timer=useless_timer)
    with serving(handler(kind, waiting(kind, gate)), interceptors=interceptors) as target:
        assert ask(target, kind)[-1] == b"done"
