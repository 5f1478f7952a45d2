"""Connections that come and go meanwhile, calls that race the end, and many threads at once."""

import os
import random
import threading
import time
from contextlib import ExitStack, suppress

import grpc
import pytest

from fixtures.idle_worlds import echo
from fixtures.leaks import descriptors, left_since
from fixtures.timers import run_threads
from fixtures.waiting import wait_until
from rpcwheel.idle import peers
from rpcwheel.observe import ConnectionClosed
from rpcwheel.timer import WheelTimer

pytestmark = pytest.mark.skipif(not peers.SUPPORTED, reason="sockets are found on Linux only")


def test_many_connections_that_come_and_go_leave_nothing(world):
    with world.serve(idle_timeout=0.5) as served, served.client() as channel:
        echo(channel)
        assert wait_until(lambda: not served.peers())  # what gRPC opens once, it has opened
        before = descriptors()
        most = 0
        for number in range(400):
            with served.raw() as client:
                if number % 4 == 0:
                    client.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
            if number % 50 == 0:
                with served.client() as once:
                    echo(once)
                world.check(served)
                most = max(most, len(world.do(served.connections.snapshot)))
        assert most < 100
        assert wait_until(lambda: not served.peers())
        assert wait_until(lambda: not world.check(served))
        assert wait_until(lambda: not world.do(served.connections.snapshot))
        assert wait_until(lambda: not leaked(before)), leaked(before)


def leaked(before):
    """What was opened since, but for the detector's own hand, which may have held a socket then."""
    numbers = {number for number, _ in before}
    return [one for one in left_since(before) if one[1] != os.devnull or one[0] not in numbers]


def test_connections_are_closed_as_fast_as_they_come(world):
    with world.serve(idle_timeout=0.2) as served, ExitStack() as stack:
        end = time.monotonic() + 2
        most = 0
        while time.monotonic() < end:
            for _ in range(10):
                stack.enter_context(served.raw())
            time.sleep(0.05)
            most = max(most, len(served.peers()))
        assert most < 200  # of 400: they live for a third of a second, and 200 come in each
        assert wait_until(lambda: not served.peers())


@pytest.mark.parametrize("close", ["shutdown", "goaway"])
def test_no_call_fails_of_a_client_that_was_active_lately(world, close, events):
    """They call at random times around the timeout, so that calls and closings meet.

    Nobody knows when a closing and a call met, but it was after the call before had begun, and
    before the failure was seen: if less than the timeout lies between, the server was wrong.
    """
    idle_timeout = 0.6
    failed, gaps = [], []

    def use(served, seed: int) -> None:
        rng = random.Random(seed)
        with served.client(enable_retries=0) as channel:
            before = last = time.monotonic()
            end = before + 2.5
            while (began := time.monotonic()) < end:
                gaps.append(began - last)
                try:
                    echo(channel, wait_for_ready=True)
                except grpc.RpcError as error:
                    failed.append((time.monotonic() - before, error.code(), error.details()))
                before, last = began, time.monotonic()
                time.sleep(rng.uniform(0.1, 1.1))

    with world.serve(idle_timeout=idle_timeout, close=close) as served:
        run_threads(*(lambda seed=seed: use(served, seed) for seed in range(24)))
    assert [one for one in failed if one[0] < idle_timeout] == []
    assert {code for _, code, _ in failed} <= {grpc.StatusCode.UNAVAILABLE}
    if close == "goaway":
        assert failed == []
    assert wait_until(lambda: [one for one in events if isinstance(one, ConnectionClosed)])
    assert len([gap for gap in gaps if gap > idle_timeout]) > 5


def test_rounds_changes_and_the_end_may_meet_from_many_threads(world):
    over = threading.Event()

    def again(work):
        def run() -> None:
            while not over.is_set():
                work()

        return run

    def settings() -> None:
        served.detector.change(idle_timeout=random.choice([0.05, 0.2, 5, None]))
        served.detector.change(close_streams=random.random() < 0.5, close="shutdown")

    def use() -> None:
        with served.client() as channel, suppress(grpc.RpcError):  # the limits are that short
            for _ in range(3):
                echo(channel, wait_for_ready=True)

    def end() -> None:
        time.sleep(1.0)
        for _ in range(3):
            served.detector.close()
        assert world.check(served) == []
        over.set()

    with WheelTimer() as timer, world.serve(idle_timeout=0.1, timer=timer) as served, served.raw():
        look = again(lambda: world.check(served))
        show = again(lambda: repr((served.connections.snapshot(), served.detector)))
        run_threads(look, look, again(settings), show, again(use), again(use), end, end)
        assert served.detector.closed
        assert timer.pending == 0
        with served.raw():
            assert wait_until(served.peers)
            time.sleep(0.3)
            assert served.peers()
