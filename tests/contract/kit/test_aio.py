"""A kit of `grpc.aio` in calls to a real server."""

import grpc
import pytest

from fixtures.grpc_servers import IMPATIENT
from fixtures.shop import SERVICE, UNARY_UNARY
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
SERVICE_CONFIG = {
    "methodConfig": [
        {
            "name": [{"service": SERVICE}],
            "timeout": "60s",
            "retryPolicy": {
                "maxAttempts": 4,
                "initialBackoff": "0.001s",
                "maxBackoff": "0.01s",
                "backoffMultiplier": 2,
                "retryableStatusCodes": ["UNAVAILABLE"],
            },
        }
    ]
}
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


async def test_the_deadline_is_the_earlier_of_policy_and_caller(shop, through):
    async with Kit(timeout=2 * WAIT_S) as kit, through(kit, shop) as channel:
        call = channel.unary_unary(UNARY_UNARY)
        for timeout in (None, WAIT_S, 500.0):
            assert await call(b"a", timeout=timeout) == b"a"
    left = [seen.time_remaining for seen in shop.calls]
    assert all(1.1 * WAIT_S < one < 2.1 * WAIT_S for one in (left[0], left[2]))  # it is rounded up
    assert 0.0 < left[1] < 1.1 * WAIT_S


async def test_calls_of_idempotent_methods_are_retried(shop, through):
    methods = {UNARY_UNARY: MethodPolicy(idempotent=True)}
    async with Kit(retry=RETRY, methods=methods) as kit, through(kit, shop) as channel:
        shop.then("UNAVAILABLE", "UNAVAILABLE")
        assert await channel.unary_unary(UNARY_UNARY)(b"a") == b"a"
    assert len(shop.calls) == 3


async def test_calls_are_retried_as_a_service_config_says(shop):
    async with Kit.from_service_config(SERVICE_CONFIG) as kit, in_front(kit, shop) as channel:
        shop.then("UNAVAILABLE", "UNAVAILABLE")
        assert await channel.unary_unary(UNARY_UNARY)(b"a") == b"a"
    assert len(shop.calls) == 3


async def test_a_failed_call_gets_the_default_response(shop):
    default_response = DefaultResponsePolicy(on="INTERNAL", default=b"sorry")
    async with Kit(default_response=default_response) as kit, in_front(kit, shop) as channel:
        shop.then("INTERNAL")
        assert await channel.unary_unary(UNARY_UNARY)(b"a") == b"sorry"


async def test_a_queued_call_is_delivered_and_counted(shop):
    async with Kit(failback=QUICK) as kit, in_front(kit, shop) as channel:
        shop.then("UNAVAILABLE", "UNAVAILABLE")
        assert await channel.unary_unary(UNARY_UNARY)(b"a") is None
        await aio_wait_until(lambda: kit.pending == 0)
        assert await kit.flush(WAIT_S)
        assert kit.stats()["*"].redelivered == 1
    assert [seen.requests for seen in shop.calls] == [[b"a"]] * 3


async def test_close_returns_undelivered_calls_once(shop):
    kit = Kit(failback=PATIENT)
    async with in_front(kit, shop) as channel:
        call = channel.unary_unary(UNARY_UNARY)
        shop.then("UNAVAILABLE", "UNAVAILABLE")
        assert await call(b"a") is None
        assert kit.pending == 1
        assert [entry.function for entry in kit.entries()["*"]] == [UNARY_UNARY]
        undelivered = await kit.close(drain_timeout=0)
        assert [failed.attempts for failed in undelivered] == [1]
        assert await kit.close() == []
        with pytest.raises(FailbackClosed):
            await call(b"b")
        assert await call(b"c") == b"c"


async def test_the_end_of_the_with_block_delivers_queued_calls_and_closes(shop):
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


async def test_a_handler_propagates_its_deadline(shop):
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
