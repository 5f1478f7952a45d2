"""Calls on a balanced channel to servers that are providers of Dubbo."""

import grpc
import pytest

from fixtures.balanced_channels import blocking, by_a_stream, connect, counts, in_front_of, instance
from fixtures.shop import UNARY_UNARY, Fail
from fixtures.waiting import WAIT_S, wait_until
from fixtures.worlds import KINDS
from rpcwheel import RetryPolicy
from rpcwheel.registry.backend import Settings
from rpcwheel.registry.backends.memory import MemoryBackend
from rpcwheel.registry.url import parse_url

ABSENT = "Invoker for gRPC not found"
DUBBO = {"dubbo.interface": "com.example.Shop"}


@pytest.fixture
def open_providers(world, open_balanced):
    """Opens a balanced channel to servers with this metadata."""

    def open_one(*shops, metadata=DUBBO, **settings):
        channel = open_balanced(lb_policy="ring_hash:user")
        channel.update([instance(shop, metadata=metadata, **settings) for shop in shops])
        connect(world, channel)
        return channel

    return open_one


def test_each_call_has_the_group_and_version_of_its_provider(world, shops, open_providers):
    channel = open_providers(shops[0], group="g1", version="1.2")
    for kind in KINDS:
        world.call(channel, kind, timeout=WAIT_S, metadata=(("x", "y"),)).result()
    expected = {"tri-service-group": "g1", "tri-service-version": "1.2", "x": "y"}
    assert shops[0].count_calls(**expected) == len(shops[0].calls) == len(KINDS)


@pytest.mark.parametrize("call", [blocking, by_a_stream])
@pytest.mark.parametrize(
    ("metadata", "details", "is_redirected"),
    [(DUBBO, ABSENT, True), (DUBBO, "Method not found", False), ({}, ABSENT, False)],
    ids=["absent", "another text", "no provider of Dubbo"],
)
def test_a_call_that_a_provider_no_longer_serves_goes_to_another_one(
    world, shops, open_providers, timer, call, metadata, details, is_redirected
):
    channel = open_providers(*shops[:2], metadata=metadata)
    retry = RetryPolicy(retry_on="UNAVAILABLE", backoff=1000.0, retry_budget=None)
    retried = in_front_of(world, channel, retry=retry, idempotent=False, timer=timer)
    call(world, retried)
    first = shops[counts(shops).index(1)]
    first.then(Fail(grpc.StatusCode.UNIMPLEMENTED, details))
    if is_redirected:
        assert call(world, retried) == b"x"
    else:
        with pytest.raises(grpc.RpcError) as caught:
            call(world, retried)
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert sorted(counts(shops)) == ([0, 1, 2] if is_redirected else [0, 0, 2])


# Tags


def tagged(shop, tag):
    metadata = DUBBO | ({"dubbo.tag": tag} if tag else {})
    return instance(shop, metadata=metadata)


@pytest.fixture
def open_tagged(world, shops, open_balanced):
    """Opens a channel to a server without a tag, a blue one and a green one."""

    def open_one(**settings):
        channel = open_balanced(**settings)
        servers = zip(shops, ("", "blue", "green"), strict=True)
        channel.update([tagged(shop, tag) for shop, tag in servers])
        return channel

    return open_one


def test_the_tag_of_a_call_selects_its_server(world, shops, open_tagged):
    channel, number = open_tagged(), len(KINDS)
    for tag in ("blue", "green", "red", None):
        metadata = (("dubbo.tag", tag),) if tag else None
        for kind in KINDS:
            world.call(channel, kind, timeout=WAIT_S, metadata=metadata).result()
    tags = [[call.metadata.get("dubbo.tag") for call in shop.calls] for shop in shops]
    assert tags == [["red"] * number + [None] * number, ["blue"] * number, ["green"] * number]


def test_a_forced_tag_that_no_server_has_ends_the_call(world, shops, open_tagged):
    channel = open_tagged()
    metadata = (("dubbo.tag", "red"), ("dubbo.force.tag", "true"))
    error = world.call(channel, "unary_unary", timeout=WAIT_S, metadata=metadata).error()
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert "3 instances, but none with the tag 'red', which dubbo.force.tag" in error.details()
    assert counts(shops) == [0, 0, 0]


def test_a_broadcast_goes_to_the_servers_of_its_tag(world, shops, open_tagged):
    channel = open_tagged()
    front = world.do(world.module("balancer").BroadcastChannel, channel)
    call = front.unary_unary(UNARY_UNARY)
    answers = world.do(call, b"x", timeout=WAIT_S, metadata=(("dubbo.tag", "blue"),))
    assert list(answers) == [f"127.0.0.1:{shops[1].port}"]


class DubboMemory(MemoryBackend):
    """A registry in memory whose URL is that of a registry of Dubbo's."""

    def __init__(self, name, options):
        super().__init__(parse_url(f"memory://{name}"), Settings(1800.0, 1.0))
        self.url = parse_url(f"dubbo+zookeeper://unused?{options}")


def test_application_and_tag_are_also_those_of_a_registry_object(world, shops, timer):
    backend = DubboMemory(f"dubbo-tags-{world.name}", "application=shop&tag=blue")
    registry = world.keep(world.do(world.module("registry").Registry, backend, timer=timer))
    for shop, tag in zip(shops, ("", "blue", "green"), strict=True):
        world.do(registry.register, tagged(shop, tag))
    channel = world.keep(
        world.do(world.api.insecure_channel, "test.Shop", registry=registry, timer=timer)
    )

    def is_called():
        return world.call(channel, "unary_unary", timeout=WAIT_S).result() and shops[1].calls

    assert wait_until(is_called)
    seen = shops[1].calls[-1].metadata
    assert (seen["tri-consumer-appname"], seen["dubbo.tag"]) == ("shop", "blue")
