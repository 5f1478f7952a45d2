"""What only pending calls for coroutines have: futures of a loop that end on any thread."""

import asyncio
import threading

import pytest

from fixtures.pending_worlds import ends_of
from fixtures.waiting import WAIT_S, in_thread
from rpcwheel.errors import CallsClosed, CallTimeout
from rpcwheel.pending.aio import PendingCalls
from rpcwheel.timer import AsyncWheelTimer


@pytest.fixture
def calls(timer):
    with PendingCalls(timer, name="orders") as calls:
        yield calls


async def test_a_call_is_a_future_of_its_loop(calls):
    future = calls.open(7, timeout=2.0)
    assert isinstance(future, asyncio.Future)
    assert future.get_loop() is asyncio.get_running_loop()
    calls.received(7, "answer")
    assert future.done()  # at once, on the loop
    assert await future == "answer"


def test_open_without_a_running_loop_raises_and_changes_nothing(calls):
    with pytest.raises(RuntimeError, match="no running event loop"):
        calls.open(7, timeout=2.0)
    assert calls.stats().opened == 0


@pytest.mark.parametrize("end", ["received", "failed", "timed out", "lost", "closed"])
async def test_a_call_that_ends_on_another_thread_wakes_its_loop(calls, timer, end):
    future = calls.open(7, timeout=2.0, connection="a")
    called = []
    future.add_done_callback(lambda _: called.append(threading.get_ident()))
    in_thread(ends_of(calls, timer)[end]).result(WAIT_S)
    assert (future.done(), calls.pending) == (False, 0)
    await asyncio.wait([future], timeout=WAIT_S)
    error = future.exception()
    expected = {"received": type(None), "timed out": CallTimeout, "closed": CallsClosed}
    assert isinstance(error, expected.get(end, ConnectionError))
    await asyncio.sleep(0)
    assert called == [threading.get_ident()]


async def test_a_task_canceled_after_its_call_ended_on_another_thread_is_canceled(calls):
    async def wait():
        await calls.open(7, timeout=2.0)

    task = asyncio.create_task(wait())
    await asyncio.sleep(0)
    in_thread(calls.received, 7, 1).result(WAIT_S)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert calls.stats().answered == 1


async def test_a_callback_that_raises_is_reported_to_the_loop(calls):
    reported, ran, error = [], [], ZeroDivisionError()
    asyncio.get_running_loop().set_exception_handler(
        lambda _, context: reported.append(context["exception"])
    )
    future = calls.open(7, timeout=2.0)
    future.add_done_callback(lambda _: (_ for _ in ()).throw(error))
    future.add_done_callback(ran.append)
    calls.received(7, 1)
    await asyncio.sleep(0)
    assert (ran, reported) == ([future], [error])


async def test_stop_iteration_becomes_the_cause_of_a_runtime_error(calls):
    future = calls.open(7, timeout=2.0)
    error = StopIteration()
    calls.failed(7, error)
    with pytest.raises(RuntimeError) as raised:
        await future
    assert raised.value.__cause__ is error


def test_a_call_of_a_closed_loop_ends_without_an_error(calls, timer):
    async def open_one(key):
        return calls.open(key, timeout=2.0, connection="a")

    for key in (1, 2):
        asyncio.run(open_one(key))
    assert calls.received(1, 1)
    assert timer.advance(2) == 1
    assert calls.stats().timed_out == 1


async def test_the_table_is_an_async_context_manager(timer):
    async with PendingCalls(timer) as calls:
        future = calls.open(7, timeout=2.0)
    with pytest.raises(CallsClosed):
        await future


async def test_a_timer_of_the_loop_does_not_end_a_call_early():
    timer = AsyncWheelTimer()
    with PendingCalls(timer) as calls, pytest.raises(CallTimeout) as raised:
        await calls.open(7, timeout=0.02)
    assert raised.value.elapsed >= 0.02
    await timer.aclose()
