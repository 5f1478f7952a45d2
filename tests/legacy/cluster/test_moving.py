"""A call that a member did not get goes to another, and no other call does."""

import contextlib
import threading

import grpc
import pytest

from fixtures.clusters import instance
from fixtures.shop import STREAM_STREAM, STREAM_UNARY, UNARY_STREAM, UNARY_UNARY, Hang, Silent
from fixtures.waiting import WAIT_S, wait_until
from rpcwheel.cluster import ClusterPolicy, Picker
from rpcwheel.cluster._gate import Gate
from rpcwheel.observe.events import MemberDown

HELD = {
    "future": lambda channel: channel.unary_unary(UNARY_UNARY).future(b"ab").result(),
    "pulled": lambda channel: b"".join(channel.unary_stream(UNARY_STREAM)(b"ab")),
    "pushed future": lambda channel: (
        channel.stream_unary(STREAM_UNARY).future(iter([b"a", b"b"])).result()
    ),
    "both": lambda channel: b"".join(channel.stream_stream(STREAM_STREAM)(iter([b"a", b"b"]))),
}
WAITED = {
    "unary": lambda channel: channel.unary_unary(UNARY_UNARY)(b"ab"),
    "pushed": lambda channel: channel.stream_unary(STREAM_UNARY)(iter([b"a", b"b"])),
}
EVERY = HELD | WAITED


class First(Picker):
    """Always the first one."""

    def prepare(self, members, weights):
        return lambda *_: members[0]


def failure(begin):
    with pytest.raises(grpc.RpcError) as caught:
        begin()
    return caught.value.code().name, caught.value.details()


def member_of(channel, shop):
    return next(one for one in channel.members if one.instance.port == shop.port)


def test_nobody_sees_that_a_member_was_never_there(shops, dead, open_cluster):
    for name in ("unary", "future", "pulled"):
        channel = open_cluster(dead, shops[0])
        assert [EVERY[name](channel) for _ in range(3)] == [b"ab"] * 3


def test_nobody_sees_that_a_member_has_died_since(shops, open_cluster):
    channel = open_cluster(*shops[:2])
    for name in EVERY:
        assert [EVERY[name](channel) for _ in range(2)] == [b"ab"] * 2
    shops[0].kill()
    gone = member_of(channel, shops[0])
    assert wait_until(lambda: gone.channel.get_state() is not grpc.ChannelConnectivity.READY)
    assert [WAITED["unary"](channel) for _ in range(4)] == [b"ab"] * 4
    assert gone.state == "DOWN"
    for name in EVERY:
        assert [EVERY[name](channel) for _ in range(2)] == [b"ab"] * 2


def test_a_stream_of_requests_is_not_begun_where_there_is_no_connection(shops, open_cluster):
    channel = open_cluster(*shops[:2])
    for _ in range(2):
        WAITED["unary"](channel)
    shops[0].kill()
    gone = member_of(channel, shops[0])
    failing = grpc.ChannelConnectivity.TRANSIENT_FAILURE
    assert wait_until(lambda: gone.channel.get_state(try_to_connect=True) is failing)
    assert gone.state == "UP"  # no call has told yet
    for name in ("pushed", "pushed future", "both"):
        assert [EVERY[name](channel) for _ in range(2)] == [b"ab"] * 2


def test_a_call_that_may_have_been_carried_out_is_the_callers(shops, open_cluster):
    for name in ("unary", "future", "pulled"):
        channel = open_cluster(*shops[:2])
        begun = [len(shop.calls) for shop in shops]
        for shop in shops:
            shop.then(Hang())
        caught = []
        thread = threading.Thread(
            target=lambda name=name, channel=channel, caught=caught: caught.append(
                failure(lambda: EVERY[name](channel))
            )
        )
        thread.start()
        assert wait_until(lambda begun=begun: [len(shop.calls) for shop in shops] != begun)
        called = next(one for one in shops if len(one.calls) > begun[shops.index(one)])
        called.kill()
        thread.join(WAIT_S)
        assert caught[0][0] in {"UNAVAILABLE", "CANCELLED"}
        assert sum(len(shop.calls) for shop in shops) == sum(begun) + 1
        called.start()
        for shop in shops:
            shop._items.clear()


def test_a_call_that_breaks_amid_is_not_made_again_though_its_server_is_away_by_then(
    shops, open_cluster
):
    """Others' calls make gRPC look for the server at once, so that it fails before we can ask."""
    shops = shops[:2]
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
    assert all(hang.begun.wait(WAIT_S) for hang in hangs)
    shops[0].kill()
    over.set()
    for thread in waiting:
        thread.join(2 * WAIT_S)
    done = [{seen.requests[0] for seen in shop.calls} - {b"other"} for shop in shops]
    assert all(done)
    assert not done[0] & done[1]


def test_if_nobody_can_be_reached_the_last_failure_is_the_callers(dead, open_cluster, events):
    channel = open_cluster(dead)
    for _ in range(2):
        assert failure(lambda: WAITED["unary"](channel))[0] == "UNAVAILABLE"
    assert len(events) == 1


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


# A member whose channel takes no calls, or can't be made


@pytest.fixture
def made():
    """The channels that were made by `connect`, by the id of whom for."""
    return {}


@pytest.fixture
def connect(made):
    def connect(one, options):
        if one.id in made:
            raise RuntimeError(f"no certificate for {one.id}")
        made[one.id] = grpc.insecure_channel(one.target, options)
        return made[one.id]

    return connect


def test_where_the_user_has_closed_what_he_made_calls_raise_as_grpc_does(
    shops, open_cluster, connect, made
):
    channel = open_cluster(connect=connect)
    channel.update([instance(shops[0], id="a")])
    WAITED["unary"](channel)
    made["a"].close()
    for name in EVERY:
        with pytest.raises(ValueError, match="Cannot invoke RPC"):
            EVERY[name](channel)


def test_a_member_whose_channel_the_user_has_drained_gets_another(shops, open_cluster):
    for name in EVERY:
        shops[0].then(silent := Silent(1))
        channel = open_cluster(shops[0])
        running = channel.unary_stream(UNARY_STREAM)(b"ab")
        assert silent.begun.wait(WAIT_S)
        before = channel.members[0].channel
        before.drain()
        assert EVERY[name](channel) == b"ab"
        assert channel.members[0].channel is not before
        assert not before.closed
        assert not running.done()
        channel.close()
        assert before.closed
        assert running.code() is grpc.StatusCode.CANCELLED


def test_who_can_not_be_connected_is_passed_over(shops, open_cluster, events):
    def connect(one, options):
        if one.id == "a":
            raise RuntimeError("no certificate for a")
        return grpc.insecure_channel(one.target, options)

    channel = open_cluster(connect=connect, balance=First())
    channel.update([instance(1, id="a"), instance(shops[0], id="b")])
    for name in EVERY:
        assert EVERY[name](channel) == b"ab"
    why = "connect: RuntimeError('no certificate for a')"
    assert events == [MemberDown("test.Shop", "a", why)]
    channel.update([instance(1, id="a")])
    for name in EVERY:
        with pytest.raises(RuntimeError, match="no certificate"):
            EVERY[name](channel)


@pytest.mark.parametrize("patient", [False, True])
def test_a_call_moves_though_a_connection_was_replaced_just_now(shops, open_cluster, patient):
    channel = open_cluster(balance=First())
    channel.update([instance(shops[1], id="a"), instance(shops[0], id="b")])
    method = channel.unary_unary(UNARY_UNARY)
    method(b"x")
    shops[1].kill()
    channel.members[0].channel.reconnect(force=True)
    assert method(b"x", wait_for_ready=patient) == b"x"
    assert channel.members[0].state == "DOWN"


# A try that is over


@pytest.mark.parametrize("name", ["future", "unary"])
def test_it_is_tried_no_more_once_its_time_is_over(dead, open_cluster, name):
    channel = open_cluster(dead, timer=None, policy=ClusterPolicy(probe=3600.0))
    tried = []

    def serialized(request):  # for each try
        tried.append(request)
        return request

    method = channel.unary_unary(UNARY_UNARY, serialized)
    given = {"timeout": 0.3, "wait_for_ready": True}
    begin = (
        method if name == "unary" else lambda *args, **opts: method.future(*args, **opts).result()
    )
    assert failure(lambda: begin(b"x", **given))[0] == "DEADLINE_EXCEEDED"
    assert len(tried) == 1


def test_a_probe_that_is_not_answered_is_followed_by_another(dead, shops, timer, open_cluster):
    policy = ClusterPolicy(probe=lambda state: float(state.attempt_number), probe_timeout=0.05)
    channel = open_cluster(dead, shops[0], policy=policy)
    WAITED["unary"](channel), WAITED["unary"](channel)
    bad = next(one for one in channel.members if one.instance.port == dead)
    for failed in (1, 2, 3):
        timer.advance(failed + 0.1)
        assert wait_until(lambda failed=failed: bad.probes == failed)
        assert wait_until(lambda: timer.pending == 1)
    assert bad.state == "DOWN"


# The requests of a try


class At:
    """A member as a gate sees it."""

    def __init__(self, state):
        self.link = self
        self.get_state = lambda: state


def test_a_gate_that_is_shut_leaves_the_requests_to_another():
    requests = iter("abc")
    gate = Gate(requests, At(grpc.ChannelConnectivity.TRANSIENT_FAILURE))
    assert not gate.shut()
    assert list(gate) == []
    for state in (grpc.ChannelConnectivity.READY, None):
        gate = Gate(requests, At(state))
        assert next(gate) in {"a", "b"}
        assert gate.shut()
