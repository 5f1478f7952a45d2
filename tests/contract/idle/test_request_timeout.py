"""`request_timeout` of IdlePolicy: calls whose single request does not arrive."""

import asyncio
import threading

import grpc
import grpc._server
import pytest
from grpc._cython import cygrpc

import rpcwheel.idle.aio
from fixtures.idle_server import echo
from fixtures.waiting import WAIT_S, wait_until
from rpcwheel.events import IdleDetectionLimited

ECHO, SLOW, UP = (f"/test.Idle/{name}" for name in ("Echo", "Slow", "Up"))
LATE = "the request did not arrive within 30 s"
NO_EFFECT = "request_timeout has no effect with this version of grpcio"


@pytest.fixture
def server(world, make_server):
    """A server with one thread."""
    return make_server(world, workers=1)


@pytest.fixture
def headers_only(server):
    """Begin a call without its request; returns the call, and the event that sends the request."""
    events = []

    def begin(method, channel=None):
        go_on = threading.Event()
        events.append(go_on)
        requests = (go_on.wait(WAIT_S) and b"late" for _ in range(1))
        call = (channel or server.channel()).stream_unary(method).future(requests)
        assert wait_until(lambda: server.received_calls() == 1)
        return call, go_on

    yield begin
    for event in events:
        event.set()


def limits_reported(events):
    """The reasons of the `IdleDetectionLimited` events, without explanations."""
    return [event.reason.partition(":")[0] for event in events.of(IdleDetectionLimited)]


@pytest.mark.parametrize("method", [ECHO, SLOW])
def test_a_call_whose_request_does_not_arrive_ends_and_frees_its_thread(
    server, headers_only, method
):
    server.detect(None, request_timeout=30)
    channel = server.channel()
    late, _ = headers_only(method, channel)
    other = channel.unary_unary(method).future(b"x", timeout=WAIT_S)
    server.advance_until(late.done)
    assert (late.code(), late.details()) == (grpc.StatusCode.DEADLINE_EXCEEDED, LATE)
    assert other.result() == b"x"  # on the same connection, in the same thread
    assert wait_until(lambda: server.received_calls() == 0)


def test_a_handler_may_take_longer_than_a_request_may_take_to_arrive(server):
    server.detect(None, request_timeout=30)
    server.gate = threading.Event()
    calls = [server.channel().unary_unary(SLOW).future(b"x") for _ in range(2)]
    assert wait_until(lambda: server.received_calls() == 2 and server.begun)
    if server.is_aio:
        assert wait_until(lambda: server.receiving_calls() == 0)
    for _ in range(10):  # one waits for the thread
        server.advance(30)
    server.gate.set()
    assert [call.result(WAIT_S) for call in calls] == [b"x", b"x"]


@pytest.mark.parametrize("method", [UP, "/test.Idle/ByHand"])
def test_a_request_stream_may_be_silent_for_longer_than_the_request_timeout(
    server, headers_only, method
):
    server.detect(None, request_timeout=30)
    call, go_on = headers_only(method)
    assert wait_until(lambda: server.tracked.open_calls == 1)
    for _ in range(10):
        server.advance(30)
    go_on.set()
    assert call.result(WAIT_S) == b"read"
    assert server.read == [b"late"]


def test_the_request_timeout_can_be_changed_and_removed(server, headers_only):
    detector = server.detect(None, request_timeout=None)
    assert server.timer.pending == 0
    detector.change(request_timeout=30)
    assert server.timer.pending == 1
    late, _ = headers_only(ECHO)
    server.advance_until(late.done)
    assert late.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    detector.change(request_timeout=None)
    assert server.timer.pending == 0
    assert echo(server.channel()) == b"x"


def test_a_request_timeout_that_has_no_effect_with_this_grpcio_is_reported_once(
    make_server, events, monkeypatch
):
    monkeypatch.delattr(grpc._server, "_RECEIVE_MESSAGE_TOKEN")  # no call would end then
    server = make_server()
    server.detect(None, request_timeout=30)
    server.advance_until(lambda: events.of(IdleDetectionLimited))
    server.advance(30)
    assert limits_reported(events) == [NO_EFFECT]


@pytest.mark.parametrize("missing", ["RPCState", "_ServicerContext"])
def test_an_aio_request_timeout_that_has_no_effect_with_this_grpcio_is_reported_once(
    aio_world, make_server, events, monkeypatch, missing
):
    monkeypatch.delattr(cygrpc, missing)
    server, go_on = make_server(aio_world), threading.Event()
    server.detect(None, request_timeout=30)
    requests = (go_on.wait(WAIT_S) and b"late" for _ in range(1))
    call = server.channel().stream_unary(ECHO).future(requests)
    assert wait_until(lambda: server.waiting_calls() == 1)
    server.advance_until(lambda: events.of(IdleDetectionLimited))
    server.advance(30)
    assert limits_reported(events) == [NO_EFFECT]
    go_on.set()
    assert call.result(WAIT_S) == b"late"


def test_an_aio_request_that_arrives_before_its_call_is_ended_is_served(aio_world, make_server):
    server = make_server(aio_world)
    server.gate = threading.Event()
    server.detect(None, request_timeout=30)
    tasks, arrived, go_on = [], threading.Event(), threading.Event()

    def delaying(loop, coroutine, **options):
        """Start the tasks of `rpcwheel.idle.aio` only when the request has arrived."""
        code = getattr(coroutine, "cr_code", None)
        if code is None or code.co_filename != rpcwheel.idle.aio.__file__:
            return asyncio.Task(coroutine, loop=loop, **options)

        async def delayed():
            await aio_world.wait_for(arrived)
            return await coroutine

        tasks.append(asyncio.Task(delayed(), loop=loop, **options))
        return tasks[-1]

    requests = (go_on.wait(WAIT_S) and b"x" for _ in range(1))
    call = server.channel().stream_unary(ECHO).future(requests, timeout=WAIT_S)
    assert wait_until(lambda: server.waiting_calls() == 1)
    aio_world.loop.set_task_factory(delaying)
    server.advance_until(lambda: tasks)
    go_on.set()
    assert wait_until(lambda: server.waiting_calls() == 0)
    arrived.set()
    assert wait_until(lambda: all(task.done() for task in tasks))
    server.gate.set()
    assert call.result() == b"x"
