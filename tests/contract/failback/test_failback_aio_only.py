"""What only failback of coroutines has: tasks, event loops, cancellation, and plain functions."""

import asyncio
import collections
import gc
import warnings

import pytest
from google.protobuf.wrappers_pb2 import StringValue

from fixtures.event_loops import run_and_close
from fixtures.failback_invokers import DEFAULT
from fixtures.failback_queues import (
    FlakyCoroutine,
    FlakyFunction,
)
from fixtures.waiting import WAIT_S, aio_wait_until, wait_until
from rpcwheel.errors import FailbackClosed
from rpcwheel.events import FailbackLost
from rpcwheel.failback import FailbackPolicy, FailbackStats
from rpcwheel.failback.aio import FailbackInvoker
from rpcwheel.interceptors.aio import FailbackQueues
from rpcwheel.timer import AsyncWheelTimer, WheelTimer

# --- The first attempt ---


async def test_a_retry_sends_the_message_as_it_was_when_the_first_attempt_began(
    aio_invoker, aio_run_until_empty
):
    seen, begun, go_on = [], asyncio.Event(), asyncio.Event()

    async def send(message):
        seen.append(message.value)
        begun.set()
        await go_on.wait()
        if len(seen) == 1:
            raise ConnectionError

    failback, message = aio_invoker(retry_on=ConnectionError), StringValue(value="order")
    call = asyncio.create_task(failback.invoke(send, message))
    await begun.wait()
    message.value = "something else"
    go_on.set()
    assert await call == DEFAULT
    await aio_run_until_empty(failback)
    assert seen == ["order", "order"]


async def test_the_first_attempt_runs_in_the_callers_task(aio_invoker):
    function = FlakyCoroutine()
    assert await aio_invoker().invoke(function, 1, 2) == (1, 2)
    assert function.tasks == [asyncio.current_task()]


async def test_a_plain_function_is_called_too(aio_invoker, aio_run_until_empty):
    failback, function = aio_invoker(), FlakyFunction(ConnectionError())
    assert await failback.invoke(function, 1) == DEFAULT
    await aio_run_until_empty(failback)
    assert function.calls == [(1,)] * 2


# --- Further attempts ---


async def test_a_further_attempt_is_a_task_with_a_name_on_the_callers_loop(aio_invoker, timer):
    failback, function = aio_invoker(), FlakyCoroutine(ConnectionError())
    await failback.invoke(function, "order")
    await asyncio.to_thread(timer.advance, 5)  # as a timer with a thread of its own
    await aio_wait_until(lambda: failback.pending == 0)
    assert function.calls == [("order",)] * 2
    assert function.threads[0] is function.threads[1]
    assert function.tasks[1].get_loop() is asyncio.get_running_loop()
    assert function.tasks[1].get_name().startswith("retry of ")


async def test_a_plain_dead_letter_is_called_on_the_loop(aio_invoker, aio_run_until_empty):
    hook, function = FlakyFunction(), FlakyCoroutine(ConnectionError(), ConnectionError())
    failback = aio_invoker(max_attempts=2, dead_letter=hook)
    await failback.invoke(function)
    await aio_run_until_empty(failback)
    assert hook.threads == function.threads[:1]


async def begin_to_hang(failback, timer):
    """Queue a call whose second attempt hangs, and wait for that; returns its function."""
    function = FlakyCoroutine(ConnectionError())

    async def push():
        await function()
        await asyncio.Event().wait()

    await failback.invoke(push)
    timer.advance(5)
    await aio_wait_until(lambda: len(function.calls) == 2)
    return function


async def test_an_attempt_whose_task_is_canceled_loses_the_call(aio_invoker, timer, events):
    failback = aio_invoker()
    function = await begin_to_hang(failback, timer)
    function.tasks[1].cancel()
    await aio_wait_until(lambda: failback.pending == 0)
    assert isinstance(events[-1], FailbackLost)
    assert events[-1].reason == "its retry was cancelled"


async def test_an_attempt_that_fails_and_cancels_its_own_task_is_repeated(aio_invoker, timer):
    failback, function = aio_invoker(), FlakyCoroutine(ConnectionError())

    async def push():
        await function()
        if len(function.calls) == 2:
            asyncio.current_task().cancel()
            raise ConnectionError

    await failback.invoke(push)
    timer.advance(5)
    await aio_wait_until(lambda: len(function.calls) == 2)
    await asyncio.gather(*function.tasks[1:], return_exceptions=True)
    assert failback.pending == 1
    timer.advance(60)
    await aio_wait_until(lambda: failback.pending == 0)
    assert len(function.calls) == 3


async def test_an_attempt_whose_task_is_canceled_before_it_begins_loses_the_call(
    aio_invoker, timer, events
):
    failback, function = aio_invoker(max_in_flight=1), FlakyCoroutine(ConnectionError())
    await failback.invoke(function)
    tasks = asyncio.all_tasks()
    timer.advance(5)
    begun = asyncio.Event()

    def cancel():  # after the task was made
        for task in asyncio.all_tasks() - tasks:
            task.cancel()
        begun.set()

    asyncio.get_running_loop().call_soon(cancel)
    await begun.wait()
    await aio_wait_until(lambda: failback.pending == 0)
    assert events[-1].reason == "its retry was cancelled"
    assert len(function.calls) == 1
    await failback.invoke(function := FlakyCoroutine(ConnectionError()))
    timer.advance(5)  # the place of the canceled attempt is free
    await aio_wait_until(lambda: len(function.calls) == 2)


# --- flush and close ---


@pytest.mark.parametrize("steps", [1, 5], ids=["as it begins", "later"])
async def test_a_canceled_close_reports_the_queued_calls(steps, timer, events):
    queues = FailbackQueues(timer)
    failback = queues.queue_for(FailbackPolicy(retry_on=ConnectionError), "*")
    await failback.invoke(FlakyCoroutine(*[ConnectionError()] * 9))
    closing = asyncio.create_task(queues.close(10 * WAIT_S))
    for _ in range(steps):
        await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert isinstance(events[-1], FailbackLost)
    assert failback.pending == 0


# --- Event loops ---


@pytest.fixture
def failback(timer):
    """An invoker that belongs to no loop."""
    return FailbackInvoker(FailbackPolicy(retry_on=ConnectionError), timer=timer)


def test_calls_of_a_closed_loop_are_lost(failback, timer, events):
    asyncio.run(failback.invoke(FlakyCoroutine(ConnectionError())))
    timer.advance(5)
    (lost,) = wait_until(lambda: events.of(FailbackLost))
    assert lost.reason == "its event loop is closed"
    wait_until(lambda: failback.pending == 0)
    assert failback.stats().lost == 1


def test_close_on_another_loop_returns_the_calls_of_the_closed_one(failback):
    asyncio.run(failback.invoke(FlakyCoroutine(ConnectionError()), "order"))
    (left,) = asyncio.run(failback.close(drain_timeout=WAIT_S))
    assert (left.args, left.reason) == (("order",), "its event loop is closed")


@pytest.mark.parametrize(("max_in_flight", "hanging"), [(1, 1), (None, 4)])
def test_attempts_of_a_closed_loop_do_not_hold_up_those_of_another(timer, max_in_flight, hanging):
    policy = FailbackPolicy(retry_on=ConnectionError, max_in_flight=max_in_flight)
    failback, attempts = FailbackInvoker(policy, timer=timer), collections.Counter()

    async def push(order):
        attempts[order] += 1
        if attempts[order] == 1:
            raise ConnectionError
        if order < hanging:
            await asyncio.Event().wait()

    async def begin():
        for order in range(hanging):
            await failback.invoke(push, order)
        timer.advance(5)
        await aio_wait_until(lambda: attempts.total() == 2 * hanging)

    async def follow():
        await failback.invoke(push, hanging)
        while failback.pending:
            timer.advance(5)
            await asyncio.sleep(0.001)

    run_and_close(begin())
    asyncio.run(follow())
    stats = failback.stats()
    assert (stats.lost, stats.redelivered) == (hanging, 1)


@pytest.mark.parametrize("method", ["flush", "close"])
def test_flush_and_close_do_not_wait_for_attempts_of_a_closed_loop(failback, timer, events, method):
    run_and_close(begin_to_hang(failback, timer))
    asyncio.run(asyncio.wait_for(getattr(failback, method)(10 * WAIT_S), WAIT_S))
    assert failback.pending == 0
    assert events[-1].reason == "its event loop is closed"


@pytest.mark.parametrize("kind", [AsyncWheelTimer, WheelTimer])
async def test_a_timer_of_the_loop_or_of_a_thread_starts_the_attempts(kind):
    timer, function = kind(), FlakyCoroutine(*[OSError()] * 3)
    failback = FailbackInvoker(FailbackPolicy(retry_on=OSError, backoff=0.01), timer=timer)
    assert await failback.invoke(function) is None
    await aio_wait_until(lambda: failback.pending == 0)
    assert len(function.calls) == 4
    timer.stop()


def test_without_a_running_loop_enqueue_raises_and_queues_nothing(failback):
    with pytest.raises(RuntimeError, match="no running event loop"):
        failback.enqueue(ConnectionError(), FlakyCoroutine())
    assert failback.stats() == FailbackStats()


def test_calls_in_the_timer_of_a_closed_loop_are_reported_at_the_next_failure(events):
    policy = FailbackPolicy(retry_on=ConnectionError, backoff=3600)

    async def main():
        failback = FailbackInvoker(policy, timer=AsyncWheelTimer())
        await failback.invoke(FlakyCoroutine(ConnectionError()), "first")
        return failback

    failback = asyncio.run(main())
    with pytest.raises(FailbackClosed):
        asyncio.run(failback.invoke(FlakyCoroutine(ConnectionError()), "second"))
    assert [event.count for event in events.of(FailbackLost)] == [1]
    assert [call.args for call in asyncio.run(failback.close())] == [("first",)]
    del failback
    events.clear()
    with warnings.catch_warnings():  # that the timer was not stopped: here, and in no later test
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()
