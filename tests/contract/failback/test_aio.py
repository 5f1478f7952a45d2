"""Failback on a loop, over a real grpc.aio server on real sockets. Waits are moved by hand."""

import asyncio
import contextvars

import grpc
import pytest
from google.protobuf.wrappers_pb2 import StringValue
from scenarios.failback import DEFAULT, ORDER, SCENARIOS

from fixtures.failback_queues import AsyncFar, Far, all_wait, aplay
from fixtures.grpc_servers import METHOD
from fixtures.waiting import WAIT_S, aio_wait_until, wait_until
from rpcwheel.errors import FailbackFull
from rpcwheel.events import DeadLetterFailed, FailbackGaveUp, FailbackLost
from rpcwheel.failback import FailbackPolicy
from rpcwheel.failback.aio import FailbackInvoker
from rpcwheel.timer import AsyncWheelTimer, WheelTimer

COLOUR = contextvars.ContextVar("COLOUR", default="none")


# --- The scenario table ---


async def test_each_scenario_ends_as_the_table_says(aio_invoker, aio_grpc_server, aio_channel):
    push = aio_channel.unary_unary(METHOD)
    for scenario in SCENARIOS:
        script = aio_grpc_server.script.begin(*scenario.far_side)
        failback = aio_invoker(**{"retry_on": "UNAVAILABLE"} | scenario.settings)
        try:
            answer = await failback.invoke(push, ORDER, timeout=WAIT_S)
        except grpc.RpcError as error:
            answer = error.code().name
        await aplay(failback)
        scenario.check(answer, script.received, failback.stats())


async def test_a_server_that_was_killed_gets_every_call_when_it_is_back(
    aio_invoker, timer, aio_grpc_server, aio_channel
):
    failback = aio_invoker(retry_on=grpc.StatusCode.UNAVAILABLE, max_attempts=None)
    push = aio_channel.unary_unary(METHOD)
    orders = [b"order %d" % number for number in range(20)]
    assert await failback.invoke(push, b"before") == b"before"
    await aio_grpc_server.kill()
    assert [await failback.invoke(push, order) for order in orders] == [DEFAULT] * 20
    timer.advance(5)
    await aio_wait_until(lambda: all_wait(failback))
    assert failback.pending == 20
    await aio_grpc_server.start()
    await asyncio.wait_for(aio_channel.channel_ready(), WAIT_S)
    await aplay(failback)
    assert sorted(aio_grpc_server.script.received[1:]) == sorted(orders)
    assert failback.stats().redelivered == 20


# --- The first try ---


async def test_the_first_try_runs_in_the_callers_task(aio_invoker):
    far = AsyncFar()
    assert await aio_invoker().invoke(far, 1, 2) == (1, 2)
    assert far.tasks == [asyncio.current_task()]


async def test_a_function_that_is_no_coroutine_function_works_too(aio_invoker):
    far = Far(ConnectionError())
    failback = aio_invoker()
    assert await failback.invoke(far, 1) == DEFAULT
    await aplay(failback)
    assert far.calls == [(1,)] * 2


async def test_another_error_is_raised_unchanged(aio_invoker):
    error = ValueError("no such shop")
    with pytest.raises(ValueError, match="no such shop") as caught:
        await aio_invoker().invoke(AsyncFar(error))
    assert caught.value is error
    assert error.__cause__ is error.__context__ is None


async def test_a_full_queue_raises_from_the_calls_error(aio_invoker):
    failback, error = aio_invoker(max_pending=1), ConnectionError("second")
    await failback.invoke(AsyncFar(ConnectionError()))
    with pytest.raises(FailbackFull) as caught:
        await failback.invoke(AsyncFar(error))
    assert caught.value.__cause__ is error


async def test_cancelling_the_caller_cancels_the_call_and_nothing_is_retried(
    aio_invoker, aio_grpc_server, aio_channel
):
    failback, never = aio_invoker(retry_on=Exception), asyncio.Event()
    aio_grpc_server.script.then(never)
    calls = []

    def push():
        calls.append(aio_channel.unary_unary(METHOD)(b"order"))
        return calls[0]

    caller = asyncio.create_task(failback.invoke(push))
    await aio_wait_until(lambda: aio_grpc_server.script.received)
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert calls[0].cancelled()
    assert failback.pending == 0
    assert failback.stats().failed == 1
    never.set()


# --- The queue ---


async def test_entries_lists_the_queued_calls_and_can_be_read_on_any_thread(aio_invoker, timer):
    failback, error = aio_invoker(), ConnectionError("down")
    await failback.invoke(AsyncFar(error), "secret")
    timer.advance(2)
    (entry,) = await asyncio.to_thread(failback.entries)
    assert (entry.function, entry.attempts) == (f"{AsyncFar.__module__}.AsyncFar", 1)
    assert (entry.age_s, entry.next_attempt_s, entry.error) == (2.0, 3.0, error)
    assert await failback.flush(WAIT_S)
    assert failback.entries() == []


# --- Retries ---


async def test_a_retry_is_a_named_task_on_the_callers_loop(aio_invoker, timer):
    failback, far = aio_invoker(), AsyncFar(ConnectionError())
    await failback.invoke(far, "order")
    await asyncio.to_thread(timer.advance, 5)  # the timer's thread is another
    await aio_wait_until(lambda: failback.pending == 0)
    assert far.calls == [("order",)] * 2
    assert far.threads[0] is far.threads[1]
    assert far.tasks[1].get_loop() is asyncio.get_running_loop()
    assert far.tasks[1].get_name().startswith("retry of ")


async def test_a_retry_sees_the_callers_context_and_leaves_no_trace_in_it(aio_invoker):
    seen = []

    async def push():
        seen.append(COLOUR.get())
        COLOUR.set("spoilt")
        if len(seen) < 4:
            raise ConnectionError

    failback = aio_invoker()

    async def call():
        COLOUR.set("red")
        await failback.invoke(push)

    await asyncio.create_task(call())
    await aplay(failback)
    assert seen == ["red", "spoilt", "spoilt", "spoilt"]
    assert COLOUR.get() == "none"


async def test_each_try_gets_the_message_as_it_was_when_the_call_was_queued(aio_invoker):
    seen = []

    async def push(message):
        seen.append(message.value)
        message.value += "!"
        if len(seen) < 3:
            raise ConnectionError

    failback, message = aio_invoker(), StringValue(value="order")
    await failback.invoke(push, message)
    message.value = "something else"
    await aplay(failback)
    assert seen == ["order", "order!", "order!"]


async def test_a_call_that_hangs_holds_up_no_other_call(aio_invoker, timer):
    failback, end, far = aio_invoker(), asyncio.Event(), AsyncFar(*[ConnectionError()] * 9)

    async def hang():
        if far.failures:
            await far()
        await end.wait()

    for _ in range(9):
        await failback.invoke(hang)
    await failback.invoke(other := AsyncFar(ConnectionError()))
    timer.advance(5)
    await aio_wait_until(lambda: len(other.calls) == 2)
    assert failback.pending == 9
    end.set()
    assert await failback.flush(WAIT_S)


async def test_an_abandoned_call_goes_to_a_dead_letter_hook_that_may_be_awaited(aio_invoker):
    letters = []

    async def bury(letter):
        await asyncio.sleep(0)
        letters.append(letter)

    failback, error = aio_invoker(max_attempts=2, dead_letter=bury), ConnectionError("last")
    await failback.invoke(AsyncFar(ConnectionError("first"), error), "order")
    assert await failback.flush(WAIT_S)
    (letter,) = letters
    assert (letter.args, letter.attempts, letter.error) == (("order",), 2, error)


async def test_a_plain_dead_letter_hook_is_called_on_the_loop(aio_invoker):
    hook = Far()
    failback = aio_invoker(max_attempts=2, dead_letter=hook)
    far = AsyncFar(ConnectionError(), ConnectionError())
    await failback.invoke(far)
    await aplay(failback)
    assert hook.threads == far.threads[:1]


@pytest.mark.parametrize("kind", [Far, AsyncFar])
async def test_a_dead_letter_hook_that_raises_does_no_harm(aio_invoker, events, kind):
    broken = ZeroDivisionError()
    failback = aio_invoker(max_attempts=2, dead_letter=kind(broken))
    await failback.invoke(AsyncFar(ConnectionError(), ConnectionError()))
    await aplay(failback)
    assert isinstance(events[-1], DeadLetterFailed)
    assert events[-1].error is broken
    await failback.invoke(far := AsyncFar(ConnectionError()))
    await aplay(failback)
    assert len(far.calls) == 2


async def test_a_retry_cancelled_from_within_is_given_up(aio_invoker, events):
    """As when the channel is closed under it: grpc.aio raises CancelledError then."""
    failback = aio_invoker(retry_on=Exception)
    await failback.invoke(AsyncFar(ConnectionError(), asyncio.CancelledError()))
    await aplay(failback)
    assert isinstance(events[-1], FailbackGaveUp)
    assert isinstance(events[-1].error, asyncio.CancelledError)


async def test_a_retry_cancelled_from_outside_is_undelivered(aio_invoker, timer, events):
    failback, far, never = aio_invoker(), AsyncFar(ConnectionError()), asyncio.Event()

    async def push():
        await far()
        await never.wait()

    await failback.invoke(push)
    timer.advance(5)
    await aio_wait_until(lambda: len(far.calls) == 2)
    far.tasks[1].cancel()
    await aio_wait_until(lambda: failback.pending == 0)
    assert isinstance(events[-1], FailbackLost)
    assert events[-1].reason == "its retry was cancelled"


# --- Loops ---


def test_calls_of_a_loop_that_was_closed_are_reported(timer, events):
    failback = FailbackInvoker(FailbackPolicy(retry_on=ConnectionError), timer=timer)
    asyncio.run(failback.invoke(AsyncFar(ConnectionError())))
    timer.advance(5)
    wait_until(lambda: failback.pending == 0)
    assert isinstance(events[-1], FailbackLost)
    assert events[-1].reason == "its event loop is closed"
    assert failback.stats().lost == 1


def test_a_close_on_another_loop_returns_the_calls_of_the_closed_one(timer):
    failback = FailbackInvoker(FailbackPolicy(retry_on=ConnectionError), timer=timer)
    asyncio.run(failback.invoke(AsyncFar(ConnectionError()), "order"))
    (left,) = asyncio.run(failback.close(drain_timeout=WAIT_S))
    assert (left.args, left.reason) == (("order",), "its event loop is closed")


def test_a_retry_under_way_when_its_loop_ends_is_reported(timer, events):
    failback = FailbackInvoker(FailbackPolicy(retry_on=ConnectionError), timer=timer)
    far = AsyncFar(ConnectionError())

    async def push():
        await far()
        await asyncio.sleep(60)

    async def main():
        await failback.invoke(push)
        timer.advance(5)
        await aio_wait_until(lambda: len(far.calls) == 2)

    asyncio.run(main())  # which cancels all tasks in the end
    assert failback.pending == 0
    assert events[-1].reason == "its retry was cancelled"


def test_one_invoker_serves_several_loops_each_call_on_its_own(timer):
    failback = FailbackInvoker(FailbackPolicy(retry_on=ConnectionError), timer=timer)
    fars = [AsyncFar(ConnectionError()) for _ in range(3)]

    async def call(far):
        await failback.invoke(far)
        while len(far.calls) < 2:
            timer.advance(5)
            await asyncio.sleep(0.001)

    for far in fars:
        asyncio.run(call(far))
    assert all(task.get_loop() is far.tasks[0].get_loop() for far in fars for task in far.tasks)
    assert failback.stats().redelivered == 3


async def test_an_async_timer_wakes_the_calls_of_its_loop():
    async with AsyncWheelTimer() as timer:
        failback = FailbackInvoker(FailbackPolicy(retry_on=OSError, backoff=0.01), timer=timer)
        far = AsyncFar(*[OSError()] * 3)
        assert await failback.invoke(far) is None
        assert await failback.close(drain_timeout=WAIT_S) == []
        assert len(far.calls) == 4


async def test_a_threads_timer_wakes_the_calls_of_a_loop():
    with WheelTimer() as timer:
        failback = FailbackInvoker(FailbackPolicy(retry_on=OSError, backoff=0.01), timer=timer)
        far = AsyncFar(*[OSError()] * 3)
        await failback.invoke(far)
        await aio_wait_until(lambda: failback.pending == 0)
        assert len(far.calls) == 4
