"""Policies that are applied twice to a channel, and interceptors for gRPC's other API."""

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import grpc
import pytest

import rpcwheel
import rpcwheel.aio
from rpcwheel import DeadlinePolicy, HedgingPolicy, RetryPolicy
from rpcwheel.balancer import BroadcastChannel
from rpcwheel.balancer.aio import BroadcastChannel as AioBroadcastChannel
from rpcwheel.call import CallPolicy, MethodPolicy
from rpcwheel.interceptors import aio, sync

TARGET = "127.0.0.1:1"
RETRY = CallPolicy(retry=RetryPolicy(retry_on="UNAVAILABLE", max_attempts=4), idempotent=True)
HEDGING = CallPolicy(hedging=HedgingPolicy(delay=1.0), idempotent=True)
NOT_IDEMPOTENT = CallPolicy(retry=RetryPolicy(retry_on="UNAVAILABLE", max_attempts=4))
ONE_ATTEMPT = CallPolicy(timeout=DeadlinePolicy(timeout=1.0))

SYNC = SimpleNamespace(
    intercept=sync.intercept_channel,
    with_interceptors=lambda policy: grpc.intercept_channel(
        grpc.insecure_channel(TARGET), *sync.client_interceptors(policy)
    ),
    kit=rpcwheel.Kit,
    broadcast=BroadcastChannel,
)
AIO = SimpleNamespace(
    intercept=aio.intercept_channel,
    with_interceptors=lambda policy: grpc.aio.insecure_channel(
        TARGET, interceptors=aio.client_interceptors(policy)
    ),
    kit=rpcwheel.aio.Kit,
    broadcast=AioBroadcastChannel,
)

CHANNELS = {
    "by interceptors": lambda world, policy: world.with_interceptors(policy),
    "of a kit": lambda world, policy: world.kit.from_policy(policy).channel(TARGET),
    "to all servers": lambda world, policy: world.broadcast([CHANNELS["of a kit"](world, policy)]),
}
TWICE = {
    "interceptors": lambda world, channel, policy: world.intercept(channel, policy),
    "kit": lambda world, channel, policy: world.kit.from_policy(policy).intercept_channel(channel),
}


async def test_retries_of_a_channel_that_has_retries_warn():
    """The warning names the place where the second policy is applied."""
    for world in (SYNC, AIO):
        for make in CHANNELS.values():
            for intercept in TWICE.values():
                with pytest.warns(RuntimeWarning, match="4 x 2 = 8") as warned:
                    intercept(world, make(world, RETRY), HEDGING)
                assert [one.filename for one in warned] == [__file__]
                intercept(world, make(world, ONE_ATTEMPT), RETRY)
                intercept(world, make(world, RETRY), ONE_ATTEMPT)
                intercept(world, make(world, RETRY), NOT_IDEMPOTENT)


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
async def test_retries_of_other_methods_do_not_warn(first, second):
    for world in (SYNC, AIO):
        for policy, other in ((first, second), (second, first)):
            world.intercept(CHANNELS["of a kit"](world, policy), other)


@pytest.mark.parametrize(("first", "second", "methods"), COMMON.values(), ids=COMMON)
async def test_retries_of_common_methods_warn(first, second, methods):
    for world in (SYNC, AIO):
        for policy, other in ((first, second), (second, first)):
            channel = CHANNELS["of a kit"](world, policy)
            with pytest.warns(RuntimeWarning, match=f"a call of {methods} 4 attempts"):
                world.intercept(channel, other)


async def test_interceptors_of_a_kit_in_its_own_channel_warn():
    kit = rpcwheel.aio.Kit.from_policy(RETRY)
    with pytest.warns(RuntimeWarning, match="4 x 4 = 16") as warned:
        kit.channel(TARGET, interceptors=kit.client_interceptors())
    assert [one.filename for one in warned] == [__file__]


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
