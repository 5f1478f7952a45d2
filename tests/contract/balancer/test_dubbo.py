"""Calls on a balanced channel to servers that are providers of Dubbo."""

import grpc
import pytest

from fixtures.balanced_channels import connect, counts, instance
from fixtures.shop import UNARY_UNARY, Fail
from fixtures.waiting import WAIT_S
from fixtures.worlds import each_kind
from rpcwheel import RetryPolicy

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


@each_kind
def test_each_call_has_the_group_and_version_of_its_provider(world, shops, open_providers, kind):
    channel = open_providers(shops[0], group="g1", version="1.2")
    world.call(channel, kind, timeout=WAIT_S, metadata=(("x", "y"),)).result()
    (seen,) = shops[0].calls
    assert seen.metadata["tri-service-group"] == "g1"
    assert seen.metadata["tri-service-version"] == "1.2"
    assert seen.metadata["x"] == "y"


def blocking_call(world, channel):
    metadata = (("user", "u-1"),)
    return world.do(channel.unary_unary(UNARY_UNARY), b"x", timeout=WAIT_S, metadata=metadata)


def stream(world, channel):
    call = world.call(channel, "unary_stream", timeout=WAIT_S, metadata=(("user", "u-1"),))
    return b"".join(call.result())


@pytest.mark.parametrize("call", [blocking_call, stream])
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
    kit = world.api.Kit(retry=retry, idempotent=False, timer=timer)
    world.keep(kit)
    retried = world.do(kit.intercept_channel, channel)
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
