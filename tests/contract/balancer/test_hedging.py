"""The attempts of a hedged call go to different servers."""

import socket

import grpc
import pytest

from fixtures.balanced_channels import (
    blocking,
    by_an_object,
    connect,
    counts,
    hang_all,
    in_front_of,
)
from fixtures.shop import Fail, Hang
from fixtures.waiting import WAIT_S, in_thread, wait_until
from rpcwheel import HedgingPolicy

AT_ONCE = {"delay": 0, "max_attempts": 3}


@pytest.fixture
def open_hedged(world, open_balanced):
    """Opens a balanced channel, and one in front of it whose calls are hedged."""

    def open_both(*targets, hedging=AT_ONCE, **settings):
        channel = open_balanced(*targets, **settings)
        policy = HedgingPolicy(retry_budget=None, **hedging)
        return channel, in_front_of(world, channel, hedging=policy, idempotent=True)

    return open_both


@pytest.fixture
def patient(set_limit):
    """Attempts wait for another server as long as a busy machine takes to connect."""
    set_limit("balancer.subchannels.OTHER_TIMEOUT_S", WAIT_S)


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize(
    ("lb_policy", "connected", "call"),
    [
        ("round_robin", True, blocking),
        ("round_robin", False, by_an_object),
        ("ring_hash:user", True, by_an_object),
        ("ring_hash:user", False, blocking),
    ],
)
def test_each_attempt_goes_to_another_server_and_the_first_response_wins(
    world, shops, open_hedged, lb_policy, connected, call
):
    channel, hedged = open_hedged(*shops, lb_policy=lb_policy)
    if connected:
        connect(world, channel)
    hangs = hang_all(shops)
    waiting = in_thread(call, world, hedged)
    assert all(hang.begun.wait(WAIT_S) for hang in hangs)
    shops[1].calls[0].ended.set()
    assert waiting.result(WAIT_S) == b"x"
    assert counts(shops) == [1, 1, 1]
    assert all(shop.calls[0].ended.wait(WAIT_S) for shop in shops)  # canceled
    assert wait_until(lambda: channel.calls == 0)


@pytest.mark.usefixtures("patient")
def test_a_non_fatal_failure_sends_the_next_attempt_to_another_server(world, shops, open_hedged):
    for shop in shops:
        shop.then(Fail("UNAVAILABLE"), b"second")
    hedging = {"delay": 1000, "max_attempts": 3, "non_fatal_codes": {"UNAVAILABLE"}}
    _, hedged = open_hedged(*shops, hedging=hedging, lb_policy="ring_hash:user")
    with pytest.raises(grpc.RpcError):
        blocking(world, hedged)
    assert counts(shops) == [1, 1, 1]
    assert blocking(world, hedged) == b"second"


def test_an_attempt_waits_for_a_server_that_is_connecting_only_for_a_while(
    world, shops, open_hedged, set_limit
):
    set_limit("balancer.subchannels.OTHER_TIMEOUT_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        targets = [shops[0], silent.getsockname()[1]]
        channel, hedged = open_hedged(*targets, hedging={"delay": 0, "max_attempts": 2})
        connect(world, channel, shops[0])
        shops[0].then(Hang())
        assert blocking(world, hedged) == b"x"
    assert len(shops[0].calls) == 2
