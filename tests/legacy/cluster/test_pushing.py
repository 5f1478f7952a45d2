"""A call with a stream of requests is begun where it can be sent, and loses none of them."""

import threading
import time

import grpc
import pytest

from fixtures.clusters import instance
from fixtures.shop import STREAM_STREAM, STREAM_UNARY, UNARY_UNARY, Shop
from fixtures.waiting import WAIT_S, wait_until
from rpcwheel.cluster import ClusterPolicy, Picker


class First(Picker):
    """Always the first one."""

    def prepare(self, members, weights):
        return lambda *_: members[0]


def requests():
    return iter([b"a", b"b"])


PUSHED = {
    "blocking": lambda channel, **options: channel.stream_unary(STREAM_UNARY)(
        requests(), **options
    ),
    "with_call": lambda channel, **options: channel.stream_unary(STREAM_UNARY).with_call(
        requests(), **options
    )[0],
    "future": lambda channel, **options: (
        channel.stream_unary(STREAM_UNARY).future(requests(), **options).result()
    ),
    "both": lambda channel, **options: b"".join(
        channel.stream_stream(STREAM_STREAM)(requests(), **options)
    ),
}
EACH = pytest.mark.parametrize("name", PUSHED)


@EACH
def test_one_that_may_wait_does_not_wait_at_a_member_that_is_away(shops, dead, open_cluster, name):
    channel = open_cluster(balance=First())
    channel.update([instance(dead, id="a"), instance(shops[0], id="b")])
    assert PUSHED[name](channel, timeout=WAIT_S, wait_for_ready=True) == b"ab"
    assert shops[0].calls[-1].requests == [b"a", b"b"]


@EACH
def test_one_that_may_wait_waits_for_the_first_who_is_there(dead, open_cluster, name):
    shop = Shop()
    shop.kill()
    channel = open_cluster(dead, shop, policy=ClusterPolicy(probe=0.02), timer=None)
    later = threading.Timer(0.3, shop.start)
    later.start()
    assert PUSHED[name](channel, timeout=WAIT_S, wait_for_ready=True) == b"ab"
    later.join()
    shop.kill()


@EACH
def test_its_deadline_ends_the_wait(dead, open_cluster, name):
    channel = open_cluster(dead, timer=None)
    began = time.monotonic()
    with pytest.raises(grpc.RpcError) as caught:
        PUSHED[name](channel, timeout=0.4, wait_for_ready=True)
    assert caught.value.code().name in {"DEADLINE_EXCEEDED", "UNAVAILABLE"}
    assert time.monotonic() - began >= 0.39


@EACH
def test_one_that_may_wait_is_refused_by_a_channel_that_is_closed(open_cluster, name):
    channel = open_cluster()
    channel.close()
    with pytest.raises(ValueError, match="closed channel"):
        PUSHED[name](channel, timeout=WAIT_S, wait_for_ready=True)


@EACH
def test_who_has_lost_its_connection_is_passed_over(open_cluster, name):
    shops = [Shop(), Shop()]
    channel = open_cluster(*shops, balance="round_robin")
    method = channel.unary_unary(UNARY_UNARY)
    for _ in range(2):
        method(b"x", timeout=WAIT_S)
    shops[0].kill()
    gone = next(one for one in channel.members if one.instance.port == shops[0].port)
    assert wait_until(lambda: gone.channel.get_state() is grpc.ChannelConnectivity.IDLE)
    assert [PUSHED[name](channel, timeout=WAIT_S) for _ in range(4)] == [b"ab"] * 4
    shops[1].kill()


@EACH
@pytest.mark.parametrize("patient", [False, True])
def test_who_can_not_be_connected_is_passed_over(shops, open_cluster, name, patient):
    def connect(one, options):
        if one.id == "a":
            raise RuntimeError("no certificate")
        return grpc.insecure_channel(one.target, options)

    channel = open_cluster(balance=First(), connect=connect)
    channel.update([instance(1, id="a"), instance(shops[0], id="b")])
    assert PUSHED[name](channel, timeout=WAIT_S, wait_for_ready=patient) == b"ab"
    channel.update([instance(1, id="a")])
    with pytest.raises(RuntimeError, match="no certificate"):
        PUSHED[name](channel, timeout=WAIT_S, wait_for_ready=patient)
