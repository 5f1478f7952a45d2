"""A forked call goes past those that are away, and waits for one of them if it may."""

import threading
import time

import grpc
import pytest

from fixtures.clusters import instance
from fixtures.shop import UNARY_UNARY, Fail, Shop
from fixtures.waiting import WAIT_S
from rpcwheel.cluster import BroadcastFailed, BroadcastInvoker, ClusterPolicy, ForkingInvoker


def forked(channel, forks=1):
    return ForkingInvoker(channel, forks).unary_unary(UNARY_UNARY)


def test_one_that_may_wait_does_not_wait_at_a_member_that_is_away(shops, dead, open_cluster):
    channel = open_cluster(dead, shops[0])
    for _ in range(3):
        assert forked(channel)(b"x", timeout=WAIT_S, wait_for_ready=True) == b"x"


@pytest.mark.parametrize("forks", [1, 2])
def test_one_that_may_wait_waits_for_the_first_who_is_there(dead, open_cluster, forks):
    shop = Shop()
    shop.kill()
    channel = open_cluster(dead, shop, policy=ClusterPolicy(probe=0.02), timer=None)
    later = threading.Timer(0.3, shop.start)
    later.start()
    assert forked(channel, forks)(b"x", timeout=WAIT_S, wait_for_ready=True) == b"x"
    later.join()
    shop.kill()


def test_its_deadline_ends_the_wait(dead, open_cluster):
    method, began = forked(open_cluster(dead)), time.monotonic()
    with pytest.raises(grpc.RpcError) as caught:
        method(b"x", timeout=0.4, wait_for_ready=True)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert time.monotonic() - began >= 0.39


def test_a_failure_of_a_server_is_not_waited_away(shops, open_cluster):
    channel = open_cluster(shops[0])
    shops[0].then(Fail("UNAVAILABLE", "my database is away"))
    with pytest.raises(grpc.RpcError) as caught:
        forked(channel)(b"x", timeout=WAIT_S, wait_for_ready=True)
    assert caught.value.details() == "my database is away"
    assert len(shops[0].calls) == 1


def test_who_can_not_be_connected_is_gone_past_or_one_of_the_failures(shops, open_cluster, events):
    def connect(one, options):
        if one.id == "a":
            raise RuntimeError("no certificate")
        return grpc.insecure_channel(one.target, options)

    channel = open_cluster(connect=connect)
    channel.update([instance(1, id="a"), instance(shops[0], id="b")])
    with pytest.raises(BroadcastFailed, match="no certificate") as caught:
        BroadcastInvoker(channel).unary_unary(UNARY_UNARY)(b"x", timeout=WAIT_S)
    assert caught.value.answers == {shops[0].target: b"x"}
    assert forked(channel, 2)(b"x", timeout=WAIT_S) == b"x"
    assert [event.reason for event in events] == ["connect: RuntimeError('no certificate')"]
