"""A held call that may wait for a connection waits for any, and no key strands it."""

import threading
import time

import grpc
import pytest

from fixtures.clusters import instance
from fixtures.shop import UNARY_STREAM, UNARY_UNARY, Fail, Shop
from fixtures.waiting import WAIT_S, wait_until
from rpcwheel.cluster import ClusterPolicy, ConsistentHash
from rpcwheel.cluster._journey import PATIENCE_S

BOTH = pytest.mark.parametrize("name", ["future", "stream"])


def begin(channel, name, **options):
    options = {"timeout": 20, "wait_for_ready": True} | options
    if name == "future":
        return channel.unary_unary(UNARY_UNARY).future(b"ab", **options)
    return channel.unary_stream(UNARY_STREAM)(b"ab", **options)


def answer(call, name):
    return call.result(20) if name == "future" else b"".join(call)


@BOTH
@pytest.mark.parametrize("timeout", [20, None])
def test_it_does_not_wait_at_a_member_that_is_away(shops, dead, open_cluster, name, timeout):
    for _ in range(3):
        channel = open_cluster(dead, shops[0])
        calls = [begin(channel, name, timeout=timeout) for _ in range(2)]
        assert [answer(call, name) for call in calls] == [b"ab", b"ab"]


@BOTH
@pytest.mark.parametrize("timeout", [20, None])
def test_it_waits_for_the_first_who_is_there(dead, open_cluster, name, timeout):
    shop = Shop()
    shop.kill()
    channel = open_cluster(dead, shop, policy=ClusterPolicy(probe=0.02), timer=None)
    call = begin(channel, name, timeout=timeout)
    assert wait_until(lambda: channel._fleet.roster.all_down)
    shop.start()
    assert answer(call, name) == b"ab"
    shop.kill()


def call_of(channel):
    return tuple(channel._fleet.waiting)


@BOTH
def test_it_tries_again_though_all_are_down_still(open_cluster, timer, name):
    shop = Shop()
    shop.kill()
    channel = open_cluster(shop, policy=ClusterPolicy(probe=1e6))
    call = begin(channel, name)
    assert wait_until(lambda: call_of(channel) and timer.pending == 2)
    shop.start()

    def is_called():
        timer.advance(PATIENCE_S)
        return shop.calls

    assert wait_until(is_called)
    assert answer(call, name) == b"ab"
    shop.kill()


@BOTH
def test_it_waits_on_where_the_last_instance_has_gone_meanwhile(
    shops, dead, open_cluster, timer, name
):
    channel = open_cluster(dead, policy=ClusterPolicy(probe=3600.0))
    call = begin(channel, name, timeout=None)
    assert wait_until(lambda: call_of(channel) and timer.pending == 2)
    channel.update([])
    for _ in range(3):
        timer.advance(PATIENCE_S)
    assert not call.done()
    channel.update([instance(shops[0])])
    assert answer(call, name) == b"ab"


@BOTH
def test_its_deadline_ends_the_wait(dead, open_cluster, name):
    began = time.monotonic()
    call = begin(open_cluster(dead, timer=None), name, timeout=0.4)
    assert call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert "refused" in call.details()
    assert time.monotonic() - began >= 0.39


PATIENT = {"timeout": 0.3, "wait_for_ready": True}
STYLES = {
    "future": lambda channel, made: (
        channel.unary_unary(UNARY_UNARY, made).future(b"x", **PATIENT).result(20)
    ),
    "stream": lambda channel, made: next(channel.unary_stream(UNARY_STREAM, made)(b"x", **PATIENT)),
    "unary": lambda channel, made: channel.unary_unary(UNARY_UNARY, made)(b"x", **PATIENT),
}


@pytest.mark.parametrize("style", STYLES.values(), ids=STYLES.keys())
def test_it_is_tried_no_more_once_its_time_is_over(dead, open_cluster, style):
    channel = open_cluster(dead, timer=None, policy=ClusterPolicy(probe=3600.0))
    tried = []

    def serialized(request):  # for each try
        tried.append(request)
        return request

    with pytest.raises(grpc.RpcError) as caught:
        style(channel, serialized)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert len(tried) == 1


@BOTH
def test_it_can_be_cancelled_while_it_waits_for_who_is_down(dead, open_cluster, timer, name):
    channel = open_cluster(dead, policy=ClusterPolicy(probe=3600.0))
    call = begin(channel, name)
    assert wait_until(lambda: call_of(channel) and timer.pending == 2)
    assert call.cancel()
    assert call.code() is grpc.StatusCode.CANCELLED
    assert (call_of(channel), timer.pending) == ((), 1)


@BOTH
def test_what_a_server_says_is_not_waited_away(shops, open_cluster, name):
    shops[0].then(Fail("UNAVAILABLE", "my database is away"))
    call = begin(open_cluster(shops[0]), name)
    assert call.details() == "my database is away"
    assert len(shops[0].calls) == 1


# A key that can't be found


ERRORS = {"key": KeyError, "value": ValueError}


def key(method, request, metadata):
    if metadata:
        raise ERRORS[metadata[0][0]]("no user")
    return request


@BOTH
@pytest.mark.parametrize("kind", ["key", "value"])
def test_what_a_key_raises_is_the_callers_and_holds_up_nobody(
    shops, open_cluster, timer, name, kind
):
    channel = open_cluster(balance=ConsistentHash(key), policy=ClusterPolicy(wait=3600))
    bad = begin(channel, name, metadata=((kind, "x"),))
    good = begin(channel, name, timeout=None)
    channel.update([instance(shops[0])])
    assert answer(good, name) == b"ab"
    with pytest.raises(ERRORS[kind], match="no user"):
        answer(bad, name)
    assert bad.code() is grpc.StatusCode.INTERNAL
    assert timer.pending == 0


def test_a_key_is_not_looked_for_under_the_lock_of_the_channel(shops, open_cluster):
    free = []

    def look(*_):
        thread = threading.Thread(target=lambda: free.append(channel.pick(0) == ()))
        thread.start()
        thread.join(20)
        return "k"

    channel = open_cluster(balance=ConsistentHash(look), policy=ClusterPolicy(wait=3600))
    held = channel.unary_unary(UNARY_UNARY).future(b"x", timeout=WAIT_S)
    got = []
    waits = threading.Thread(
        target=lambda: got.append(channel.unary_unary(UNARY_UNARY)(b"y", timeout=WAIT_S))
    )
    waits.start()
    channel.update([instance(shops[0])])
    assert held.result(20) == b"x"
    waits.join(20)
    assert got == [b"y"]
    assert free
    assert all(free)


def test_callbacks_that_hang_hold_up_no_thread_each(open_cluster):
    channel = open_cluster(policy=ClusterPolicy(wait=3600))
    go_on = threading.Event()
    calls = [begin(channel, "future", wait_for_ready=False) for _ in range(40)]
    told = []
    for call in calls:
        call.add_done_callback(lambda one: told.append(one) or go_on.wait(20))
    channel.fail("the registry is away")
    assert wait_until(lambda: told)
    assert len({call._course._hooks_key for call in calls}) == 1  # or each would have a thread
    go_on.set()
    assert wait_until(lambda: len(told) == 40)
