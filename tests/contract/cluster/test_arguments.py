"""What the channels, the invokers and their methods refuse, and with which message."""

import grpc
import pytest

import rpcwheel
from fixtures.clusters import instance
from rpcwheel.cluster import ClusterPolicy, aio, sync
from rpcwheel.errors import ConfigurationError

CHANNEL = [
    ({"name": ""}, ConfigurationError, r"name.*shop\.Orders"),
    ({"name": 5}, TypeError, r"name.*shop\.Orders"),
    ({"balance": "nonsense"}, ConfigurationError, "balance"),
    ({"balance": 5}, TypeError, "balance"),
    ({"instances": ["10.0.0.7:50051"]}, TypeError, r"ServiceInstance, not '10\.0\.0\.7"),
    ({"policy": {"drain": 5}}, TypeError, "policy must be a ClusterPolicy"),
    ({"policy": ClusterPolicy(probe="often")}, TypeError, "wait"),
    ({"on_member": 5}, TypeError, "on_member must be callable"),
    ({"connect": 5}, TypeError, "connect"),
    ({"options": 5}, TypeError, "options"),
    ({"options": {"a": 1}}, TypeError, "options must be pairs"),
    ({"credentials": "secret"}, TypeError, "credentials"),
    ({"timer": 5}, TypeError, "timer"),
    (
        {"connect": print, "compression": grpc.Compression.Gzip},
        ConfigurationError,
        "compression: not together with connect",
    ),
]
INVOKER = [
    (("127.0.0.1:1", 2), TypeError, "channel"),
    ((["127.0.0.1:1"], 2), TypeError, "channel"),
    (([], 2), ConfigurationError, "channel"),
    ((None, 2), TypeError, "channel"),
    (("a channel", 0), ConfigurationError, "forks must be"),
    (("a channel", "2"), TypeError, "forks must be"),
    (("a channel", True), TypeError, "forks must be"),
]
KINDS = ("unary_stream", "stream_unary", "stream_stream")


def check_refused(make, rows):
    for given, error, message in rows:
        with pytest.raises(error, match=message):
            make(given)


def check_update(channel):
    before = channel.members
    with pytest.raises(TypeError, match="ServiceInstance"):
        channel.update([instance(2), None])
    assert channel.members is before


def check_invokers(world, channel):
    def forking(given):
        target, forks = given
        world.ForkingInvoker(channel if target == "a channel" else target, forks)

    check_refused(forking, INVOKER)
    for invoker in (world.ForkingInvoker(channel), world.BroadcastInvoker(channel)):
        for kind in KINDS:
            method = getattr(invoker, kind)("/s/M", None, None, _registered_method=True)
            with pytest.raises(ConfigurationError, match="is for unary calls"):
                method(b"x", timeout=1)


def test_sync_channels_and_invokers_refuse_wrong_arguments():
    check_refused(lambda given: sync.ClusterChannel(**{"name": "test.Shop"} | given), CHANNEL)
    with sync.ClusterChannel("test.Shop", [instance(1)]) as channel:
        check_update(channel)
        check_invokers(sync, channel)
        for invoker in (sync.ForkingInvoker(channel), sync.BroadcastInvoker(channel)):
            with pytest.raises(ConfigurationError, match=r"\.future\(\)"):
                invoker.unary_unary("/s/M").future(b"x")
        assert not channel.closed


async def test_aio_channels_and_invokers_refuse_wrong_arguments():
    check_refused(lambda given: aio.ClusterChannel(**{"name": "test.Shop"} | given), CHANNEL)
    async with aio.ClusterChannel("test.Shop", [instance(1)]) as channel:
        check_update(channel)
        check_invokers(aio, channel)
        with pytest.raises(TypeError, match="timeout must be seconds"):
            aio.ForkingInvoker(channel).unary_unary("/s/M")(b"x", timeout="soon")
        with pytest.raises(ConfigurationError, match="grace must be 0 seconds or more"):
            await channel.close(-1)
        assert not channel.closed


def test_a_channel_whose_members_interceptors_hide_is_refused_with_the_way_out():
    with sync.ClusterChannel("s") as channel, rpcwheel.Kit(timeout=1.0) as kit:
        for invoker in (sync.BroadcastInvoker, sync.ForkingInvoker):
            with pytest.raises(TypeError, match=r"rpcwheel\.channel\(url\), and put .* in front"):
                invoker(kit.intercept_channel(channel))


async def test_an_aio_channel_whose_members_interceptors_hide_is_refused_with_the_way_out():
    async with aio.ClusterChannel("s") as channel, rpcwheel.aio.Kit(timeout=1.0) as kit:
        for invoker in (aio.BroadcastInvoker, aio.ForkingInvoker):
            with pytest.raises(TypeError, match=r"aio\.channel\(url\), and put .* in front"):
                invoker(kit.intercept_channel(channel))
