"""Failback for coroutines, over a real grpc.aio server. The timer is moved by hand."""

import asyncio
import collections
import contextvars

import grpc
import pytest
from google.protobuf.wrappers_pb2 import StringValue
from scenarios.failback import DEFAULT, ORDER, SCENARIOS
from tenacity import wait_fixed

from fixtures.failback_queues import (
    FlakyCoroutine,
    FlakyFunction,
    aio_run_until_empty,
    all_wait,
)
from fixtures.grpc_servers import METHOD, begin_scenario, requests_of
from fixtures.waiting import WAIT_S, aio_wait_until, wait_until
from rpcwheel.errors import FailbackClosed, FailbackFull
from rpcwheel.events import DeadLetterFailed, FailbackGaveUp, FailbackLost
from rpcwheel.failback import FailbackPolicy
from rpcwheel.failback.aio import FailbackInvoker
from rpcwheel.timer import AsyncWheelTimer, WheelTimer

COLOR = contextvars.ContextVar("COLOR", default="none")


async def test_each_scenario(aio_invoker, flaky_server, aio_channel):
    push = aio_channel.unary_unary(METHOD)
    for scenario in SCENARIOS:
        begin_scenario(flaky_server, scenario.statuses)
        failback = aio_invoker(**{"retry_on": "UNAVAILABLE"} | scenario.settings)
        try:
            result = await failback.invoke(push, ORDER, timeout=WAIT_S)
        except grpc.RpcError as error:
            result = error.code().name
        await aio_run_until_empty(failback)
        scenario.check(result, requests_of(flaky_server), failback.stats())


async def test_a_restarted_server_gets_every_queued_call(
    aio_invoker, timer, flaky_server, aio_channel
):
    failback = aio_invoker(retry_on=grpc.StatusCode.UNAVAILABLE, max_attempts=None)
    push = aio_channel.unary_unary(METHOD)
    orders = [b"order %d" % number for number in range(20)]
    assert await failback.invoke(push, b"before") == b"before"
    flaky_server.stop()
    assert [await failback.invoke(push, order) for order in orders] == [DEFAULT] * 20
    timer.advance(5)
    await aio_wait_until(lambda: all_wait(failback))
    assert failback.pending == 20
    flaky_server.start()
    await asyncio.wait_for(aio_channel.channel_ready(), WAIT_S)
    await aio_run_until_empty(failback)
    assert sorted(requests_of(flaky_server)[1:]) == sorted(orders)
    assert failback.stats().redelivered == 20


# --- The first attempt ---


async def test_a_retry_sends_the_message_as_it_was_when_the_first_attempt_began(aio_invoker):
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


async def test_a_plain_function_is_called_too(aio_invoker):
    failback, function = aio_invoker(), FlakyFunction(ConnectionError())
    assert await failback.invoke(function, 1) == DEFAULT
    await aio_run_until_empty(failback)
    assert function.calls == [(1,)] * 2


async def test_an_error_that_retry_on_does_not_name_is_raised_unchanged(aio_invoker):
    error = ValueError("no such shop")
    with pytest.raises(ValueError, match="no such shop") as caught:
        await aio_invoker().invoke(FlakyCoroutine(error))
    assert caught.value is error
    assert error.__cause__ is error.__context__ is None


async def test_a_full_queue_raises_from_the_calls_error(aio_invoker):
    failback, error = aio_invoker(max_pending=1), ConnectionError("second")
    await failback.invoke(FlakyCoroutine(ConnectionError()))
    with pytest.raises(FailbackFull) as caught:
        await failback.invoke(FlakyCoroutine(error))
    assert caught.value.__cause__ is error


async def test_canceling_the_caller_cancels_the_call_which_is_not_retried(
    aio_invoker, flaky_server, aio_channel
):
    failback, calls = aio_invoker(retry_on=Exception), []
    flaky_server.freeze()

    def push():
        calls.append(aio_channel.unary_unary(METHOD)(b"order"))
        return calls[0]

    caller = asyncio.create_task(failback.invoke(push))
    await aio_wait_until(lambda: flaky_server.calls)
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert calls[0].cancelled()
    assert (failback.pending, failback.stats().failed) == (0, 1)


# --- The queue ---


async def test_entries_lists_the_queued_calls_and_can_be_read_on_any_thread(aio_invoker, timer):
    failback = aio_invoker(backoff=wait_fixed(5))
    await failback.invoke(FlakyCoroutine(error := ConnectionError("down")), "secret")
    timer.advance(2)
    (entry,) = await asyncio.to_thread(failback.entries)
    assert (entry.function, entry.attempts) == (f"{FlakyCoroutine.__module__}.FlakyCoroutine", 1)
    assert (entry.age_s, entry.next_attempt_s, entry.error) == (2.0, 3.0, error)
    assert await failback.flush(WAIT_S)
    assert failback.entries() == []


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


async def test_each_further_attempt_runs_in_a_copy_of_the_callers_context(aio_invoker):
    seen = []

    async def push():
        seen.append(COLOR.get())
        COLOR.set("changed")
        if len(seen) < 4:
            raise ConnectionError

    failback = aio_invoker()

    async def call():
        COLOR.set("red")
        await failback.invoke(push)

    await asyncio.create_task(call())
    await aio_run_until_empty(failback)
    assert seen == ["red", "changed", "changed", "changed"]
    assert COLOR.get() == "none"


async def test_attempts_that_hang_do_not_delay_other_calls(aio_invoker, timer):
    failback, end = aio_invoker(), asyncio.Event()
    function = FlakyCoroutine(*[ConnectionError()] * 9)

    async def hang():
        if function.errors:
            await function()
        await end.wait()

    for _ in range(9):
        await failback.invoke(hang)
    await failback.invoke(other := FlakyCoroutine(ConnectionError()))
    timer.advance(5)
    await aio_wait_until(lambda: len(other.calls) == 2)
    assert failback.pending == 9
    end.set()
    assert await failback.flush(WAIT_S)


async def test_dead_letter_may_be_a_coroutine_function(aio_invoker):
    received = []

    async def keep(failed):
        await asyncio.sleep(0)
        received.append(failed)

    failback, error = aio_invoker(max_attempts=2, dead_letter=keep), ConnectionError("last")
    await failback.invoke(FlakyCoroutine(ConnectionError("first"), error), "order")
    assert await failback.flush(WAIT_S)
    (failed,) = received
    assert (failed.args, failed.attempts, failed.error) == (("order",), 2, error)


async def test_a_plain_dead_letter_is_called_on_the_loop(aio_invoker):
    hook, function = FlakyFunction(), FlakyCoroutine(ConnectionError(), ConnectionError())
    failback = aio_invoker(max_attempts=2, dead_letter=hook)
    await failback.invoke(function)
    await aio_run_until_empty(failback)
    assert hook.threads == function.threads[:1]


@pytest.mark.parametrize("kind", [FlakyFunction, FlakyCoroutine])
async def test_the_queue_works_after_dead_letter_raised(aio_invoker, events, kind):
    error = ZeroDivisionError()
    failback = aio_invoker(max_attempts=2, dead_letter=kind(error))
    await failback.invoke(FlakyCoroutine(ConnectionError(), ConnectionError()))
    await aio_run_until_empty(failback)
    assert isinstance(events[-1], DeadLetterFailed)
    assert events[-1].error is error
    await failback.invoke(function := FlakyCoroutine(ConnectionError()))
    await aio_run_until_empty(failback)
    assert len(function.calls) == 2


async def test_an_attempt_that_raises_cancelled_error_itself_gives_up_the_call(aio_invoker, events):
    """grpc.aio raises CancelledError if the channel is closed during a call."""
    failback = aio_invoker(retry_on=Exception)
    await failback.invoke(FlakyCoroutine(ConnectionError(), asyncio.CancelledError()))
    await aio_run_until_empty(failback)
    assert isinstance(events[-1], FailbackGaveUp)
    assert isinstance(events[-1].error, asyncio.CancelledError)


async def test_an_attempt_whose_task_is_canceled_loses_the_call(aio_invoker, timer, events):
    failback, function = aio_invoker(), FlakyCoroutine(ConnectionError())

    async def push():
        await function()
        await asyncio.Event().wait()

    await failback.invoke(push)
    timer.advance(5)
    await aio_wait_until(lambda: len(function.calls) == 2)
    function.tasks[1].cancel()
    await aio_wait_until(lambda: failback.pending == 0)
    assert isinstance(events[-1], FailbackLost)
    assert events[-1].reason == "its retry was cancelled"


# --- flush and close ---


async def test_flush_starts_every_queued_call_and_waits_until_all_are_delivered(aio_invoker):
    failback, function = aio_invoker(), FlakyCoroutine(*[ConnectionError()] * 3)
    assert await failback.flush(0) is True
    for number in range(3):
        await failback.invoke(function, number)
    assert await failback.flush() is True
    assert function.calls[3:] == [(0,), (1,), (2,)]


async def test_flush_returns_false_if_calls_are_pending_after_its_timeout(aio_invoker):
    failback = aio_invoker()
    await failback.invoke(FlakyCoroutine(*[ConnectionError()] * 9))
    assert await failback.flush(0.05) is False
    assert failback.pending == 1


async def test_close_returns_and_reports_what_it_could_not_deliver_once(aio_invoker, events):
    failback = aio_invoker()
    await failback.invoke(FlakyCoroutine(*[ConnectionError()] * 9), "stays")
    (left,) = await failback.close(drain_timeout=0.05)
    assert left.args == ("stays",)
    assert left.reason.startswith("closed")
    assert isinstance(events[-1], FailbackLost)
    assert await failback.close() == []


async def test_close_ends_as_soon_as_all_calls_are_delivered(aio_invoker):
    failback, function = aio_invoker(), FlakyCoroutine(ConnectionError())
    await failback.invoke(function)
    assert await failback.close(drain_timeout=10 * WAIT_S) == []
    assert len(function.calls) == 2


async def test_a_canceled_close_reports_the_queued_calls(aio_invoker, events):
    failback = aio_invoker()
    await failback.invoke(FlakyCoroutine(*[ConnectionError()] * 9))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(failback.close(drain_timeout=10 * WAIT_S), 0.05)
    assert isinstance(events[-1], FailbackLost)
    assert failback.pending == 0


async def test_after_close_only_calls_that_would_be_queued_raise_failback_closed(aio_invoker):
    failback, error = aio_invoker(), ConnectionError("late")
    await failback.close()
    assert await failback.invoke(FlakyCoroutine(), 1) == (1,)
    with pytest.raises(FailbackClosed) as caught:
        await failback.invoke(FlakyCoroutine(error))
    assert caught.value.__cause__ is error


async def test_the_end_of_an_async_with_statement_closes_the_queue(timer):
    async with FailbackInvoker(FailbackPolicy(retry_on=OSError), timer=timer) as failback:
        await failback.invoke(function := FlakyCoroutine(OSError()))
    assert len(function.calls) == 2
    with pytest.raises(FailbackClosed):
        await failback.invoke(FlakyCoroutine(OSError()))


@pytest.mark.parametrize("method", ["flush", "close"])
async def test_an_attempt_that_waits_for_its_own_queue_gets_an_error(aio_invoker, events, method):
    failback, function = aio_invoker(), FlakyCoroutine(ConnectionError())

    async def push():
        await function()
        await getattr(failback, method)()

    await failback.invoke(push)
    await aio_run_until_empty(failback)
    assert isinstance(events[-1], FailbackGaveUp)
    assert "would wait for itself" in str(events[-1].error)


# --- Event loops ---


def test_calls_of_a_closed_loop_are_lost(timer, events):
    failback = FailbackInvoker(FailbackPolicy(retry_on=ConnectionError), timer=timer)
    asyncio.run(failback.invoke(FlakyCoroutine(ConnectionError())))
    timer.advance(5)
    wait_until(lambda: failback.pending == 0)
    assert isinstance(events[-1], FailbackLost)
    assert events[-1].reason == "its event loop is closed"
    assert failback.stats().lost == 1


def test_close_on_another_loop_returns_the_calls_of_the_closed_one(timer):
    failback = FailbackInvoker(FailbackPolicy(retry_on=ConnectionError), timer=timer)
    asyncio.run(failback.invoke(FlakyCoroutine(ConnectionError()), "order"))
    (left,) = asyncio.run(failback.close(drain_timeout=WAIT_S))
    assert (left.args, left.reason) == (("order",), "its event loop is closed")


def test_a_call_whose_attempt_runs_when_its_loop_ends_is_lost(timer, events):
    failback = FailbackInvoker(FailbackPolicy(retry_on=ConnectionError), timer=timer)
    function = FlakyCoroutine(ConnectionError())

    async def push():
        await function()
        await asyncio.Event().wait()

    async def main():
        await failback.invoke(push)
        timer.advance(5)
        await aio_wait_until(lambda: len(function.calls) == 2)

    asyncio.run(main())  # which cancels all tasks in the end
    assert failback.pending == 0
    assert events[-1].reason == "its retry was cancelled"


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

    loop = asyncio.new_event_loop()
    loop.run_until_complete(begin())
    loop.close()
    asyncio.run(follow())
    stats = failback.stats()
    assert (stats.lost, stats.redelivered) == (hanging, 1)


@pytest.mark.parametrize("method", ["flush", "close"])
def test_flush_and_close_do_not_wait_for_attempts_of_a_closed_loop(timer, events, method):
    failback = FailbackInvoker(FailbackPolicy(retry_on=ConnectionError), timer=timer)
    function = FlakyCoroutine(ConnectionError())

    async def push():
        await function()
        await asyncio.Event().wait()

    async def begin():
        await failback.invoke(push)
        timer.advance(5)
        await aio_wait_until(lambda: len(function.calls) == 2)

    loop = asyncio.new_event_loop()
    loop.run_until_complete(begin())
    loop.close()
    asyncio.run(asyncio.wait_for(getattr(failback, method)(10 * WAIT_S), WAIT_S))
    assert failback.pending == 0
    assert events[-1].reason == "its event loop is closed"


def test_calls_of_several_loops_are_each_retried_on_their_own(timer):
    failback = FailbackInvoker(FailbackPolicy(retry_on=ConnectionError), timer=timer)

    async def call(function):
        await failback.invoke(function)
        while len(function.calls) < 2:
            timer.advance(5)
            await asyncio.sleep(0.001)

    for _ in range(3):
        asyncio.run(call(function := FlakyCoroutine(ConnectionError())))
        first, second = function.tasks
        assert first.get_loop() is second.get_loop()
    assert failback.stats().redelivered == 3


async def test_a_timer_of_the_loop_starts_the_attempts():
    async with AsyncWheelTimer() as timer:
        failback = FailbackInvoker(FailbackPolicy(retry_on=OSError, backoff=0.01), timer=timer)
        function = FlakyCoroutine(*[OSError()] * 3)
        assert await failback.invoke(function) is None
        assert await failback.close(drain_timeout=WAIT_S) == []
        assert len(function.calls) == 4


async def test_a_timer_with_a_thread_starts_the_attempts():
    with WheelTimer() as timer:
        failback = FailbackInvoker(FailbackPolicy(retry_on=OSError, backoff=0.01), timer=timer)
        function = FlakyCoroutine(*[OSError()] * 3)
        await failback.invoke(function)
        await aio_wait_until(lambda: failback.pending == 0)
        assert len(function.calls) == 4
