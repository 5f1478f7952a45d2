"""A call finds its member; one that a member did not get goes to another, and no other does."""

import contextlib
import socket
import threading
import time

import grpc
import pytest

from fixtures.clusters import instance
from fixtures.shop import (
    STREAM_STREAM,
    STREAM_UNARY,
    UNARY_STREAM,
    UNARY_UNARY,
    Fail,
    Hang,
    Shop,
)
from fixtures.waiting import WAIT_S, wait_until
from rpcwheel._grpc.calls import EndedCall
from rpcwheel.cluster import ClusterPolicy, ConsistentHash

SHORT = ClusterPolicy(wait=0.05)

HELD = {
    "future": lambda channel: (
        channel.unary_unary(UNARY_UNARY).future(b"ab", timeout=WAIT_S).result()
    ),
    "pulled": lambda channel: b"".join(channel.unary_stream(UNARY_STREAM)(b"ab", timeout=WAIT_S)),
    "pushed future": lambda channel: (
        channel.stream_unary(STREAM_UNARY).future(iter([b"a", b"b"]), timeout=WAIT_S).result()
    ),
    "both": lambda channel: b"".join(
        channel.stream_stream(STREAM_STREAM)(iter([b"a", b"b"]), timeout=WAIT_S)
    ),
}
WAITED = {
    "unary": lambda channel: channel.unary_unary(UNARY_UNARY)(b"ab", timeout=WAIT_S),
    "unary with_call": lambda channel: channel.unary_unary(UNARY_UNARY).with_call(
        b"ab", timeout=WAIT_S
    )[0],
    "pushed": lambda channel: channel.stream_unary(STREAM_UNARY)(
        iter([b"a", b"b"]), timeout=WAIT_S
    ),
    "pushed with_call": lambda channel: channel.stream_unary(STREAM_UNARY).with_call(
        iter([b"a", b"b"]), timeout=WAIT_S
    )[0],
}
EVERY = HELD | WAITED


def failure(begin):
    with pytest.raises(grpc.RpcError) as caught:
        begin()
    return caught.value.code().name, caught.value.details()


# Before anything is known


@pytest.mark.parametrize("name", EVERY)
def test_a_call_waits_until_it_is_known_which_members_there_are(shops, open_cluster, name):
    channel = open_cluster()
    teller = threading.Timer(0.05, lambda: channel.update([instance(shops[0])]))
    teller.start()
    assert EVERY[name](channel) == b"ab"
    teller.join()


@pytest.mark.parametrize("name", EVERY)
def test_it_does_not_wait_for_long(open_cluster, name):
    channel = open_cluster(policy=SHORT, timer=None)
    assert failure(lambda: EVERY[name](channel)) == (
        "UNAVAILABLE",
        "no instance of test.Shop is known yet",
    )


@pytest.mark.parametrize("name", EVERY)
def test_it_ends_at_once_if_nothing_can_be_known(open_cluster, name):
    channel = open_cluster(policy=ClusterPolicy(wait=3600))
    threading.Timer(0.05, lambda: channel.fail("the registry is away")).start()
    assert failure(lambda: EVERY[name](channel)) == (
        "UNAVAILABLE",
        "no instance of test.Shop is known: the registry is away",
    )


def test_its_own_deadline_ends_the_wait(open_cluster):
    channel = open_cluster(policy=ClusterPolicy(wait=3600))
    method = channel.unary_unary(UNARY_UNARY)
    assert failure(lambda: method(b"x", timeout=0.05))[0] == "DEADLINE_EXCEEDED"


def test_the_time_that_it_waited_is_taken_from_its_timeout(shops, open_cluster):
    channel = open_cluster()
    threading.Timer(0.5, lambda: channel.update([instance(shops[0])])).start()
    channel.unary_unary(UNARY_UNARY)(b"x", timeout=WAIT_S)
    assert shops[0].calls[0].time_remaining <= 19.6


@pytest.mark.parametrize("name", EVERY)
def test_without_instances_calls_end_at_once(open_cluster, name):
    channel = open_cluster(policy=ClusterPolicy(wait=3600))
    channel.update([])
    assert failure(lambda: EVERY[name](channel)) == (
        "UNAVAILABLE",
        "no instance of test.Shop is known",
    )


def test_calls_that_wait_to_be_ready_wait_for_an_instance(shops, open_cluster):
    channel = open_cluster(policy=SHORT)
    channel.update([])
    method = channel.unary_unary(UNARY_UNARY)
    until = time.monotonic() + 0.2
    assert failure(lambda: method(b"x", timeout=0.2, wait_for_ready=True)) == (
        "DEADLINE_EXCEEDED",
        "no instance of test.Shop is known",
    )
    assert time.monotonic() >= until - 0.01
    threading.Timer(0.1, lambda: channel.update([instance(shops[0])])).start()
    assert method(b"x", timeout=WAIT_S, wait_for_ready=True) == b"x"


@pytest.mark.parametrize("name", EVERY)
def test_on_a_closed_channel_calls_raise_as_on_one_of_grpc(open_cluster, name):
    channel = open_cluster()
    channel.close()
    with pytest.raises(ValueError, match="Cannot invoke RPC on closed channel"):
        EVERY[name](channel)


def test_who_waits_is_told_when_the_channel_is_closed(open_cluster):
    channel = open_cluster(policy=ClusterPolicy(wait=3600))
    threading.Timer(0.05, channel.close).start()
    with pytest.raises(ValueError, match="closed channel"):
        channel.unary_unary(UNARY_UNARY)(b"x", timeout=WAIT_S)


# Another member


@pytest.mark.parametrize("name", EVERY)
def test_nobody_sees_that_a_member_is_away_once_it_is_known(shops, dead, open_cluster, name):
    channel = open_cluster(dead, shops[0])
    method = channel.unary_unary(UNARY_UNARY)
    method(b"x", timeout=WAIT_S), method(b"x", timeout=WAIT_S)
    assert [EVERY[name](channel) for _ in range(4)] == [b"ab"] * 4


@pytest.mark.parametrize("name", ["unary", "unary with_call"])
def test_nobody_sees_that_a_member_was_never_there(shops, dead, open_cluster, name):
    for _ in range(5):
        channel = open_cluster(dead, shops[0])
        assert [EVERY[name](channel) for _ in range(3)] == [b"ab"] * 3


@pytest.mark.parametrize("name", EVERY)
def test_nobody_sees_that_a_member_has_died_since(open_cluster, name):
    shops = [Shop(), Shop()]
    channel = open_cluster(*shops)
    for _ in range(2):
        assert EVERY[name](channel) == b"ab"
    shops[0].kill()
    gone = next(one for one in channel.members if one.instance.port == shops[0].port)
    assert wait_until(lambda: gone.channel.get_state() is not grpc.ChannelConnectivity.READY)
    method = channel.unary_unary(UNARY_UNARY)
    assert [method(b"x", timeout=WAIT_S) for _ in range(4)] == [b"x"] * 4
    assert gone.state == "DOWN"
    assert [EVERY[name](channel) for _ in range(4)] == [b"ab"] * 4
    shops[1].kill()


@pytest.mark.parametrize("name", ["pushed", "pushed with_call", "pushed future", "both"])
def test_a_stream_of_requests_is_not_begun_where_there_is_no_connection(open_cluster, name):
    shops = [Shop(), Shop()]
    channel = open_cluster(*shops)
    for _ in range(2):
        assert EVERY[name](channel) == b"ab"
    shops[0].kill()
    gone = next(one for one in channel.members if one.instance.port == shops[0].port)
    failing = grpc.ChannelConnectivity.TRANSIENT_FAILURE
    assert wait_until(lambda: gone.channel.get_state(try_to_connect=True) is failing)
    assert gone.state == "UP"  # no call has told yet
    assert [EVERY[name](channel) for _ in range(4)] == [b"ab"] * 4
    shops[1].kill()


def test_what_a_server_itself_says_is_the_callers_and_it_stays_up(shops, open_cluster, events):
    channel = open_cluster(*shops)
    for shop in shops:
        shop.then(Fail("UNAVAILABLE", "my database is away"))
    said = failure(lambda: WAITED["unary"](channel))
    assert said == ("UNAVAILABLE", "my database is away")
    assert sum(len(shop.calls) for shop in shops) == 1
    assert events == []


@pytest.mark.parametrize("name", ["unary", "future", "pulled"])
def test_a_call_that_may_have_been_carried_out_is_the_callers(open_cluster, name):
    shops = [Shop(), Shop()]
    channel = open_cluster(*shops)
    for shop in shops:
        shop.then(Hang())
    caught = []
    thread = threading.Thread(target=lambda: caught.append(failure(lambda: EVERY[name](channel))))
    thread.start()
    assert wait_until(lambda: any(shop.calls for shop in shops))
    called, other = sorted(shops, key=lambda shop: -len(shop.calls))
    called.kill()
    thread.join(20)
    assert caught[0][0] in {"UNAVAILABLE", "CANCELLED"}
    assert other.calls == []
    other.kill()


def test_a_call_that_breaks_amid_is_not_made_again_though_its_server_is_away_by_then(open_cluster):
    """Others' calls make gRPC look for the server at once, so that it fails before we can ask."""
    shops = [Shop(), Shop()]
    channel = open_cluster(*shops)
    method = channel.unary_unary(UNARY_UNARY)
    hangs = [Hang() for _ in range(6)]
    shops[0].then(*hangs)
    over = threading.Event()

    def once(request):
        with contextlib.suppress(grpc.RpcError):
            method(request, timeout=WAIT_S)

    def others():
        while not over.is_set():
            once(b"other")

    waiting = [threading.Thread(target=once, args=(b"mine-%d" % one,)) for one in range(12)]
    waiting += [threading.Thread(target=others) for _ in range(3)]
    for thread in waiting:
        thread.start()
    assert all(hang.begun.wait(20) for hang in hangs)
    shops[0].kill()
    over.set()
    for thread in waiting:
        thread.join(20)
    done = [{seen.requests[0] for seen in shop.calls} - {b"other"} for shop in shops]
    assert all(done)
    assert not done[0] & done[1]
    shops[1].kill()


def test_that_its_server_is_away_by_now_does_not_prove_that_a_call_was_not_sent(dead, open_cluster):
    channel = open_cluster(dead)
    failure(lambda: WAITED["unary"](channel))
    member = channel.members[0]
    broken = EndedCall(grpc.StatusCode.UNAVAILABLE, "Socket closed")
    began = None, 1, False, 0
    assert not channel._fleet.failed(member, broken, began)
    words = "failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:{}: no"
    unsent = EndedCall(grpc.StatusCode.UNAVAILABLE, words.format(dead))
    assert channel._fleet.failed(member, unsent, began)
    of_another = EndedCall(grpc.StatusCode.UNAVAILABLE, words.format(1))
    assert not channel._fleet.failed(member, of_another, began)  # it may be handed on


def test_if_nobody_can_be_reached_the_last_failure_is_the_callers(dead, open_cluster, events):
    channel = open_cluster(dead)
    assert failure(lambda: WAITED["unary"](channel))[0] == "UNAVAILABLE"
    assert failure(lambda: WAITED["unary"](channel))[0] == "UNAVAILABLE"
    assert len(events) == 1


def test_a_call_that_waits_to_be_ready_takes_the_first_who_is(dead, open_cluster):
    shop = Shop()
    shop.kill()
    channel = open_cluster(dead, shop, policy=ClusterPolicy(probe=0.02), timer=None)
    threading.Timer(0.3, shop.start).start()
    method = channel.unary_unary(UNARY_UNARY)
    assert method(b"x", timeout=WAIT_S, wait_for_ready=True) == b"x"
    shop.kill()


def test_a_call_that_waits_to_be_ready_ends_with_its_deadline(dead, open_cluster):
    channel = open_cluster(dead)
    method = channel.unary_unary(UNARY_UNARY)
    began = time.monotonic()
    said = failure(lambda: method(b"x", timeout=0.3, wait_for_ready=True))
    assert said[0] == "DEADLINE_EXCEEDED"
    assert time.monotonic() - began >= 0.29


def test_a_host_that_swallows_everything_is_noticed_by_the_deadline(shops, open_cluster):
    with socket.create_server(("127.0.0.1", 0), backlog=0) as mute:  # accepts nothing, says nothing
        channel = open_cluster(mute.getsockname()[1], shops[0], timer=None)  # in real time
        method = channel.unary_unary(UNARY_UNARY)
        codes = []
        for _ in range(4):
            try:
                method(b"x", timeout=1.1)  # longer than a handshake may take
                codes.append("OK")
            except grpc.RpcError as error:
                codes.append(error.code().name)
        assert sorted(codes) == ["DEADLINE_EXCEEDED", "OK", "OK", "OK"]


# Who is called


def test_calls_are_spread_in_turn(shops, open_cluster):
    channel = open_cluster(*shops)
    for name in EVERY:
        for shop in shops:
            shop.calls.clear()
        for _ in range(3):
            EVERY[name](channel)
        assert [len(shop.calls) for shop in shops] == [1, 1, 1], name


def test_a_key_in_the_metadata_goes_to_one_member(shops, open_cluster):
    channel = open_cluster(*shops, balance="consistent_hash:x-user")
    method = channel.unary_unary(UNARY_UNARY)
    for _ in range(6):
        method(b"x", timeout=WAIT_S, metadata=(("x-user", "7"),))
    assert sorted(len(shop.calls) for shop in shops) == [0, 0, 6]


def test_a_key_may_be_of_the_request(shops, open_cluster):
    channel = open_cluster(*shops, balance=ConsistentHash(lambda _, request, __: request))
    for _ in range(5):
        WAITED["unary"](channel)
        HELD["pulled"](channel)
    assert sorted(len(shop.calls) for shop in shops) == [0, 0, 10]


def test_who_is_busy_gets_fewer_calls(shops, open_cluster):
    channel = open_cluster(*shops, balance="least_active")
    for shop in shops:
        shop.then(Hang())
    method = channel.unary_unary(UNARY_UNARY)
    running = [method.future(b"x", timeout=WAIT_S) for _ in range(3)]
    assert wait_until(lambda: [len(shop.calls) for shop in shops] == [1, 1, 1])
    shops[1].calls[0].ended.set()
    assert wait_until(lambda: channel.calls == 2)
    for _ in range(5):
        method(b"x", timeout=WAIT_S)
    assert [len(shop.calls) for shop in shops] == [1, 6, 1]
    for call in running:
        call.cancel()


def test_multi_callables_are_kept_and_those_made_for_each_call_do_not_pile_up(shops, open_cluster):
    channel = open_cluster(shops[0])
    for _ in range(3):
        channel.unary_unary(UNARY_UNARY)(b"x", timeout=WAIT_S)
    member = channel.members[0]
    assert len(member.made) == 1
    for _ in range(1200):
        bound = channel.unary_unary(UNARY_UNARY, lambda request: request)
        bound.bound(member)
    assert len(member.made) <= 512
