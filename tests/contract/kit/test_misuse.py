"""Policies that are applied twice to a channel, and interceptors for gRPC's other API."""

from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

import rpcwheel
import rpcwheel.aio
from rpcwheel import DeadlinePolicy, HedgingPolicy, RetryPolicy
from rpcwheel.call import CallPolicy, MethodPolicy
from rpcwheel.interceptors import aio, sync

TARGET = "127.0.0.1:1"
RETRY = CallPolicy(retry=RetryPolicy(retry_on="UNAVAILABLE", max_attempts=4), idempotent=True)
HEDGING = CallPolicy(hedging=HedgingPolicy(delay=1.0), idempotent=True)
NOT_IDEMPOTENT = CallPolicy(retry=RetryPolicy(retry_on="UNAVAILABLE", max_attempts=4))
ONE_ATTEMPT = CallPolicy(timeout=DeadlinePolicy(timeout=1.0))


def by_interceptors(world, policy):
    ours = world.interceptors.client_interceptors(policy)
    return world.channel(TARGET, interceptors=ours)


def of_a_kit(world, policy):
    return world.keep(world.do(world.api.Kit.from_policy(policy).channel, TARGET))


def to_all_servers(world, policy):
    broadcast = world.module("balancer").BroadcastChannel
    return world.keep(world.do(broadcast, [of_a_kit(world, policy)]))


def intercept(world, channel, policy):
    return world.do(world.interceptors.intercept_channel, channel, policy)


def intercept_by_a_kit(world, channel, policy):
    return world.do(world.api.Kit.from_policy(policy).intercept_channel, channel)


@pytest.mark.parametrize("make", [by_interceptors, of_a_kit, to_all_servers])
@pytest.mark.parametrize("apply", [intercept, intercept_by_a_kit])
def test_retries_of_a_channel_that_has_retries_warn(world, make, apply):
    with pytest.warns(RuntimeWarning, match="4 x 2 = 8"):
        apply(world, make(world, RETRY), HEDGING)
    apply(world, make(world, ONE_ATTEMPT), RETRY)
    apply(world, make(world, RETRY), ONE_ATTEMPT)
    apply(world, make(world, RETRY), NOT_IDEMPOTENT)


async def test_the_warning_names_the_place_where_the_second_policy_is_applied():
    kit, aio_kit = rpcwheel.Kit.from_policy(RETRY), rpcwheel.aio.Kit.from_policy(RETRY)
    for second, apply in (
        (kit, kit.intercept_channel),
        (kit, lambda channel: sync.intercept_channel(channel, RETRY)),
        (aio_kit, aio_kit.intercept_channel),
        (aio_kit, lambda channel: aio.intercept_channel(channel, RETRY)),
    ):
        channel = second.channel(TARGET)
        with pytest.warns(RuntimeWarning, match="4 x 4 = 16") as warned:
            apply(channel)
        assert [one.filename for one in warned] == [__file__]
    with pytest.warns(RuntimeWarning, match="4 x 4 = 16") as warned:
        aio_kit.channel(TARGET, interceptors=aio_kit.client_interceptors())
    assert [one.filename for one in warned] == [__file__]


def retries(*patterns):
    """Policies with retries for the methods of patterns."""
    retry = MethodPolicy(retry=RETRY.retry, idempotent=True)
    return CallPolicy(methods=dict.fromkeys(patterns, retry))


DISJOINT = {
    "services": (retries("/shop.Orders/*"), retries("/shop.Audit/*")),
    "names": (retries("/shop.Orders/Get"), retries("/shop.Orders/List", "/shop.Audit/*")),
    "all but": (
        CallPolicy(
            retry=RETRY.retry, idempotent=True, methods={"/shop.Audit/*": {"idempotent": False}}
        ),
        retries("/shop.Audit/*"),
    ),
}
COMMON = {
    "nested": (retries("/shop.*/*"), retries("/shop.Orders/Get*"), "/shop.Orders/Get\\*"),
    "crossing": (retries("/shop.Orders/*"), retries("/*/Get*"), "/shop.Orders/Get\\*"),
    "idempotent by another pattern": (
        retries("/*/Get*"),
        CallPolicy(retry=RETRY.retry, methods={"/shop.Orders/*": {"idempotent": True}}),
        "/shop.Orders/Get\\*",
    ),
}


@pytest.mark.parametrize(("first", "second"), DISJOINT.values(), ids=DISJOINT)
def test_retries_of_other_methods_do_not_warn(first, second, world):
    for policy, other in ((first, second), (second, first)):
        intercept(world, of_a_kit(world, policy), other)


@pytest.mark.parametrize(("first", "second", "methods"), COMMON.values(), ids=COMMON)
def test_retries_of_common_methods_warn(first, second, methods, world):
    for policy, other in ((first, second), (second, first)):
        channel = of_a_kit(world, policy)
        with pytest.warns(RuntimeWarning, match=f"a call of {methods} 4 attempts"):
            intercept(world, channel, other)


# The other API


def threaded_server(interceptors):
    with ThreadPoolExecutor(1) as pool:
        grpc.server(pool, interceptors=interceptors)


def channel_of_grpc(interceptors):
    grpc.intercept_channel(grpc.insecure_channel(TARGET), *interceptors)


def aio_server(interceptors):
    grpc.aio.server(interceptors=interceptors)


def aio_channel(interceptors):
    grpc.aio.insecure_channel(TARGET, interceptors=interceptors)


def refusals():
    kit, aio_kit = rpcwheel.Kit(idle=60.0), rpcwheel.aio.Kit(idle=60.0)
    servers = r"for grpc\.server\(\); for a grpc\.aio\.server\(\) use rpcwheel\.interceptors\.aio"
    aio_servers = r"for grpc\.aio\.server\(\); for a grpc\.server\(\) use rpcwheel\.interceptors"
    channels, aio_channels = "for channels of grpc:", r"for channels of grpc\.aio:"
    return [
        (aio_server, kit.server_interceptors(), servers),
        (aio_channel, kit.server_interceptors(), servers),
        (threaded_server, aio_kit.server_interceptors(), aio_servers),
        (aio_channel, kit.client_interceptors(), channels),
        (threaded_server, kit.client_interceptors(), channels),
        (aio_server, aio_kit.client_interceptors(), aio_channels),
        (threaded_server, aio_kit.client_interceptors(), aio_channels),
        (channel_of_grpc, aio_kit.client_interceptors(), r"must be grpc\.UnaryUnary"),  # gRPC's own
    ]


async def test_grpc_refuses_interceptors_of_another_api_when_they_are_given_to_it():
    for use, interceptors, message in refusals():
        with pytest.raises(TypeError, match=message):
            use(interceptors)
