"""A kit made of gRPC's service config, at work between real channels and a real server."""

import json
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

import rpcwheel
import rpcwheel.aio
from fixtures.grpc_servers import IMPATIENT
from fixtures.shop import UNARY_UNARY, Hang
from fixtures.waiting import WAIT_S

_, SERVICE, METHOD = UNARY_UNARY.split("/")
RETRY = {
    "maxAttempts": 4,
    "initialBackoff": "0.001s",
    "maxBackoff": "0.01s",
    "backoffMultiplier": 2,
    "retryableStatusCodes": ["UNAVAILABLE"],
}


def config(throttling=None, **entry):
    name = {"service": SERVICE, "method": METHOD}
    return json.dumps({"methodConfig": [{"name": [name]} | entry], "retryThrottling": throttling})


class SyncWorld:
    """Calls through a channel of `grpc` that a kit intercepts."""

    async def outcome(self, shop, text, *, before=None):
        """The response of a call, or the name of its status code."""
        with (
            ThreadPoolExecutor(1) as pool,
            rpcwheel.Kit.from_service_config(text) as kit,
            grpc.insecure_channel(shop.target, options=IMPATIENT) as channel,
        ):
            call = kit.intercept_channel(channel).unary_unary(UNARY_UNARY)
            if before is not None:
                with pytest.raises(grpc.RpcError):
                    channel.unary_unary(UNARY_UNARY)(b"a", timeout=WAIT_S)
            future = pool.submit(call, b"a")
            if before is not None:
                before()
            try:
                return future.result(WAIT_S)
            except grpc.RpcError as error:
                return error.code().name


class AioWorld:
    """Calls through a channel of `grpc.aio` that a kit intercepts."""

    async def outcome(self, shop, text, *, before=None):
        async with (
            rpcwheel.aio.Kit.from_service_config(text) as kit,
            grpc.aio.insecure_channel(shop.target, options=IMPATIENT) as channel,
        ):
            if before is not None:
                with pytest.raises(grpc.RpcError):
                    await channel.unary_unary(UNARY_UNARY)(b"a", timeout=WAIT_S)
            call = kit.intercept_channel(channel).unary_unary(UNARY_UNARY)(b"a")
            if before is not None:
                before()
            try:
                return await call
            except grpc.RpcError as error:
                return error.code().name


@pytest.fixture(params=[SyncWorld, AioWorld], ids=["sync", "aio"])
def world(request):
    return request.param()


async def test_a_call_is_retried_as_the_retry_policy_says(shop, world):
    shop.then("UNAVAILABLE", "UNAVAILABLE")
    assert await world.outcome(shop, config(retryPolicy=RETRY)) == b"a"
    assert len(shop.calls) == 3


async def test_a_call_is_not_retried_after_other_codes_or_more_attempts(shop, world):
    shop.then("INTERNAL")
    assert await world.outcome(shop, config(retryPolicy=RETRY)) == "INTERNAL"
    assert len(shop.calls) == 1
    shop.then(*["UNAVAILABLE"] * 9)
    assert await world.outcome(shop, config(retryPolicy=RETRY)) == "UNAVAILABLE"
    assert len(shop.calls) == 1 + 4


async def test_throttling_ends_the_retries_when_half_of_the_tokens_are_gone(shop, world):
    shop.then(*["UNAVAILABLE"] * 9)
    text = config(retryPolicy=RETRY, throttling={"maxTokens": 4, "tokenRatio": 0.1})
    assert await world.outcome(shop, text) == "UNAVAILABLE"
    assert len(shop.calls) == 2


async def test_a_call_ends_after_the_timeout(shop, world):
    shop.then(Hang())
    assert await world.outcome(shop, config(timeout="0.2s")) == "DEADLINE_EXCEEDED"


async def test_a_call_is_hedged_as_the_hedging_policy_says(shop, world):
    shop.then(Hang())
    hedging = {"maxAttempts": 2, "hedgingDelay": "0.05s"}
    assert await world.outcome(shop, config(hedgingPolicy=hedging, timeout="60s")) == b"a"
    assert len(shop.calls) == 2


async def test_a_call_waits_for_a_connection_where_the_entry_says_so(shop, world):
    shop.kill()
    assert await world.outcome(shop, config(waitForReady=True), before=shop.start) == b"a"


async def test_a_call_without_an_entry_of_its_own_fails_at_once(shop, world):
    shop.kill()
    assert await world.outcome(shop, config(timeout="60s")) == "UNAVAILABLE"
