"""Calls on an event loop by other threads, and results awaited on a loop."""

import asyncio
import threading
from concurrent.futures import Future

import pytest

from fixtures.waiting import WAIT_S, in_thread
from rpcwheel._concurrency.loop import (
    await_future,
    call_on_loop,
    loop_timeout,
    on_worker,
    running_loop,
)


async def test_a_callback_from_another_thread_runs_on_the_loop():
    called, loop = asyncio.Event(), asyncio.get_running_loop()
    calling = in_thread(call_on_loop, loop, called.set)
    await asyncio.wait_for(called.wait(), WAIT_S)
    assert calling.result(WAIT_S) is True
    assert running_loop() is loop


def test_a_closed_loop_calls_nothing():
    loop = asyncio.new_event_loop()
    loop.close()
    assert call_on_loop(loop, print) is False
    assert running_loop() is None


async def test_a_timeout_of_await_future_does_not_cancel_the_future():
    future = Future()
    with pytest.raises(TimeoutError):
        await await_future(future, 0.001)
    task = asyncio.create_task(await_future(future))
    await asyncio.sleep(0)
    threading.Thread(target=future.set_result, args=(7,)).start()
    assert await task == 7
    assert await await_future(future, 0) == 7


async def test_on_worker_runs_work_on_another_thread_and_raises_its_exception():
    assert await on_worker(threading.current_thread) is not threading.current_thread()
    with pytest.raises(ZeroDivisionError):
        await on_worker(lambda: 1 / 0)


def test_loop_timeout_is_none_for_timeouts_that_loops_do_not_accept():
    assert [loop_timeout(seconds) for seconds in (None, 1.0, 1e9)] == [None, 1.0, None]
