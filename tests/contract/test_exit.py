"""Background calls at the exit of a process, in separate processes.

A call that reaches a `grpc.server` of the process after `concurrent.futures` was shut down hangs
the process; see docs/grpcio.md.
"""

import asyncio
import threading

import pytest

from fixtures.event_loops import run_and_close
from fixtures.exiting_process import STARTS_THREADS, output_of
from fixtures.heartbeats import server  # noqa: F401 - a fixture
from fixtures.shop import UNARY_UNARY
from fixtures.waiting import WAIT_S, aio_wait_until, in_thread
from rpcwheel._concurrency.exiting import BackgroundCalls
from rpcwheel.errors import FailbackClosed
from rpcwheel.failback import FailbackInvoker as SyncFailbackInvoker
from rpcwheel.failback import FailbackPolicy
from rpcwheel.failback.aio import FailbackInvoker
from rpcwheel.heartbeat.aio import HeartbeatManager
from rpcwheel.transport.aio import ReconnectingChannel

each_world = pytest.mark.parametrize("world", ["sync", "aio"])


@each_world
@STARTS_THREADS
def test_background_calls_end_when_the_main_thread_ends_beside_a_running_server(world):
    ended = "undelivered: 1, the program ended before close()\nended\n"
    assert output_of(world, "probe heartbeat failback") == ended


@each_world
def test_a_delivery_that_is_not_answered_does_not_hang_the_exit(world):
    reason = "the program ended before close(), during an attempt, which may still succeed"
    ended = f"undelivered: 1, {reason}\nended\n"
    assert output_of(world, "failback", "", "unanswered") == ended


@each_world
@STARTS_THREADS
def test_background_calls_continue_for_other_threads_if_the_process_has_no_server(server, world):  # noqa: F811
    assert output_of(world, "heartbeat failback", server.target) == "went on\n"


# In this process, whose own background calls go on


@pytest.fixture
def background(monkeypatch):
    """The background calls of this test."""
    background = BackgroundCalls()
    for module in ("heartbeat.monitor", "failback.queue"):
        monkeypatch.setattr(f"rpcwheel.{module}.BACKGROUND", background)
    return background


MANY = 10**6
"""Steps of waiting; together longer than a test may take."""


def test_the_exit_does_not_wait_for_a_heartbeat_whose_loop_was_closed(server, timer, background):  # noqa: F811
    kept = []

    async def begin():
        manager = HeartbeatManager(timer=timer, interval=1.0)
        channel = ReconnectingChannel(server.target, timer=timer)
        kept.extend([manager, channel])
        await channel.unary_unary(UNARY_UNARY)(b"")
        server.answer = threading.Event()
        assert manager.attach(channel).beat()
        await aio_wait_until(lambda: server.checks)

    run_and_close(begin())
    background.close(MANY)


def test_the_exit_does_not_wait_for_a_delivery_whose_loop_was_closed(timer, background):
    tries, kept = [], []

    async def hangs():
        tries.append(len(tries))
        if len(tries) == 1:
            raise OSError
        await asyncio.Event().wait()

    async def begin():
        queue = FailbackInvoker(FailbackPolicy(retry_on=OSError, backoff=1.0), timer=timer)
        kept.append(queue)
        await queue.invoke(hangs)
        timer.advance(1.0)
        await aio_wait_until(lambda: len(tries) == 2)

    run_and_close(begin())
    background.close(MANY)


async def test_the_exit_cancels_a_delivery_that_does_not_end(timer, background):
    tries = []

    async def hangs():
        tries.append(asyncio.current_task())
        if len(tries) == 1:
            raise OSError
        await asyncio.Event().wait()

    queue = FailbackInvoker(FailbackPolicy(retry_on=OSError, backoff=1.0), timer=timer)
    await queue.invoke(hangs)
    timer.advance(1.0)
    await aio_wait_until(lambda: len(tries) == 2)
    background.close(0)
    await asyncio.wait(tries[1:], timeout=WAIT_S)
    assert tries[1].cancelled()
    await queue.close(0)


def test_a_queue_created_at_exit_refuses_failed_calls(background):
    def fail():
        raise OSError

    background.close()
    queue = SyncFailbackInvoker(FailbackPolicy(retry_on=OSError))
    with pytest.raises(FailbackClosed, match="at the end of the program"):
        queue.invoke(fail)
    assert queue.flush() is True


def test_calls_queued_when_background_calls_end_are_reported_and_flush_returns(timer, background):
    queue = SyncFailbackInvoker(FailbackPolicy(retry_on=OSError, backoff=1.0), timer=timer)
    tries = []

    def fail():
        tries.append(len(tries))
        raise OSError

    queue.invoke(fail)
    background.closed = True
    flushing = in_thread(queue.flush)
    background.close()
    assert flushing.result(WAIT_S) is True
    assert (tries, queue.stats().lost) == ([0], 1)
