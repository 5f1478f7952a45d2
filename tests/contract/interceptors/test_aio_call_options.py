"""`call_options` for calls of `grpc.aio`."""

import asyncio

import grpc
import pytest

from fixtures.aio_policy_channels import refused
from fixtures.shop import UNARY_UNARY
from rpcwheel.aio import call_options


@pytest.fixture
def call(channels):
    return channels.retrying().unary_unary(UNARY_UNARY)


async def test_a_timeout_holds_for_the_calls_of_the_block(shop, call):
    with call_options(timeout=60.0):
        await call(b"")
    await call(b"")
    inside, outside = shop.calls
    assert inside.time_remaining <= 61
    assert outside.time_remaining is None


async def test_none_switches_a_policy_off(shop, call):
    shop.then("UNAVAILABLE")
    with call_options(retry=None):
        error = await refused(call(b""))
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert len(shop.calls) == 1
    shop.then("UNAVAILABLE")
    assert await call(b"x") == b"x"


async def test_a_call_follows_the_options_under_which_it_began(shop, call):
    shop.then("UNAVAILABLE")
    with call_options(retry=None):
        inside = call(b"")
    error = await refused(inside)
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert len(shop.calls) == 1


async def test_tasks_created_in_the_block_have_the_options(shop, call):
    async def ask():
        return await call(b"")

    with call_options(timeout=60.0):
        inside = asyncio.ensure_future(ask())
    outside = asyncio.ensure_future(ask())
    await asyncio.gather(inside, outside)
    limits = sorted((seen.time_remaining or 0.0) > 0.0 for seen in shop.calls)
    assert limits == [False, True]
