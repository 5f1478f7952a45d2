"""Calls that a threaded server has, and no handler yet: their connections are in use."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from fixtures.idle_server import IdleServer, echo, let_it_rest, said, soon
from fixtures.waiting import WAIT_S, wait_until
from rpcwheel.idle import ConnectionTable
from rpcwheel.idle.core import NOTHING
from rpcwheel.observe import ConnectionClosed, ConnectionKept, IdleLimited
from rpcwheel.timer import WheelTimer

ECHO = "/test.Idle/Echo"


class Hiding(grpc.ServerInterceptor):
    """Makes a handler of its own for each call, as most do; `slow` seconds in between."""

    def __init__(self, slow: float = 0.0) -> None:
        self.slow = slow

    def intercept_service(self, continuation, details):
        handler = continuation(details)
        time.sleep(self.slow)

        def serve(request, context):
            return handler.unary_unary(request, context)

        return grpc.unary_unary_rpc_method_handler(serve)


@pytest.fixture(params=["first", "behind another"])
def busy(request, timer):
    """A server with one thread, which a call has; the table is first, or not."""
    before = [] if request.param == "first" else [Hiding()]
    server = IdleServer(timer, workers=1, before=before)
    detector = server.detect()
    server.gate = threading.Event()
    first = server.channel().unary_unary(ECHO).future(b"first")
    assert wait_until(lambda: server.table.open_calls == 1)
    yield server, detector
    server.gate.set()
    assert first.result(WAIT_S) == b"first"
    server.close()


def go_on(server, detector) -> None:
    """Let the limit pass, and all that a detector would try in a second."""
    let_it_rest()
    server.timer.advance(31)
    detector.check()
    for _ in range(12):
        server.timer.advance(0.1)
        detector._act()


def test_the_first_call_of_a_connection_may_wait_for_a_thread(busy, events):
    server, detector = busy
    waiting = server.channel().unary_unary(ECHO).future(b"x")
    assert wait_until(lambda: detector.check() is not None and len(server.table.snapshot()) == 2)
    go_on(server, detector)
    server.gate.set()
    assert waiting.result(WAIT_S) == b"x"
    assert not said(events, ConnectionClosed)


def test_a_call_right_after_another_may_wait_for_a_thread(timer, events):
    server = IdleServer(timer, workers=1, before=[Hiding()])
    detector = server.detect()
    channel = server.channel()
    assert echo(channel) == b"x"
    server.gate = threading.Event()
    calls = [server.channel().unary_unary(ECHO).future(b"y")]
    assert wait_until(lambda: not server.is_calm())
    calls.append(channel.unary_unary(ECHO).future(b"y"))
    assert wait_until(lambda: len(server.server._state.rpc_states) == 2)
    go_on(server, detector)
    assert soon(server, lambda: said(events, ConnectionKept))
    server.gate.set()
    assert [call.result(WAIT_S) for call in calls] == [b"y", b"y"]
    assert not said(events, ConnectionClosed)
    server.close()


@pytest.mark.parametrize("before", [[], [Hiding()]], ids=["first", "behind another"])
def test_the_request_of_a_call_may_be_long_on_its_way(timer, before, events):
    server = IdleServer(timer, before=before)
    detector = server.detect()
    channel, come = server.channel(), threading.Event()
    assert echo(channel) == b"x"
    assert wait_until(server.is_calm)
    late = channel.stream_unary(ECHO).future(iter(lambda: come.wait(WAIT_S) and b"late", None))
    assert wait_until(lambda: len(server.server._state.rpc_states) == 1)
    go_on(server, detector)
    assert not late.done()
    come.set()
    late.cancel()
    assert not said(events, ConnectionClosed)
    assert wait_until(server.is_calm)  # and has not begun: that was seen too
    server.close()


def test_while_a_call_is_not_known_nothing_counts_as_heard(timer):
    """It may wait since then, whatever else its connection does meanwhile."""
    server = IdleServer(timer, workers=1, before=[Hiding()])
    detector = server.detect()
    server.gate = threading.Event()
    calls = [server.channel().unary_unary(ECHO).future(b"x") for _ in range(2)]
    assert wait_until(lambda: len(server.server._state.rpc_states) == 2)
    assert wait_until(lambda: server.table.open_calls == 1)
    heard_ns = server.table.heard_ns
    for _ in range(3):
        detector.check()
        detector._settle()
    assert server.table.heard_ns == heard_ns
    assert detector._coming_ago_ns(settled=True) > 0
    server.gate.set()
    assert [call.result(WAIT_S) for call in calls] == [b"x"] * 2
    assert wait_until(server.is_calm)
    assert wait_until(lambda: detector.check() is not None and server.table.heard_ns > heard_ns)
    assert wait_until(lambda: detector._coming_ago_ns(settled=True) == NOTHING)
    assert detector._coming_ago_ns(settled=False) > 0
    server.close()


def test_a_call_is_known_as_soon_as_the_server_has_it_and_counted_once(timer):
    server = IdleServer(timer, workers=1)
    server.detect()
    server.gate = threading.Event()
    channel = server.channel()
    calls = [channel.unary_unary(ECHO).future(b"x") for _ in range(3)]
    assert wait_until(lambda: server.table.snapshot() and server.connection().calls_open == 3)
    server.gate.set()
    assert [call.result(WAIT_S) for call in calls] == [b"x"] * 3
    assert wait_until(server.is_calm)
    assert (server.connection().calls, server.table.open_calls) == (3, 0)
    server.close()


def test_a_call_that_ends_before_it_has_a_thread_is_open_no_more(timer):
    server = IdleServer(timer, workers=1)
    server.detect()
    server.gate = threading.Event()
    channel = server.channel()
    calls = [channel.unary_unary(ECHO).future(b"x") for _ in range(2)]
    assert wait_until(lambda: server.table.open_calls == 2)
    calls[1].cancel()
    assert wait_until(lambda: server.table.open_calls == 1)
    server.gate.set()
    assert calls[0].result(WAIT_S) == b"x"
    assert wait_until(lambda: server.table.open_calls == 0)
    server.close()


def test_another_interceptor_may_take_its_time():
    with WheelTimer() as timer:
        slow = Hiding()
        server = IdleServer(timer)
        server.close()
        server = IdleServer(timer, before=[slow])
        channel = server.channel()
        assert echo(channel) == b"x"
        detector = server.detect(0.3, check=0.3)
        time.sleep(0.5)  # what is marked is tried for a second
        slow.slow = 0.6
        detector.change(idle_timeout=0.2, check=0.2)
        call = channel.unary_unary(ECHO).future(b"y")
        time.sleep(0.15)
        detector.check()
        assert call.result(WAIT_S) == b"y"
        server.close()


def test_where_the_table_was_forgotten_no_call_in_flight_is_cut_off(timer, events):
    opened = threading.Event()
    server = IdleServer(timer)
    with ThreadPoolExecutor(2) as pool:
        forgetful = grpc.server(pool)  # no interceptors
        echoing = grpc.unary_unary_rpc_method_handler(lambda r, _: opened.wait(WAIT_S) and r)
        forgetful.add_generic_rpc_handlers(
            [grpc.method_handlers_generic_handler("test.Idle", {"Echo": echoing})]
        )
        server.server.stop(None).wait()
        server.server, server.table = forgetful, ConnectionTable(timer=timer)
        server.port = forgetful.add_insecure_port("127.0.0.1:0")
        forgetful.start()
        detector = server.detect()
        channel = server.channel()
        call = channel.unary_unary(ECHO).future(b"x")
        assert wait_until(lambda: detector.check() is not None and server.table.snapshot())
        go_on(server, detector)
        assert not call.done()
        opened.set()
        assert call.result(WAIT_S) == b"x"
        go_on(server, detector)  # it is over, but what comes next would not be seen either
        assert echo(channel) == b"x"
        assert not said(events, ConnectionClosed)
        assert wait_until(lambda: said(events, IdleLimited))
        assert "is the ConnectionTable among" in said(events, IdleLimited)[0].reason
        server.close()
