"""Channels and servers in a process that OpenTelemetry's instrumentors have patched.

`opentelemetry-instrument` does that to every process it starts: `grpc.insecure_channel`,
`grpc.server` and their `grpc.aio` counterparts then add OpenTelemetry's interceptors.
"""

import asyncio
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from opentelemetry.instrumentation.grpc import (
    GrpcAioInstrumentorClient,
    GrpcAioInstrumentorServer,
    GrpcInstrumentorClient,
    GrpcInstrumentorServer,
)
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind

import rpcwheel
import rpcwheel.aio
from fixtures.foreign_opentelemetry import memory_of_process
from fixtures.shop import SERVICE
from fixtures.small_servers import METHOD, aio_serving, serving
from fixtures.waiting import WAIT_S, aio_wait_until, wait_until
from rpcwheel import BalancerPolicy, RetryPolicy
from rpcwheel.idle import IdlePolicy
from rpcwheel.registry import ServiceInstance

READY = grpc.ChannelConnectivity.READY
REQUESTS = [b"a", b"b"]
PATHS = {
    "unary_unary": "/test.Shop/UnaryUnary",
    "unary_stream": "/test.Shop/UnaryStream",
    "stream_unary": "/test.Shop/StreamUnary",
    "stream_stream": "/test.Shop/StreamStream",
}
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


class Spans:
    """The spans of this process."""

    def __init__(self, memory: InMemorySpanExporter) -> None:
        self._memory = memory

    def of(self, kind: SpanKind, path: str) -> list:
        """Those that have ended."""
        spans = self._memory.get_finished_spans()
        return [span for span in spans if (span.kind, span.name) == (kind, path)]

    def join(self, path: str, *, calls: int) -> bool:
        """Whether each call has a span of the client, and one of the server in the same trace."""
        sides = self.of(SpanKind.CLIENT, path), self.of(SpanKind.SERVER, path)
        client, server = ([span.context.trace_id for span in side] for side in sides)
        return len(client) == calls and sorted(client) == sorted(server)


@pytest.fixture(scope="module")
def memory():
    return memory_of_process()


@pytest.fixture(autouse=True)
def spans(memory):
    """All four instrumentors are active while a test runs."""
    memory.clear()
    made = [instrumentor() for instrumentor in INSTRUMENTORS]
    for instrumentor in made:
        instrumentor.instrument()
    yield Spans(memory)
    for instrumentor in made:
        instrumentor.uninstrument()


@pytest.fixture
def instrumented_shop(spans, shop):
    """A server that was made while the instrumentors were active, in a registry."""
    host, _, port = shop.target.rpartition(":")
    with rpcwheel.open_registry(REGISTRY) as registry:
        instance = ServiceInstance(service=SERVICE, host=host, port=int(port))
        registry.register(instance, wait=WAIT_S)
        yield shop


def given(kind: str):
    return iter(REQUESTS) if kind.startswith("stream") else b"".join(REQUESTS)


def call(channel: grpc.Channel, kind: str) -> bytes:
    """Make a call; the server echoes."""
    answer = getattr(channel, kind)(PATHS[kind])(given(kind), timeout=WAIT_S)
    return answer if kind.endswith("unary") else b"".join(answer)


async def aio_call(channel: grpc.aio.Channel, kind: str) -> bytes:
    """Make a call with `grpc.aio`."""
    answer = getattr(channel, kind)(PATHS[kind])(given(kind), timeout=WAIT_S)
    if kind.endswith("unary"):
        return await answer
    return b"".join([message async for message in answer])


CHANNELS = {
    "ReconnectingChannel": lambda kit, target: rpcwheel.transport.ReconnectingChannel(target),
    "kit.channel": lambda kit, target: kit.channel(target),
    "kit.channel by name": lambda kit, _: kit.channel(f"{REGISTRY}/{SERVICE}"),
    "kit.intercept_channel": lambda kit, target: kit.intercept_channel(
        grpc.insecure_channel(target)
    ),
    "kit.client_interceptors": lambda kit, target: grpc.intercept_channel(
        grpc.insecure_channel(target), *kit.client_interceptors()
    ),
}
AIO_CHANNELS = CHANNELS | {
    "ReconnectingChannel": lambda kit, target: rpcwheel.transport.aio.ReconnectingChannel(target),
    "kit.intercept_channel": lambda kit, target: kit.intercept_channel(
        grpc.aio.insecure_channel(target)
    ),
    "kit.client_interceptors": lambda kit, target: grpc.aio.insecure_channel(
        target, interceptors=kit.client_interceptors()
    ),
}


# Clients


@pytest.mark.parametrize("maker", CHANNELS.values(), ids=CHANNELS)
def test_instrumented_calls_of_each_kind_succeed_and_are_traced(maker, spans, instrumented_shop):
    with rpcwheel.Kit(**SETTINGS) as kit, maker(kit, instrumented_shop.target) as channel:
        for kind, path in PATHS.items():
            assert call(channel, kind) == b"ab"
            assert wait_until(lambda path=path: spans.join(path, calls=1))


@pytest.mark.parametrize("maker", AIO_CHANNELS.values(), ids=AIO_CHANNELS)
async def test_instrumented_aio_calls_of_each_kind_succeed_and_are_traced(
    maker, spans, instrumented_shop
):
    async with (
        rpcwheel.aio.Kit(**SETTINGS) as kit,
        maker(kit, instrumented_shop.target) as channel,
    ):
        for kind, path in PATHS.items():
            assert await aio_call(channel, kind) == b"ab"
            assert await aio_wait_until(lambda path=path: spans.join(path, calls=1))


BALANCED = BalancerPolicy(pick_timeout=WAIT_S)


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("kind", PATHS)
def test_instrumented_calls_of_a_balanced_channel_are_traced(kind, waits, spans, instrumented_shop):
    instances = [ServiceInstance(service=SERVICE, host="127.0.0.1", port=instrumented_shop.port)]
    with rpcwheel.balancer.BalancedChannel(SERVICE, balancer_policy=BALANCED) as channel:
        if waits:  # for the instances, and then for the connection
            with ThreadPoolExecutor(1) as pool:
                response = pool.submit(call, channel, kind)
                channel.update(instances)
                assert response.result(WAIT_S) == b"ab"
        else:
            channel.update(instances)
            assert wait_until(lambda: channel.get_state(True) is READY)
            assert call(channel, kind) == b"ab"
    assert wait_until(lambda: spans.join(PATHS[kind], calls=1))


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("kind", PATHS)
async def test_instrumented_aio_calls_of_a_balanced_channel_are_traced(
    kind, waits, spans, instrumented_shop
):
    instances = [ServiceInstance(service=SERVICE, host="127.0.0.1", port=instrumented_shop.port)]
    async with rpcwheel.balancer.aio.BalancedChannel(SERVICE, balancer_policy=BALANCED) as channel:
        if waits:
            response = asyncio.create_task(aio_call(channel, kind))
            await asyncio.sleep(0)
            channel.update(instances)
            assert await response == b"ab"
        else:
            channel.update(instances)
            await channel.channel_ready()
            assert await aio_call(channel, kind) == b"ab"
    assert await aio_wait_until(lambda: spans.join(PATHS[kind], calls=1))


TRACED_RETRIES = ("kit.channel", "kit.channel by name", "kit.intercept_channel")


@pytest.mark.parametrize("name", TRACED_RETRIES)
def test_each_attempt_of_an_instrumented_call_is_traced(name, spans, instrumented_shop):
    instrumented_shop.then("UNAVAILABLE")
    with rpcwheel.Kit(**SETTINGS) as kit:
        with CHANNELS[name](kit, instrumented_shop.target) as channel:
            assert call(channel, "unary_unary") == b"ab"
        assert wait_until(lambda: spans.join(PATHS["unary_unary"], calls=2))


@pytest.mark.parametrize("name", TRACED_RETRIES)
async def test_each_attempt_of_an_instrumented_aio_call_is_traced(name, spans, instrumented_shop):
    instrumented_shop.then("UNAVAILABLE")
    async with rpcwheel.aio.Kit(**SETTINGS) as kit:
        async with AIO_CHANNELS[name](kit, instrumented_shop.target) as channel:
            assert await aio_call(channel, "unary_unary") == b"ab"
        assert await aio_wait_until(lambda: spans.join(PATHS["unary_unary"], calls=2))


class Tagging(grpc.aio.UnaryUnaryClientInterceptor):
    """An interceptor of the user's, which adds metadata."""

    async def intercept_unary_unary(self, continuation, details, request):
        details.metadata.add("tag", "mine")
        return await continuation(details, request)


async def test_interceptors_given_to_an_instrumented_aio_channel_run(spans, instrumented_shop):
    async with rpcwheel.aio.Kit(**SETTINGS) as kit:
        target, given = instrumented_shop.target, {"interceptors": [Tagging()]}
        for channel in (
            rpcwheel.transport.aio.ReconnectingChannel(target, **given),
            kit.channel(target, **given),
        ):
            async with channel:
                assert await aio_call(channel, "unary_unary") == b"ab"
    assert instrumented_shop.count_calls(tag="mine") == 2
    assert await aio_wait_until(lambda: spans.join(PATHS["unary_unary"], calls=2))


async def test_an_instrumented_aio_channel_is_traced_after_its_connection_was_replaced(
    spans, instrumented_shop
):
    async with rpcwheel.transport.aio.ReconnectingChannel(instrumented_shop.target) as channel:
        assert await aio_call(channel, "unary_unary") == b"ab"
        assert channel.reconnect(force=True)
        assert await aio_call(channel, "unary_unary") == b"ab"
    assert await aio_wait_until(lambda: spans.join(PATHS["unary_unary"], calls=2))


async def test_an_instrumented_aio_channel_takes_credentials(certificates, spans):
    server = grpc.aio.server()
    handler = grpc.unary_unary_rpc_method_handler(aio_echo)
    server.add_generic_rpc_handlers(
        [grpc.method_handlers_generic_handler(SERVICE, {"UnaryUnary": handler})]
    )
    port = server.add_secure_port("127.0.0.1:0", certificates.server_credentials())
    await server.start()
    credentials = certificates.channel_credentials()
    async with rpcwheel.transport.aio.ReconnectingChannel(
        f"127.0.0.1:{port}", credentials
    ) as channel:
        assert await aio_call(channel, "unary_unary") == b"ab"
    await server.stop(None)
    assert await aio_wait_until(lambda: spans.join(PATHS["unary_unary"], calls=1))


# Servers


async def aio_echo(request, _):
    return request


def test_an_instrumented_server_with_the_interceptors_of_a_kit_is_traced(spans):
    handler = grpc.unary_unary_rpc_method_handler(lambda request, _: request)
    with (
        rpcwheel.Kit(**SETTINGS, idle=IdlePolicy()) as kit,
        serving(handler, interceptors=kit.server_interceptors()) as target,
        kit.channel(target) as channel,
    ):
        assert channel.unary_unary(METHOD)(b"a") == b"a"
        assert wait_until(lambda: spans.join(METHOD, calls=1))


async def test_an_instrumented_aio_server_with_the_interceptors_of_a_kit_is_traced(spans):
    handler = grpc.unary_unary_rpc_method_handler(aio_echo)
    async with (
        rpcwheel.aio.Kit(**SETTINGS, idle=IdlePolicy()) as kit,
        aio_serving(handler, interceptors=kit.server_interceptors()) as target,
        kit.channel(target) as channel,
    ):
        assert await channel.unary_unary(METHOD)(b"a") == b"a"
        assert await aio_wait_until(lambda: spans.join(METHOD, calls=1))
