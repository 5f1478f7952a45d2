"""How a queue on a loop is flushed and closed."""

import asyncio

import pytest

from fixtures.failback_queues import AsyncFar, all_wait, aplay
from fixtures.waiting import WAIT_S, aio_wait_until
from rpcwheel.errors import FailbackClosed
from rpcwheel.events import FailbackGaveUp, FailbackLost
from rpcwheel.failback import FailbackPolicy
from rpcwheel.failback.aio import FailbackInvoker


async def test_a_flush_tries_at_once_and_waits_until_all_have_arrived(aio_invoker):
    failback, far = aio_invoker(), AsyncFar(*[ConnectionError()] * 3)
    for number in range(3):
        await failback.invoke(far, number)
    assert await failback.flush() is True
    assert far.calls[3:] == [(0,), (1,), (2,)]


async def test_a_flush_of_nothing_is_true_at_once(aio_invoker):
    assert await aio_invoker().flush(0) is True


async def test_a_flush_that_runs_out_of_time_says_so(aio_invoker):
    failback = aio_invoker()
    await failback.invoke(AsyncFar(*[ConnectionError()] * 9))
    assert await failback.flush(0.05) is False
    assert failback.pending == 1


async def test_a_close_returns_what_it_could_not_deliver(aio_invoker, events):
    failback = aio_invoker()
    await failback.invoke(AsyncFar(*[ConnectionError()] * 9), "stays")
    (left,) = await failback.close(drain_timeout=0.05)
    assert left.args == ("stays",)
    assert left.reason.startswith("closed")
    assert isinstance(events[-1], FailbackLost)
    assert await failback.close() == []


async def test_a_close_ends_as_soon_as_all_have_arrived(aio_invoker):
    failback, far = aio_invoker(), AsyncFar(ConnectionError())
    await failback.invoke(far)
    assert await failback.close(drain_timeout=10 * WAIT_S) == []
    assert len(far.calls) == 2


async def test_a_drain_retries_until_its_time_is_over_whatever_the_limit_of_retries(
    aio_invoker, timer
):
    failback, far = aio_invoker(max_attempts=2, backoff=1.0), AsyncFar(*[ConnectionError()] * 4)
    await failback.invoke(far)
    closing = asyncio.create_task(failback.close(drain_timeout=4 * WAIT_S))
    for tries in range(2, 5):
        await aio_wait_until(lambda tries=tries: len(far.calls) == tries and all_wait(failback))
        timer.advance(1.0)
    assert await closing == []
    assert len(far.calls) == 5


async def test_a_close_that_is_cancelled_still_reports(aio_invoker, events):
    failback = aio_invoker()
    await failback.invoke(AsyncFar(*[ConnectionError()] * 9))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(failback.close(drain_timeout=10 * WAIT_S), 0.05)
    assert isinstance(events[-1], FailbackLost)
    assert failback.pending == 0


async def test_after_close_a_good_call_works_and_a_failing_one_raises_from_its_error(aio_invoker):
    failback, error = aio_invoker(), ConnectionError("late")
    await failback.close()
    assert await failback.invoke(AsyncFar(), 1) == (1,)
    with pytest.raises(FailbackClosed) as caught:
        await failback.invoke(AsyncFar(error))
    assert caught.value.__cause__ is error


async def test_leaving_the_async_with_statement_closes(timer):
    async with FailbackInvoker(FailbackPolicy(retry_on=OSError), timer=timer) as failback:
        await failback.invoke(far := AsyncFar(OSError()))
    assert len(far.calls) == 2
    with pytest.raises(FailbackClosed):
        await failback.invoke(AsyncFar(OSError()))


@pytest.mark.parametrize("wait", ["flush", "close"])
async def test_a_retried_function_that_waits_for_its_own_queue_is_told(aio_invoker, events, wait):
    failback, far = aio_invoker(), AsyncFar(ConnectionError())

    async def push():
        await far()
        await getattr(failback, wait)()

    await failback.invoke(push)
    await aplay(failback)
    assert isinstance(events[-1], FailbackGaveUp)
    assert "would wait for itself" in str(events[-1].error)
