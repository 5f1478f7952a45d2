"""Calls that were first tried elsewhere, as interceptors do, and are queued with their error."""

import asyncio
import threading

import pytest
from google.protobuf.wrappers_pb2 import StringValue

from fixtures.failback_queues import AsyncFar, Far, aplay, play
from rpcwheel.errors import FailbackClosed, FailbackFull
from rpcwheel.events import FailbackDelivered, FailbackDropped, FailbackQueued
from rpcwheel.failback import FailbackPolicy, FailbackStats, aio


class Resend(Far):
    """What an interceptor parks: it says itself what it is called."""

    label = "/shop.Orders/Push"


@pytest.fixture(params=["sync", "aio"])
async def twin(request, invoker, aio_invoker):
    """Makes invokers of one world, then of the other."""
    return invoker if request.param == "sync" else aio_invoker


async def finish(failback):
    """Let everything pending come to its end, in either world."""
    await (aplay(failback) if isinstance(failback, aio.FailbackInvoker) else to_thread(failback))


async def to_thread(failback):
    await asyncio.to_thread(play, failback)


async def test_a_parked_call_is_made_later_with_its_arguments_and_not_now(twin, events):
    failback, resend, error = twin(), Resend(), ConnectionError("gone")
    assert failback.enqueue(error, resend, b"order", 2) is True
    assert resend.calls == []
    assert failback.pending == 1
    await finish(failback)
    assert resend.calls == [(b"order", 2)]
    assert failback.stats() == FailbackStats(calls=1, queued_total=1, attempts=1, redelivered=1)
    assert events == [
        FailbackQueued("failback", "/shop.Orders/Push", error, 5.0, 1),
        FailbackDelivered("failback", "/shop.Orders/Push", 2, 5.0),
    ]


async def test_keyword_arguments_are_kept_too(invoker):
    got = []
    failback = invoker()
    failback.enqueue(ConnectionError(), lambda **given: got.append(given), urgent=True)
    await finish(failback)
    assert got == [{"urgent": True}]


async def test_a_parked_call_that_goes_on_failing_is_given_up_after_its_retries(
    aio_invoker, events
):
    failback, errors = aio_invoker(max_attempts=3), [ConnectionError(number) for number in range(2)]
    assert failback.enqueue(ConnectionError("first"), resend := Resend(*errors), b"order")
    await finish(failback)
    assert len(resend.calls) == 2
    assert events[-1].error is errors[-1]
    assert (events[-1].attempts, events[-1].reason) == (3, "no attempts left")


async def test_an_error_that_on_does_not_name_is_the_callers(aio_invoker):
    failback = aio_invoker()
    assert failback.enqueue(ValueError("no"), resend := Resend()) is False
    assert failback.stats() == FailbackStats(calls=1, failed=1)
    assert resend.calls == []


async def test_without_retries_the_error_is_the_callers(invoker):
    assert invoker(max_attempts=1).enqueue(ConnectionError(), Resend()) is False


async def test_a_full_queue_refuses_it_with_the_error_as_the_cause(twin):
    failback, error = twin(max_pending=1), ConnectionError("second")
    assert failback.enqueue(ConnectionError(), Resend())
    with pytest.raises(
        FailbackFull, match=r"/shop.Orders/Push failed and was not queued"
    ) as caught:
        failback.enqueue(error, Resend())
    assert caught.value.__cause__ is error
    assert failback.stats().rejected == 1


async def test_a_full_queue_that_drops_says_so_and_the_caller_gets_the_default(invoker, events):
    failback, error = invoker(max_pending=1, overflow="drop"), ConnectionError("second")
    failback.enqueue(ConnectionError(), Resend())
    assert failback.enqueue(error, Resend()) is True
    assert events[-1] == FailbackDropped("failback", "/shop.Orders/Push", error, 1)


async def test_a_closed_queue_refuses_it_with_the_error_as_the_cause(twin):
    failback, error = twin(), ConnectionError()
    closing = failback.close(drain_timeout=0)
    assert (await closing if isinstance(failback, aio.FailbackInvoker) else closing) == []
    with pytest.raises(FailbackClosed) as caught:
        failback.enqueue(error, Resend())
    assert caught.value.__cause__ is error


async def test_a_message_is_kept_as_it_was_when_it_was_parked(invoker):
    failback, message, resend = invoker(), StringValue(value="order"), Resend(ConnectionError())
    failback.enqueue(ConnectionError(), resend, message)
    message.value = "spoilt"
    await finish(failback)
    first, second = (call[0] for call in resend.calls)
    assert first == second == StringValue(value="order")
    assert first is not second


async def test_a_call_with_a_stream_that_is_used_up_is_not_queued_and_the_error_says_why(
    aio_invoker,
):
    failback, error = aio_invoker(), ConnectionError()
    assert failback.enqueue(error, Resend(), iter([b"a"])) is False
    assert error.__notes__[0].startswith("failback: not queued, argument 0 is an iterator")
    assert failback.pending == 0


async def test_a_predicate_that_raises_is_the_callers_and_nothing_is_queued(aio_invoker):
    failback = aio_invoker(retry_on=lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        failback.enqueue(ConnectionError(), Resend())
    assert failback.stats() == FailbackStats(calls=1, failed=1)


async def test_what_close_could_not_deliver_is_told_with_all_that_is_needed(twin):
    failback, error = twin(), ConnectionError()
    failback.enqueue(error, Resend(), b"order", urgent=True)
    closing = failback.close(drain_timeout=0)
    (failed,) = await closing if isinstance(failback, aio.FailbackInvoker) else closing
    assert (failed.function, failed.args, failed.kwargs, failed.attempts) == (
        "/shop.Orders/Push",
        (b"order",),
        {"urgent": True},
        1,
    )
    assert failed.error is error


def test_retries_run_on_a_worker(invoker):
    failback, resend = invoker(), Resend()
    failback.enqueue(ConnectionError(), resend)
    play(failback)
    assert resend.threads[0].name.startswith("rpcwheel-worker-")


async def test_retries_run_on_the_loop_that_parked_and_are_awaited(aio_invoker):
    failback, far = aio_invoker(), AsyncFar()
    failback.enqueue(ConnectionError(), far, 1)
    await aplay(failback)
    assert far.calls == [(1,)]
    assert far.threads == [threading.current_thread()]
    assert far.tasks != [asyncio.current_task()]


def test_without_a_loop_the_aio_twin_refuses_and_keeps_nothing(timer):
    failback = aio.FailbackInvoker(FailbackPolicy(retry_on=ConnectionError), timer=timer)
    with pytest.raises(RuntimeError, match="no running event loop"):
        failback.enqueue(ConnectionError(), Resend())
    assert failback.stats() == FailbackStats()
