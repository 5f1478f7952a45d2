"""What the channel of many members says of itself, and what it refuses."""

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

import rpcwheel
from fixtures.clusters import instance
from fixtures.grpc_servers import IMPATIENT
from fixtures.shop import UNARY_UNARY
from fixtures.waiting import WAIT_S, wait_until
from rpcwheel.cluster import ClusterChannel, ClusterPolicy
from rpcwheel.errors import ConfigurationError

READY = grpc.ChannelConnectivity.READY
IDLE = grpc.ChannelConnectivity.IDLE
FAILING = grpc.ChannelConnectivity.TRANSIENT_FAILURE


def test_it_is_a_channel_of_grpc(open_cluster):
    assert isinstance(open_cluster(), grpc.Channel)


def test_its_state_is_the_best_of_its_members(shops, dead, open_cluster):
    channel = open_cluster()
    assert channel.get_state() is grpc.ChannelConnectivity.CONNECTING
    channel.fail("nobody knows")
    assert channel.get_state() is FAILING
    channel.update([])
    assert channel.get_state() is FAILING
    channel.update([instance(dead), instance(shops[0])])
    assert channel.get_state() is IDLE
    channel.unary_unary(UNARY_UNARY)(b"x", timeout=WAIT_S)
    assert channel.get_state() is READY
    channel.close()
    assert channel.get_state() is grpc.ChannelConnectivity.SHUTDOWN


def test_it_connects_when_it_is_asked_to(shops, dead, open_cluster):
    channel = open_cluster(dead, shops[0])
    channel.get_state(try_to_connect=True)
    assert wait_until(lambda: channel.get_state() is READY)


def test_it_says_what_it_is(shops, dead, open_cluster):
    channel = open_cluster(dead, shops[0])
    channel.members[0].down("the test says so")
    assert repr(channel) == (
        "<ClusterChannel 'test.Shop', 2 members, 1 of them down, calls in flight: 0>"
    )
    assert (channel.name, channel.target) == ("test.Shop", "test.Shop")
    channel.close()
    assert repr(channel) == "<ClusterChannel 'test.Shop', closed, calls in flight: 0>"


def test_picks_are_as_for_calls(shops, open_cluster):
    channel = open_cluster(*shops)
    assert {one.id for one in channel.pick(2)} < {one.id for one in channel.members}
    assert len(channel.pick(9)) == 3


def test_it_closes_at_the_end_of_a_with(shops, timer):
    with ClusterChannel("s", [instance(shops[0])], timer=timer) as channel:
        channel.unary_unary(UNARY_UNARY)(b"x", timeout=WAIT_S)
    assert channel.closed


def test_one_that_is_dropped_is_gone(shops, timer):
    channel = ClusterChannel("s", [instance(one) for one in shops], timer=timer, options=IMPATIENT)
    channel.unary_unary(UNARY_UNARY)(b"x", timeout=WAIT_S)
    channel.members[0].down("the test says so")
    seen = weakref.ref(channel._fleet)
    del channel
    assert wait_until(lambda: gc.collect() is None or seen() is None)
    timer.advance(60)  # what waits for a probe finds nobody
    assert timer.pending == 0


def test_over_tls_a_member_is_called_with_credentials(certificates, timer):
    with ThreadPoolExecutor(2) as pool:
        server = grpc.server(pool)
        handler = grpc.unary_unary_rpc_method_handler(lambda request, _: request)
        handlers = grpc.method_handlers_generic_handler("test.Shop", {"UnaryUnary": handler})
        server.add_generic_rpc_handlers([handlers])
        port = server.add_secure_port("localhost:0", certificates.server_credentials())
        server.start()
        one = instance(port, host="localhost", protocol="grpcs")
        settings = {"credentials": certificates.channel_credentials(), "timer": timer}
        with ClusterChannel("s", [one], **settings) as channel:
            assert channel.unary_unary(UNARY_UNARY)(b"x", timeout=WAIT_S) == b"x"
        unknown = ClusterChannel("s", [one], timer=timer)  # grpc's own roots don't know it
        with unknown, pytest.raises(grpc.RpcError):
            unknown.unary_unary(UNARY_UNARY)(b"x", timeout=WAIT_S)
        server.stop(None).wait()


@pytest.mark.parametrize(
    ("settings", "error", "said"),
    [
        ({"balance": "nonsense"}, ConfigurationError, "balance"),
        ({"balance": 5}, TypeError, "balance"),
        ({"instances": ["10.0.0.7:50051"]}, TypeError, "ServiceInstance"),
        ({"policy": {"drain": 5}}, TypeError, "ClusterPolicy"),
        ({"on_member": 5}, TypeError, "on_member"),
        ({"connect": 5}, TypeError, "connect"),
        ({"options": 5}, TypeError, "options"),
        ({"credentials": "secret"}, TypeError, "credentials"),
        ({"timer": 5}, TypeError, "timer"),
        (
            {"connect": print, "compression": grpc.Compression.Gzip},
            ConfigurationError,
            "compression: not together with connect",
        ),
        ({"policy": ClusterPolicy(probe="often")}, TypeError, "wait"),
    ],
)
def test_what_makes_no_sense_is_said_at_once(settings, error, said):
    with pytest.raises(error, match=said):
        ClusterChannel("test.Shop", **settings)


@pytest.mark.parametrize(("name", "error"), [("", ConfigurationError), (5, TypeError)])
def test_a_name_is_needed(name, error):
    with pytest.raises(error, match="name"):
        ClusterChannel(name)


def test_a_wrong_update_changes_nothing(shops, open_cluster):
    channel = open_cluster(shops[0])
    before = channel.members
    with pytest.raises(TypeError, match="ServiceInstance"):
        channel.update([instance(shops[1]), None])
    assert channel.members is before


def test_a_channel_of_grpc_aio_is_no_connection_for_threads(shops, open_cluster):
    def connect(one, options):
        return object()

    channel = open_cluster(shops[0], connect=connect)
    with pytest.raises(TypeError, match="connect must give"):
        channel.unary_unary(UNARY_UNARY)(b"x", timeout=WAIT_S)


def test_heartbeats_can_be_put_on_each_member(shops, open_cluster, timer):
    with rpcwheel.HeartbeatManager(timer=timer, interval=1.0) as manager:
        channel = open_cluster(*shops, on_member=lambda member: manager.attach(member.channel))
        for _ in range(3):
            channel.unary_unary(UNARY_UNARY)(b"x", timeout=WAIT_S)
        assert timer.pending == 3
        channel.close()
