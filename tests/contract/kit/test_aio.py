"""The kit at work between real channels and a real server, with `grpc.aio`."""

import grpc
import pytest

from fixtures.grpc_servers import IMPATIENT
from fixtures.shop import UNARY_UNARY
from fixtures.waiting import WAIT_S, aio_wait_until
from rpcwheel.aio import (
    DefaultResponsePolicy,
    FailbackPolicy,
    Kit,
    MethodPolicy,
    RetryPolicy,
    current_deadline,
)
from rpcwheel.errors import FailbackClosed

RETRY = RetryPolicy(retry_on="UNAVAILABLE", backoff=0)
QUICK = FailbackPolicy(retry_on="UNAVAILABLE", backoff=0.01, max_attempts=None)
PATIENT = FailbackPolicy(retry_on="UNAVAILABLE", backoff=60)


def by_interceptors(kit, shop):
    interceptors = kit.client_interceptors()
    return grpc.aio.insecure_channel(shop.target, options=IMPATIENT, interceptors=interceptors)


def in_front(kit, shop):
    return kit.intercept_channel(grpc.aio.insecure_channel(shop.target, options=IMPATIENT))


@pytest.fixture(params=[by_interceptors, in_front])
def through(request):
    """Either way to put a kit before a channel."""
    return request.param


async def test_each_call_has_the_kit_s_deadline_or_its_own_if_that_is_earlier(shop, through):
    async with Kit(timeout=2 * WAIT_S) as kit, through(kit, shop) as channel:
        call = channel.unary_unary(UNARY_UNARY)
        for timeout in (None, WAIT_S, 500.0):
            assert await call(b"a", timeout=timeout) == b"a"
    left = [seen.time_remaining for seen in shop.calls]
    assert all(1.1 * WAIT_S < one < 2.1 * WAIT_S for one in (left[0], left[2]))  # it is rounded up
    assert 0.0 < left[1] < 1.1 * WAIT_S


async def test_a_call_is_made_again_where_its_method_is_idempotent(shop, through):
    methods = {UNARY_UNARY: MethodPolicy(idempotent=True)}
    async with Kit(retry=RETRY, methods=methods) as kit, through(kit, shop) as channel:
        shop.then("UNAVAILABLE", "UNAVAILABLE")
        assert await channel.unary_unary(UNARY_UNARY)(b"a") == b"a"
    assert len(shop.calls) == 3


async def test_a_failsafe_answers_what_has_failed_for_good(shop):
    default_response = DefaultResponsePolicy(on="INTERNAL", default=b"sorry")
    async with Kit(default_response=default_response) as kit, in_front(kit, shop) as channel:
        shop.then("INTERNAL")
        assert await channel.unary_unary(UNARY_UNARY)(b"a") == b"sorry"


async def test_a_call_that_failback_parks_is_delivered_and_counted(shop):
    async with Kit(failback=QUICK) as kit, in_front(kit, shop) as channel:
        shop.then("UNAVAILABLE", "UNAVAILABLE")
        assert await channel.unary_unary(UNARY_UNARY)(b"a") is None
        await aio_wait_until(lambda: kit.pending == 0)
        assert await kit.flush(WAIT_S)
        assert kit.stats()["*"].delivered_later == 1
    assert [seen.requests for seen in shop.calls] == [[b"a"]] * 3


async def test_closing_a_kit_reports_what_was_not_delivered_once(shop):
    kit = Kit(failback=PATIENT)
    async with in_front(kit, shop) as channel:
        call = channel.unary_unary(UNARY_UNARY)
        shop.then("UNAVAILABLE", "UNAVAILABLE")
        assert await call(b"a") is None
        assert kit.pending == 1
        undelivered = await kit.close(drain_timeout=0)
        assert [failed.attempts for failed in undelivered] == [1]
        assert await kit.close() == []
        with pytest.raises(FailbackClosed):
            await call(b"b")
        assert await call(b"c") == b"c"


async def test_leaving_a_kit_delivers_what_waits_and_closes_it(shop):
    kit = Kit(failback=PATIENT)
    async with in_front(kit, shop) as channel:
        call = channel.unary_unary(UNARY_UNARY)
        async with kit:
            shop.then("UNAVAILABLE")
            assert await call(b"a") is None
        assert kit.pending == 0
        assert [seen.requests for seen in shop.calls] == [[b"a"]] * 2
        shop.then("UNAVAILABLE")
        with pytest.raises(FailbackClosed):
            await call(b"b")


async def test_each_channel_of_a_kit_has_its_own_budget_of_retries(shop):
    retry = RetryPolicy(
        retry_on="UNAVAILABLE", backoff=0, max_attempts=2, retry_budget=0.0, min_retries=1
    )
    async with (
        Kit(retry=retry, idempotent=True) as kit,
        in_front(kit, shop) as channel,
        in_front(kit, shop) as another,
    ):
        one, other = (each.unary_unary(UNARY_UNARY) for each in (channel, another))
        shop.then(*["UNAVAILABLE"] * 3)
        with pytest.raises(grpc.RpcError):
            await one(b"a")
        with pytest.raises(grpc.RpcError):  # its one retry is spent
            await one(b"b")
        shop.then("UNAVAILABLE")
        assert await other(b"c") == b"c"
    assert len(shop.calls) == 5


async def test_a_server_passes_on_the_deadline_of_the_call_that_it_serves(shop):
    async with Kit(timeout=2 * WAIT_S) as kit, in_front(kit, shop) as inner:
        onward = inner.unary_unary(UNARY_UNARY)
        seen = []

        async def serve(request, context):
            seen.append(current_deadline())
            return await onward(request)

        server = grpc.aio.server(interceptors=kit.server_interceptors())
        handler = grpc.unary_unary_rpc_method_handler(serve)
        server.add_generic_rpc_handlers(
            [grpc.method_handlers_generic_handler("test.Front", {"Call": handler})]
        )
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=IMPATIENT) as channel:
            assert await channel.unary_unary("/test.Front/Call")(b"a", timeout=WAIT_S) == b"a"
            assert await channel.unary_unary("/test.Front/Call")(b"b") == b"b"
        await server.stop(None)
    assert seen[0].remaining() < 1.1 * WAIT_S
    assert 0 < shop.calls[0].time_remaining < 1.1 * WAIT_S
    assert 1.1 * WAIT_S < shop.calls[1].time_remaining < 2.1 * WAIT_S


async def test_a_kit_s_timer_drives_what_it_does(shop, timer):
    kit = Kit(failback=PATIENT, timer=timer)
    async with in_front(kit, shop) as channel:
        shop.then("UNAVAILABLE")
        assert await channel.unary_unary(UNARY_UNARY)(b"a") is None
        assert timer.pending == 1
        timer.advance(60)
        await aio_wait_until(lambda: kit.pending == 0)
        assert await kit.close() == []
    assert len(shop.calls) == 2
