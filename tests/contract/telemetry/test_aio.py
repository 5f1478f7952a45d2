"""Traces of calls of `grpc.aio`: which span gets the events of retries, hedges, reconnects."""

import asyncio

import grpc
import pytest
from opentelemetry import trace

from fixtures.foreign_opentelemetry import events_of
from fixtures.shop import Fail, Hang, Silent
from fixtures.waiting import WAIT_S, aio_wait_until
from rpcwheel import DeadlinePolicy, DefaultResponsePolicy, HedgingPolicy, RetryPolicy
from rpcwheel.aio import Kit
from rpcwheel.balancer import BalancerPolicy
from rpcwheel.balancer.aio import BalancedChannel
from rpcwheel.heartbeat.aio import HeartbeatManager
from rpcwheel.instance import ServiceInstance
from rpcwheel.testing import FlakyServer
from rpcwheel.transport.aio import ReconnectingChannel

RETRIED = {
    "timeout": WAIT_S,
    "retry": RetryPolicy(retry_on="UNAVAILABLE", backoff=0.001),
    "idempotent": True,
}
KINDS = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")


def path(kind: str) -> str:
    return "/test.Shop/" + kind.title().replace("_", "")


async def call(channel: grpc.aio.Channel, kind: str) -> bytes:
    """Make a call that the shop echoes."""
    request = iter([b"a", b"b"]) if kind.startswith("stream") else b"ab"
    begun = getattr(channel, kind)(path(kind))(request)
    if kind.endswith("unary"):
        return await begun
    return b"".join([message async for message in begun])


MAKERS = {
    "kit.channel": lambda kit, target, theirs: kit.channel(target, interceptors=theirs),
    "kit.intercept_channel": lambda kit, target, theirs: kit.intercept_channel(
        grpc.aio.insecure_channel(target, interceptors=theirs)
    ),
    "kit.client_interceptors": lambda kit, target, theirs: grpc.aio.insecure_channel(
        target, interceptors=[*kit.client_interceptors(), *theirs]
    ),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("maker", MAKERS.values(), ids=MAKERS)
async def test_a_retry_is_an_event_of_the_span_of_the_caller(maker, kind, shop, spans):
    shop.then("UNAVAILABLE")
    async with Kit(**RETRIED) as kit, maker(kit, shop.target, []) as channel:
        with spans.caller() as span:
            assert await call(channel, kind) == b"ab"
    (event,) = span.events
    assert event.name == "rpcwheel.retry"
    assert event.attributes["rpc.method"] == path(kind).removeprefix("/")


@pytest.mark.parametrize("kind", KINDS)
async def test_with_an_instrumentation_outside_its_span_gets_the_retry(kind, shop, spans, theirs):
    shop.then("UNAVAILABLE")
    async with Kit(**RETRIED) as kit:
        interceptors = [*theirs.aio_interceptors(), *kit.client_interceptors()]
        async with grpc.aio.insecure_channel(shop.target, interceptors=interceptors) as channel:
            with spans.caller() as span:
                assert await call(channel, kind) == b"ab"
        (client,) = await spans.aio_clients(1)
    assert (events_of(span), events_of(client)) == ([], ["rpcwheel.retry"])
    assert client.parent.span_id == span.context.span_id


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("maker", MAKERS.values(), ids=MAKERS)
async def test_with_an_instrumentation_inside_each_attempt_is_a_child_of_the_caller(
    maker, kind, shop, spans, theirs
):
    shop.then("UNAVAILABLE")
    async with Kit(**RETRIED) as kit:
        async with maker(kit, shop.target, theirs.aio_interceptors()) as channel:
            with spans.caller() as span:
                assert await call(channel, kind) == b"ab"
        attempts = await spans.aio_clients(2)
    assert events_of(span) == ["rpcwheel.retry"]
    for attempt in attempts:
        assert (events_of(attempt), attempt.parent.span_id) == ([], span.context.span_id)


async def test_a_hedge_is_an_event_of_the_span_of_the_caller(shop, spans):
    shop.then(Hang())
    hedged = HedgingPolicy(delay=0.001, max_attempts=2)
    settings = {"timeout": WAIT_S, "hedging": hedged, "idempotent": True}
    async with Kit(**settings) as kit, kit.channel(shop.target) as channel:
        with spans.caller() as span:
            assert await call(channel, "unary_unary") == b"ab"
    assert events_of(span) == ["rpcwheel.hedge"]


async def test_a_refused_retry_and_a_default_response_are_events(shop, spans):
    shop.then(Fail("UNAVAILABLE"))
    default = DefaultResponsePolicy(on="UNAVAILABLE", default=b"none")
    settings = RETRIED | {"idempotent": False, "default_response": default}
    async with Kit(**settings) as kit, kit.channel(shop.target) as channel:
        with spans.caller() as span:
            assert await call(channel, "unary_unary") == b"none"
    assert events_of(span) == ["rpcwheel.retry_stopped", "rpcwheel.default_response"]


async def test_a_stalled_stream_is_an_event_of_the_span_of_the_caller(shop, spans):
    shop.then(Silent(after=1))
    policy = DeadlinePolicy(message_timeout=0.05)
    async with Kit(timeout=policy) as kit, kit.channel(shop.target) as channel:
        with spans.caller() as span, pytest.raises(grpc.RpcError, match="message_timeout"):
            await call(channel, "unary_stream")
    assert events_of(span) == ["rpcwheel.stream_stalled"]


# Connections


async def in_flight(channel, kind, shop, span) -> asyncio.Task:
    """Begin a call that hangs, in a task with this current span."""
    hang = Hang()
    shop.then(hang)

    async def run() -> None:
        with trace.use_span(span), pytest.raises(grpc.RpcError, match="connection replaced: a"):
            await call(channel, kind)

    running = asyncio.create_task(run())
    assert await aio_wait_until(hang.begun.is_set)
    return running


@pytest.mark.parametrize("kind", KINDS)
async def test_a_reconnect_is_an_event_of_the_spans_of_the_calls_in_flight(kind, shop, spans):
    async with ReconnectingChannel(shop.target) as channel:
        ended, in_both = spans.tracer.start_span("ended"), spans.tracer.start_span("in both")
        with trace.use_span(ended):
            assert await call(channel, kind) == b"ab"
        running = [await in_flight(channel, kind, shop, in_both) for _ in range(2)]
        old = channel.connections.active
        assert channel.reconnect("a test", drain_timeout=0)
        await asyncio.gather(*running)
        assert old.spans == {}
    assert (events_of(ended), events_of(in_both)) == ([], ["rpcwheel.reconnect"])


async def test_a_reconnect_of_a_subchannel_is_an_event_of_the_calls_on_it(shop, spans):
    instance = ServiceInstance(service="test.Shop", host="127.0.0.1", port=shop.port)
    policy = BalancerPolicy(pick_timeout=WAIT_S)
    async with BalancedChannel("test.Shop", [instance], balancer_policy=policy) as channel:
        span = spans.tracer.start_span("caller")
        running = await in_flight(channel, "unary_unary", shop, span)
        (subchannel,) = channel.subchannels
        assert subchannel.connection.reconnect("a test", drain_timeout=0)
        await running
    assert events_of(span) == ["rpcwheel.reconnect"]


async def test_a_dead_connection_is_an_event_of_the_spans_of_its_calls(spans):
    with FlakyServer() as server:
        async with ReconnectingChannel(server.target) as channel:
            assert await call(channel, "unary_unary") == b"ab"
            server.freeze()
            async with HeartbeatManager(interval=0.05, timeout=0.1) as manager:
                with spans.caller() as span:
                    begun = channel.unary_unary(path("unary_unary"))(b"ab")
                    manager.attach(channel)
                    with pytest.raises(grpc.RpcError, match="no answer to heartbeats"):
                        await begun
                    expected = {"rpcwheel.connection_dead", "rpcwheel.reconnect"}
                    assert await aio_wait_until(lambda: set(events_of(span)) == expected)
