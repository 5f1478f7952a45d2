"""A member whose channel takes no calls, or can't be made, keeps no call running for ever."""

import grpc
import pytest

from fixtures.clusters import instance
from fixtures.shop import STREAM_UNARY, UNARY_STREAM, UNARY_UNARY, Shop, Silent
from fixtures.waiting import WAIT_S, wait_until
from rpcwheel.cluster import ClusterPolicy, Picker
from rpcwheel.observe.events import MemberDown

WAYS = {
    "unary": lambda channel: channel.unary_unary(UNARY_UNARY)(b"ab", timeout=WAIT_S),
    "future": lambda channel: (
        channel.unary_unary(UNARY_UNARY).future(b"ab", timeout=WAIT_S).result()
    ),
    "pulled": lambda channel: b"".join(channel.unary_stream(UNARY_STREAM)(b"ab", timeout=WAIT_S)),
    "pushed": lambda channel: channel.stream_unary(STREAM_UNARY)(
        iter([b"a", b"b"]), timeout=WAIT_S
    ),
    "pushed future": lambda channel: (
        channel.stream_unary(STREAM_UNARY).future(iter([b"a", b"b"]), timeout=WAIT_S).result()
    ),
}
EACH = pytest.mark.parametrize("name", WAYS)


class First(Picker):
    """Always the first one."""

    def prepare(self, members, weights):
        return lambda *_: members[0]


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


@EACH
def test_where_the_user_has_closed_what_he_made_calls_raise_as_grpc_does(
    shops, open_cluster, connect, made, name
):
    channel = open_cluster(connect=connect)
    channel.update([instance(shops[0], id="a")])
    assert WAYS[name](channel) == b"ab"
    made["a"].close()
    with pytest.raises(ValueError, match="Cannot invoke RPC"):
        WAYS[name](channel)


@EACH
def test_a_member_whose_channel_the_user_has_retired_gets_another(shops, open_cluster, name):
    shops[0].then(silent := Silent(1))
    channel = open_cluster(shops[0])
    running = channel.unary_stream(UNARY_STREAM)(b"ab", timeout=WAIT_S)
    assert silent.begun.wait(20)
    before = channel.members[0].channel
    before.retire()
    assert WAYS[name](channel) == b"ab"
    assert channel.members[0].channel is not before
    assert not before.closed
    assert not running.done()
    channel.close()
    assert before.closed
    assert running.code() is grpc.StatusCode.CANCELLED


@EACH
def test_a_member_whose_channel_the_user_has_closed_gets_another(shops, open_cluster, name):
    channel = open_cluster(shops[0])
    for _ in range(3):
        assert WAYS[name](channel) == b"ab"
        channel.members[0].channel.close()


@EACH
def test_who_can_not_be_connected_is_passed_over_and_left_alone(
    shops, open_cluster, connect, events, name
):
    connect(instance(1, id="a"), ()).close()
    channel = open_cluster(connect=connect)
    channel.update([instance(1, id="a"), instance(shops[0], id="b")])
    assert [WAYS[name](channel) for _ in range(4)] == [b"ab"] * 4
    why = "connect: RuntimeError('no certificate for a')"
    assert events == [MemberDown("test.Shop", "a", why)]
    channel.update([instance(1, id="a")])
    with pytest.raises(RuntimeError, match="no certificate"):
        WAYS[name](channel)


# A connection that has been replaced just now


def replaced(channel, shop):
    """Have the first member lose its server, and a heartbeat notice that."""
    channel.unary_unary(UNARY_UNARY)(b"x", timeout=WAIT_S)
    shop.kill()
    channel.members[0].channel.replace(force=True)


@pytest.mark.parametrize("patient", [False, True])
@pytest.mark.parametrize("name", ["unary", "future"])
def test_a_call_moves_though_a_connection_was_replaced_just_now(shops, open_cluster, name, patient):
    shop = Shop()
    channel = open_cluster(balance=First())
    channel.update([instance(shop, id="a"), instance(shops[0], id="b")])
    replaced(channel, shop)
    method = channel.unary_unary(UNARY_UNARY)
    begin = method if name == "unary" else method.future
    answer = begin(b"x", timeout=WAIT_S, wait_for_ready=patient)
    assert (answer if name == "unary" else answer.result()) == b"x"
    assert channel.members[0].state == "DOWN"


def test_a_call_that_may_wait_does_so_though_an_old_connection_drains(open_cluster):
    shop = Shop()
    shop.then(Silent(1))
    channel = open_cluster(shop, policy=ClusterPolicy(probe=30.0))
    stream = channel.unary_stream(UNARY_STREAM)(b"ab", timeout=WAIT_S)
    next(stream)
    link = channel.members[0].channel
    link.replace(force=True)
    other = Shop()
    other.kill()
    channel.update([instance(shop), instance(other)])
    method = channel.unary_unary(UNARY_UNARY)
    assert [method(b"x", timeout=WAIT_S, wait_for_ready=True) for _ in range(3)] == [b"x"] * 3
    stream.cancel()
    shop.kill()
    assert wait_until(lambda: link.calls == 0)
