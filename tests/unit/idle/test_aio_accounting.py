"""When the loop of a grpc.aio server is known to have seen all calls that have arrived."""

import threading
import time

import pytest

from fixtures.waiting import WAIT_S, wait_until


@pytest.fixture
def server(aio_world, make_server):
    return make_server(aio_world)


def test_a_pause_fails_while_the_loop_is_blocked_and_counts_when_it_goes_on(aio_world, server):
    detector, go_on = server.detect(), threading.Event()
    aio_world.loop.call_soon_threadsafe(go_on.wait, WAIT_S)
    before_ns = server.tracked.accounted_ns
    assert detector._pause() is False
    assert server.tracked.accounted_ns == before_ns
    assert detector._unknown_calls_since_ns(False) == before_ns
    go_on.set()
    assert wait_until(lambda: server.tracked.accounted_ns > before_ns)


def test_a_loop_with_long_rounds_needs_several_until_it_has_seen_all_calls(aio_world, server):
    rounds, done, detector = [], [], server.detect()

    def turn() -> None:
        rounds.append(1)
        time.sleep(0.06)
        if not done:
            aio_world.loop.call_soon(turn)

    def begin() -> bool:
        turn()
        return detector._account_on_loop(lambda: done.append(len(rounds)))

    assert aio_world.do(begin)
    assert wait_until(lambda: done)
    assert done[0] > 4


def test_an_arriving_call_may_have_come_since_all_calls_were_last_known(server):
    detector, go_on = server.detect(), threading.Event()
    server.tracked.accounted_ns = early_ns = time.monotonic_ns() - 5 * 10**9
    requests = (go_on.wait(WAIT_S) and b"1" for _ in range(1))
    call = server.channel().stream_unary("/test.Idle/Echo").future(requests)
    assert wait_until(server.waiting_calls)
    server.tracked.accounted_ns = time.monotonic_ns()
    assert detector._unknown_calls_since_ns(True) == early_ns
    go_on.set()
    assert call.result(WAIT_S) == b"1"
    assert detector._unknown_calls_since_ns(True) is None
