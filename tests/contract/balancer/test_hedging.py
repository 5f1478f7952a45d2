"""The attempts of a hedged call go to different servers."""

import socket
import threading

import grpc
import pytest

from fixtures.balanced_channels import instance
from fixtures.grpc_servers import IMPATIENT
from fixtures.shop import UNARY_UNARY, Fail, Hang
from fixtures.waiting import WAIT_S, wait_until
from rpcwheel import HedgingPolicy, Kit
from rpcwheel.balancer import BalancedChannel, BalancerPolicy, subchannels

KEY = (("user", "u-1"),)
AT_ONCE = {"delay": 0, "max_attempts": 3}


@pytest.fixture
def open_channel():
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
        one.close()


@pytest.fixture
def patient(monkeypatch):
    """Attempts wait for another server as long as a busy machine takes to connect."""
    monkeypatch.setattr(subchannels, "OTHER_TIMEOUT_S", WAIT_S)


def connect_all(channel):
    for one in channel.subchannels:
        one.channel.get_state(try_to_connect=True)
    wait_until(lambda: all(one.is_ready() for one in channel.subchannels))


def block(channel):
    return channel.unary_unary(UNARY_UNARY)(b"x", timeout=WAIT_S, metadata=KEY)


def await_future(channel):
    return channel.unary_unary(UNARY_UNARY).future(b"x", timeout=WAIT_S, metadata=KEY).result()


each_style = pytest.mark.parametrize("call", [block, await_future])


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize(
    ("lb_policy", "is_connected", "call"),
    [
        ("round_robin", True, block),
        ("round_robin", False, await_future),
        ("ring_hash:user", True, await_future),
        ("ring_hash:user", False, await_future),
    ],
)
def test_each_attempt_goes_to_another_server_and_the_first_response_wins(
    shops, open_channel, lb_policy, is_connected, call
):
    channel, hedged = open_channel(*shops, hedging=AT_ONCE, lb_policy=lb_policy)
    if is_connected:
        connect_all(channel)
    hangs = [Hang(), Hang(), Hang()]
    for shop, hang in zip(shops, hangs, strict=True):
        shop.then(hang)

    def answer_one():
        assert all(hang.begun.wait(WAIT_S) for hang in hangs)
        shops[1].calls[0].ended.set()

    answering = threading.Thread(target=answer_one)
    answering.start()
    assert call(hedged) == b"x"
    answering.join()
    assert [len(shop.calls) for shop in shops] == [1, 1, 1]
    assert all(shop.calls[0].ended.wait(WAIT_S) for shop in shops)  # canceled
    wait_until(lambda: channel.calls == 0)


@each_style
def test_with_one_server_all_attempts_go_there(shops, open_channel, call):
    shop = shops[0]
    shop.then(Hang(), Hang())
    _, hedged = open_channel(shop, hedging=AT_ONCE)
    assert call(hedged) == b"x"
    assert len(shop.calls) == 3


@each_style
@pytest.mark.usefixtures("patient")
def test_a_non_fatal_failure_sends_the_next_attempt_to_another_server(shops, open_channel, call):
    for shop in shops:
        shop.then(Fail("UNAVAILABLE"), b"second")
    hedging = {"delay": 1000, "max_attempts": 3, "non_fatal_codes": {"UNAVAILABLE"}}
    _, hedged = open_channel(*shops, hedging=hedging, lb_policy="ring_hash:user")
    with pytest.raises(grpc.RpcError):
        call(hedged)
    assert [len(shop.calls) for shop in shops] == [1, 1, 1]
    assert call(hedged) == b"second"


@each_style
def test_a_server_that_can_not_be_reached_gets_no_attempt(shops, dead, open_channel, call):
    shop = shops[0]
    shop.then(Hang())
    _, hedged = open_channel(shop, dead, hedging={"delay": 0, "max_attempts": 2})
    assert call(hedged) == b"x"
    assert len(shop.calls) == 2


@each_style
def test_an_attempt_waits_for_a_server_that_is_connecting_only_for_a_while(
    shops, open_channel, call
):
    shop = shops[0]
    with socket.create_server(("127.0.0.1", 0)) as silent:
        targets = [shop, silent.getsockname()[1]]
        channel, hedged = open_channel(*targets, hedging={"delay": 0, "max_attempts": 2})
        ready = next(one for one in channel.subchannels if one.instance.port == shop.port)
        ready.channel.get_state(try_to_connect=True)
        wait_until(ready.is_ready)
        shop.then(Hang())
        assert call(hedged) == b"x"
    assert len(shop.calls) == 2


def test_calls_that_are_not_hedged_go_where_the_picker_says(shops, open_channel):
    channel, _ = open_channel(*shops, hedging=AT_ONCE, lb_policy="ring_hash:user")
    for _ in range(3):
        assert block(channel) == b"x"
    assert sorted(len(shop.calls) for shop in shops) == [0, 0, 3]
