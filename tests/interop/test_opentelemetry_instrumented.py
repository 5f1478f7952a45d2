"""Channels and servers in a process that OpenTelemetry's instrumentors have patched.

`opentelemetry-instrument` does that to every process it starts: `grpc.insecure_channel`,
`grpc.server` and their `grpc.aio` counterparts then add OpenTelemetry's interceptors.
"""

import grpc
import pytest
from opentelemetry.instrumentation.grpc import (
    GrpcAioInstrumentorClient,
    GrpcAioInstrumentorServer,
    GrpcInstrumentorClient,
    GrpcInstrumentorServer,
)
from opentelemetry.trace import SpanKind

import rpcwheel
from fixtures.client_interceptors import aio_interceptor
from fixtures.foreign_opentelemetry import Spans
from fixtures.grpc_servers import GrpcServer, unary_service
from fixtures.instrumented_channels import begin, response_of
from fixtures.shop import SERVICE, UNARY_UNARY
from fixtures.small_servers import METHOD, serving_in
from fixtures.waiting import WAIT_S, wait_until
from fixtures.worlds import METHODS, each_kind, only_aio
from rpcwheel import BalancerPolicy, RetryPolicy
from rpcwheel.idle import IdlePolicy
from rpcwheel.registry import ServiceInstance

READY = grpc.ChannelConnectivity.READY
INSTRUMENTORS = [
    GrpcInstrumentorClient,
    GrpcInstrumentorServer,
    GrpcAioInstrumentorClient,
    GrpcAioInstrumentorServer,
]
SETTINGS = {
    "timeout": WAIT_S,
    "retry": RetryPolicy(retry_on={"UNAVAILABLE"}, max_attempts=3, backoff=0.01),
    "idempotent": True,
}
REGISTRY = "memory://opentelemetry"


@pytest.fixture(autouse=True)
def are_traced():
    """Waits until each call has a span of the client, and one of the server in the same trace.

    All four instrumentors are active while a test runs.
    """
    spans, made = Spans(), [instrumentor() for instrumentor in INSTRUMENTORS]

    def traces(kind, path):
        return sorted(span.context.trace_id for span in spans.of(kind) if span.name == path)

    def are_traced(path, calls=1):
        def joined():
            client, server = (traces(kind, path) for kind in (SpanKind.CLIENT, SpanKind.SERVER))
            return len(client) == calls and client == server

        return wait_until(joined)

    for instrumentor in made:
        instrumentor.instrument()
    yield are_traced
    for instrumentor in made:
        instrumentor.uninstrument()


@pytest.fixture
def instrumented_shop(are_traced, shop):
    """A server that was made while the instrumentors were active, in a registry."""
    with rpcwheel.open_registry(REGISTRY) as registry:
        instance = ServiceInstance(service=SERVICE, host="127.0.0.1", port=shop.port)
        registry.register(instance, wait=WAIT_S)
        yield shop


@pytest.fixture
def kit(world):
    return world.keep(world.do(world.api.Kit, **SETTINGS))


def begun(world, channel, kind):
    """Begin a call that the server echoes; in sync, one with one response blocks."""
    blocks = world.name == "sync" and kind.endswith("unary")
    return begin(world, channel, kind, "blocking" if blocks else "held")


def call(world, channel, kind="unary_unary"):
    return response_of(begun(world, channel, kind))


CHANNELS = {
    "ReconnectingChannel": lambda world, kit, target: world.do(
        world.module("transport").ReconnectingChannel, target
    ),
    "kit.channel": lambda world, kit, target: world.do(kit.channel, target),
    "kit.channel by name": lambda world, kit, _: world.do(kit.channel, f"{REGISTRY}/{SERVICE}"),
    "kit.intercept_channel": lambda world, kit, target: world.do(
        kit.intercept_channel, world.channel(target)
    ),
    "kit.client_interceptors": lambda world, kit, target: world.channel(
        target, interceptors=world.do(kit.client_interceptors)
    ),
}


# Clients


@pytest.mark.parametrize("maker", CHANNELS.values(), ids=CHANNELS)
def test_instrumented_calls_of_each_kind_succeed_and_are_traced(
    world, kit, maker, are_traced, instrumented_shop
):
    channel = world.keep(maker(world, kit, instrumented_shop.target))
    for kind, path in METHODS.items():
        assert call(world, channel, kind) == b"ab"
        assert are_traced(path)


@pytest.mark.parametrize("waits", [False, True])
@each_kind
def test_instrumented_calls_of_a_balanced_channel_are_traced(
    world, kind, waits, are_traced, instrumented_shop
):
    instances = [ServiceInstance(service=SERVICE, host="127.0.0.1", port=instrumented_shop.port)]
    make, policy = world.module("balancer").BalancedChannel, BalancerPolicy(pick_timeout=WAIT_S)
    channel = world.keep(world.do(make, SERVICE, balancer_policy=policy))
    pending = begun(world, channel, kind) if waits else None  # for instances and the connection
    world.do(channel.update, instances)
    if not waits:
        assert wait_until(lambda: world.do(channel.get_state, True) is READY)
        pending = begun(world, channel, kind)
    assert response_of(pending) == b"ab"
    assert are_traced(METHODS[kind])


@pytest.mark.parametrize("name", ["kit.channel", "kit.channel by name", "kit.intercept_channel"])
def test_each_attempt_of_an_instrumented_call_is_traced(
    world, kit, name, are_traced, instrumented_shop
):
    instrumented_shop.then("UNAVAILABLE")
    channel = world.keep(CHANNELS[name](world, kit, instrumented_shop.target))
    assert call(world, channel) == b"ab"
    assert are_traced(UNARY_UNARY, calls=2)


@only_aio
def test_interceptors_given_to_an_instrumented_aio_channel_run(
    world, kit, are_traced, instrumented_shop
):
    async def tag(continuation, details, request):
        details.metadata.add("tag", "mine")
        return await continuation(details, request)

    for make in (world.module("transport").ReconnectingChannel, kit.channel):
        interceptors = [aio_interceptor(tag)]
        channel = world.do(make, instrumented_shop.target, interceptors=interceptors)
        assert call(world, world.keep(channel)) == b"ab"
    assert instrumented_shop.count_calls(tag="mine") == 2
    assert are_traced(UNARY_UNARY, calls=2)


@only_aio
def test_an_instrumented_aio_channel_is_traced_after_its_connection_was_replaced(
    world, are_traced, instrumented_shop
):
    make = world.module("transport").ReconnectingChannel
    channel = world.keep(world.do(make, instrumented_shop.target))
    assert call(world, channel) == b"ab"
    assert world.do(channel.reconnect, force=True)
    assert call(world, channel) == b"ab"
    assert are_traced(UNARY_UNARY, calls=2)


@only_aio
def test_an_instrumented_aio_channel_takes_credentials(world, certificates, are_traced):
    service = unary_service(UNARY_UNARY, aio_echo)
    credentials = certificates.channel_credentials()
    with GrpcServer(service, world=world, credentials=certificates.server_credentials()) as server:
        make = world.module("transport").ReconnectingChannel
        assert call(world, world.keep(world.do(make, server.target, credentials))) == b"ab"
    assert are_traced(UNARY_UNARY)


# Servers


async def aio_echo(request, _):
    return request


def test_an_instrumented_server_with_the_interceptors_of_a_kit_is_traced(world, are_traced):
    kit = world.keep(world.do(world.api.Kit, **SETTINGS, idle=IdlePolicy()))
    echo = aio_echo if world.name == "aio" else lambda request, _: request
    handler = grpc.unary_unary_rpc_method_handler(echo)
    with serving_in(world, handler, *world.do(kit.server_interceptors)) as target:
        channel = world.keep(world.do(kit.channel, target))
        assert world.call(channel, method=METHOD).result() == b"x"
        assert are_traced(METHOD)
