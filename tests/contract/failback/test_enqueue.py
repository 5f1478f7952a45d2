"""Calls whose first attempt was made elsewhere, as by an interceptor, and that are then queued."""

import asyncio

import pytest
from tenacity import wait_fixed

from fixtures.failback_queues import (
    FlakyCoroutine,
    FlakyFunction,
    aio_run_until_empty,
    run_until_empty,
)
from rpcwheel.errors import FailbackClosed
from rpcwheel.events import FailbackDelivered, FailbackQueued
from rpcwheel.failback import FailbackPolicy, FailbackStats, aio


class Delivery(FlakyFunction):
    """What an interceptor queues: it has the name for events and logs."""

    label = "/shop.Orders/Push"


class AioDelivery(FlakyCoroutine):
    label = "/shop.Orders/Push"


DELIVERED = [FailbackStats(calls=1, queued_total=1, attempts=1, redelivered=1)]


def test_an_enqueued_call_is_made_later_on_a_worker_with_its_arguments(invoker, events):
    failback, delivery = invoker(backoff=wait_fixed(5)), Delivery()
    error = ConnectionError("gone")
    assert failback.enqueue(error, delivery, b"order", 2) == "queued"
    assert (delivery.calls, failback.pending) == ([], 1)
    run_until_empty(failback)
    assert delivery.calls == [(b"order", 2)]
    assert delivery.threads[0].name.startswith("rpcwheel-worker-")
    assert [failback.stats()] == DELIVERED
    assert events == [
        FailbackQueued("failback", "/shop.Orders/Push", error, 5.0, 1),
        FailbackDelivered("failback", "/shop.Orders/Push", 2, 5.0),
    ]


async def test_an_enqueued_call_is_made_later_on_the_loop_with_its_arguments(aio_invoker):
    failback, delivery = aio_invoker(), AioDelivery()
    assert failback.enqueue(ConnectionError("gone"), delivery, b"order", 2) == "queued"
    assert (delivery.calls, failback.pending) == ([], 1)
    await aio_run_until_empty(failback)
    assert delivery.calls == [(b"order", 2)]
    assert delivery.tasks != [asyncio.current_task()]
    assert [failback.stats()] == DELIVERED


def test_keyword_arguments_are_kept(invoker):
    received = []
    failback = invoker()
    failback.enqueue(ConnectionError(), lambda **given: received.append(given), urgent=True)
    run_until_empty(failback)
    assert received == [{"urgent": True}]


async def test_a_call_is_not_queued_for_an_error_that_retry_on_does_not_name(invoker, aio_invoker):
    for failback, delivery in ((invoker(), Delivery()), (aio_invoker(), AioDelivery())):
        assert failback.enqueue(ValueError("no"), delivery) is None
        assert failback.stats() == FailbackStats(calls=1, failed=1)
        assert delivery.calls == []


async def test_a_closed_queue_raises_from_the_error(invoker, aio_invoker):
    sync_failback, aio_failback, error = invoker(), aio_invoker(), ConnectionError()
    sync_failback.close()
    await aio_failback.close()
    for failback in (sync_failback, aio_failback):
        with pytest.raises(FailbackClosed, match=r"/shop.Orders/Push failed") as caught:
            failback.enqueue(error, Delivery())
        assert caught.value.__cause__ is error


def test_without_a_running_loop_the_aio_invoker_raises_and_queues_nothing(timer):
    failback = aio.FailbackInvoker(FailbackPolicy(retry_on=ConnectionError), timer=timer)
    with pytest.raises(RuntimeError, match="no running event loop"):
        failback.enqueue(ConnectionError(), Delivery())
    assert failback.stats() == FailbackStats()
