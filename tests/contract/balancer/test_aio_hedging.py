"""The attempts of a hedged call go to different servers; grpc.aio."""

import asyncio
import socket

import grpc
import pytest

from fixtures.balanced_channels import instance
from fixtures.grpc_servers import IMPATIENT
from fixtures.shop import UNARY_UNARY, Fail, Hang
from fixtures.waiting import WAIT_S, aio_wait_until
from rpcwheel.aio import HedgingPolicy, Kit
from rpcwheel.balancer import BalancerPolicy, subchannels
from rpcwheel.balancer.aio import BalancedChannel

KEY = (("user", "u-1"),)
AT_ONCE = {"delay": 0, "max_attempts": 3}


@pytest.fixture
async def open_channel():
    """Open a balanced channel, and one in front of it whose calls are hedged."""
    made = []

    def open_both(*targets, hedging, **settings):
        settings = {"balancer_policy": BalancerPolicy(pick_timeout=WAIT_S)} | settings
        instances = [instance(one) for one in targets]
        channel = BalancedChannel("test.Shop", instances, options=IMPATIENT, **settings)
        kit = Kit(hedging=HedgingPolicy(retry_budget=None, **hedging), idempotent=True)
        made.extend([channel, kit])
        return channel, kit.intercept_channel(channel)

    yield open_both
    for one in made:
        await one.close()


@pytest.fixture
def patient(monkeypatch):
    """Attempts wait for another server as long as a busy machine takes to connect."""
    monkeypatch.setattr(subchannels, "OTHER_TIMEOUT_S", WAIT_S)


async def connect_all(channel):
    for one in channel.subchannels:
        await asyncio.wait_for(one.channel.channel_ready(), WAIT_S)


def begin(channel):
    return channel.unary_unary(UNARY_UNARY)(b"x", timeout=WAIT_S, metadata=KEY)


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("is_connected", [True, False], ids=["connected", "not connected"])
@pytest.mark.parametrize("lb_policy", ["round_robin", "ring_hash:user"])
async def test_each_attempt_goes_to_another_server_and_the_first_response_wins(
    shops, open_channel, lb_policy, is_connected
):
    channel, hedged = open_channel(*shops, hedging=AT_ONCE, lb_policy=lb_policy)
    if is_connected:
        await connect_all(channel)
    hangs = [Hang(), Hang(), Hang()]
    for shop, hang in zip(shops, hangs, strict=True):
        shop.then(hang)
    call = begin(hedged)
    await aio_wait_until(lambda: all(hang.begun.is_set() for hang in hangs))
    shops[1].calls[0].ended.set()
    assert await call == b"x"
    assert [len(shop.calls) for shop in shops] == [1, 1, 1]
    await aio_wait_until(lambda: all(shop.calls[0].ended.is_set() for shop in shops))  # canceled
    await aio_wait_until(lambda: channel.calls == 0)


async def test_with_one_server_all_attempts_go_there(shops, open_channel):
    shop = shops[0]
    shop.then(Hang(), Hang())
    _, hedged = open_channel(shop, hedging=AT_ONCE)
    assert await begin(hedged) == b"x"
    assert len(shop.calls) == 3


@pytest.mark.usefixtures("patient")
async def test_a_non_fatal_failure_sends_the_next_attempt_to_another_server(shops, open_channel):
    for shop in shops:
        shop.then(Fail("UNAVAILABLE"), b"second")
    hedging = {"delay": 1000, "max_attempts": 3, "non_fatal_codes": {"UNAVAILABLE"}}
    _, hedged = open_channel(*shops, hedging=hedging, lb_policy="ring_hash:user")
    with pytest.raises(grpc.RpcError):
        await begin(hedged)
    assert [len(shop.calls) for shop in shops] == [1, 1, 1]
    assert await begin(hedged) == b"second"


async def test_a_server_that_can_not_be_reached_gets_no_attempt(shops, dead, open_channel):
    shop = shops[0]
    shop.then(Hang())
    _, hedged = open_channel(shop, dead, hedging={"delay": 0, "max_attempts": 2})
    assert await begin(hedged) == b"x"
    assert len(shop.calls) == 2


async def test_an_attempt_waits_for_a_server_that_is_connecting_only_for_a_while(
    shops, open_channel
):
    shop = shops[0]
    with socket.create_server(("127.0.0.1", 0)) as silent:
        targets = [shop, silent.getsockname()[1]]
        channel, hedged = open_channel(*targets, hedging={"delay": 0, "max_attempts": 2})
        ready = next(one for one in channel.subchannels if one.instance.port == shop.port)
        await asyncio.wait_for(ready.channel.channel_ready(), WAIT_S)
        shop.then(Hang())
        assert await begin(hedged) == b"x"
    assert len(shop.calls) == 2


async def test_calls_that_are_not_hedged_go_where_the_picker_says(shops, open_channel):
    channel, _ = open_channel(*shops, hedging=AT_ONCE, lb_policy="ring_hash:user")
    for _ in range(3):
        assert await begin(channel) == b"x"
    assert sorted(len(shop.calls) for shop in shops) == [0, 0, 3]
