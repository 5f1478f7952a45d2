"""From the workers to the loop."""

import asyncio
import threading
from concurrent.futures import Future

import pytest

from rpcwheel.registry._aio_waiting import (
    awaited,
    bounded,
    hand_over,
    reached,
    running_loop,
)


async def test_a_workers_future_is_awaited_and_stays_when_nobody_does():
    future = Future()
    with pytest.raises(TimeoutError):
        await awaited(future, 0.001)
    task = asyncio.create_task(awaited(future, None))
    await asyncio.sleep(0)
    threading.Thread(target=future.set_result, args=(7,)).start()
    assert await task == 7
    assert await awaited(future, 0) == 7


async def test_what_is_not_reached_in_time_is_given_up():
    future = Future()
    assert await reached(future, 0.001) is False
    assert future.cancelled()
    done = Future()
    done.set_result(True)
    assert await reached(done, 0) is True


def test_a_loop_that_is_closed_is_told_nothing():
    loop = asyncio.new_event_loop()
    loop.close()
    hand_over(loop, lambda: None)
    assert running_loop() is None


def test_no_loop_waits_for_three_years():
    assert [bounded(seconds) for seconds in (None, 1.0, 1e9)] == [None, 1.0, None]
