"""Traces of calls: which span gets the events of retries, hedges, reconnects."""

import logging
import threading

import grpc
import pytest
from opentelemetry import trace

import rpcwheel
import rpcwheel.heartbeat.aio
import rpcwheel.transport.aio
from fixtures.call_counts import codes_of
from fixtures.foreign_opentelemetry import events_of
from fixtures.instrumented_channels import RETRIED, answer, begin
from fixtures.shop import UNARY_STREAM, UNARY_UNARY, Fail, Hang, Silent
from fixtures.waiting import WAIT_S, wait_until
from fixtures.worlds import KINDS, METHODS, AioWorld, SyncWorld
from rpcwheel import DeadlinePolicy, DefaultResponsePolicy, HedgingPolicy, Kit
from rpcwheel.testing import FlakyServer
from rpcwheel.transport import ReconnectingChannel

EACH_STYLE = [
    (SyncWorld, "unary_unary", "blocking"),
    (SyncWorld, "unary_unary", "held"),
    (AioWorld, "unary_unary", "held"),
]
each_style = pytest.mark.parametrize(("world", "kind", "style"), EACH_STYLE, indirect=["world"])

EACH_API = [
    (SyncWorld, "channel", "unary_unary", "blocking"),
    (SyncWorld, "channel", "unary_unary", "with_call"),
    (SyncWorld, "channel", "unary_stream", "held"),
    (SyncWorld, "channel", "stream_unary", "held"),
    (SyncWorld, "interceptors", "unary_unary", "held"),
    (SyncWorld, "interceptors", "stream_unary", "blocking"),
    (SyncWorld, "interceptors", "stream_stream", "held"),
    (SyncWorld, "kit", "unary_unary", "held"),
    (SyncWorld, "kit", "stream_stream", "held"),
    (AioWorld, "channel", "unary_unary", "held"),
    (AioWorld, "channel", "stream_stream", "held"),
    (AioWorld, "interceptors", "unary_stream", "held"),
    (AioWorld, "interceptors", "stream_unary", "held"),
    (AioWorld, "kit", "unary_unary", "held"),
    (AioWorld, "kit", "stream_stream", "held"),
]
each_api = pytest.mark.parametrize(("world", "api", "kind", "style"), EACH_API, indirect=["world"])


@each_api
def test_with_an_instrumentation_outside_its_span_gets_the_retry(
    shop, world, call_counts, open_channel, spans, theirs, api, kind, style
):
    shop.then(Fail("UNAVAILABLE", read=True))
    channel = open_channel(api, outer=theirs)
    with spans.caller() as span:
        assert answer(world, channel, kind, style) == b"ab"
    (client,) = spans.clients(1)
    assert (events_of(span), events_of(client)) == ([], ["rpcwheel.retry"])
    assert client.parent.span_id == span.context.span_id
    check_counts(call_counts)


def check_counts(counts) -> None:
    """Check that a call and its two attempts were counted."""
    assert codes_of(counts.client) == {"OK": 1}
    assert codes_of(counts.attempts) == {"UNAVAILABLE": 1, "OK": 1}


@pytest.mark.parametrize(
    ("world", "api", "kind", "style"),
    [row for row in EACH_API if (row[0], row[2]) != (SyncWorld, "unary_stream")],
    indirect=["world"],
)  # OpenTelemetry makes such a call a generator, which is not retried
def test_with_an_instrumentation_inside_each_attempt_is_a_child_of_the_caller(
    shop, world, call_counts, open_channel, spans, theirs, api, kind, style
):
    shop.then(Fail("UNAVAILABLE", read=True))
    channel = open_channel(api, inner=theirs)
    with spans.caller() as span:
        assert answer(world, channel, kind, style) == b"ab"
    attempts = spans.clients(2)
    (event,) = span.events
    assert event.name == "rpcwheel.retry"
    assert event.attributes == {
        "rpc.method": METHODS[kind].removeprefix("/"),
        "rpc.response.status_code": "UNAVAILABLE",
        "rpcwheel.attempts": 1,
        "rpcwheel.delay_s": event.attributes["rpcwheel.delay_s"],
    }
    for attempt in attempts:
        assert (events_of(attempt), attempt.parent.span_id) == ([], span.context.span_id)
    check_counts(call_counts)


@each_style
def test_a_hedge_is_an_event_of_the_span_of_the_caller(
    shop, world, open_channel, spans, kind, style
):
    shop.then(Hang())
    hedging = HedgingPolicy(delay=0.001, max_attempts=2)
    with spans.caller() as span:
        channel = open_channel(retry=None, hedging=hedging)
        assert answer(world, channel, kind, style) == b"ab"
    (event,) = span.events
    assert event.name == "rpcwheel.hedge"
    assert event.attributes == {"rpc.method": "test.Shop/UnaryUnary", "rpcwheel.attempt": 2}


@each_style
def test_a_refused_retry_and_a_default_response_are_events(
    shop, world, open_channel, spans, kind, style
):
    shop.then(Fail("UNAVAILABLE", details="down\n\x1b[31m for" + 1000 * "!"))
    default = DefaultResponsePolicy(on="UNAVAILABLE", default=b"none")
    channel = open_channel(idempotent=False, default_response=default)
    with spans.caller() as span:
        assert answer(world, channel, kind, style) == b"none"
    assert events_of(span) == ["rpcwheel.retry_stopped", "rpcwheel.default_response"]
    attributes = span.events[1].attributes
    assert attributes["error.type"] == "UNAVAILABLE"
    assert attributes["rpcwheel.error"].startswith("UNAVAILABLE: down \\x1b[31m for!")
    assert len(attributes["rpcwheel.error"]) == 243


def test_a_stalled_stream_is_an_event_of_the_span_of_the_caller(shop, world, open_channel, spans):
    shop.then(Silent(after=1))
    channel = open_channel(timeout=DeadlinePolicy(message_timeout=0.05), retry=None)
    with spans.caller() as span, pytest.raises(grpc.RpcError, match="message_timeout"):
        answer(world, channel, "unary_stream")
    assert events_of(span) == ["rpcwheel.stream_stalled"]


# --- Connections ---


@pytest.fixture
def reconnecting(world):
    def make(target):
        transport = rpcwheel.transport if world.name == "sync" else rpcwheel.transport.aio
        return world.keep(world.do(transport.ReconnectingChannel, target))

    return make


def in_flight(world, channel, kind, style, shop, span):
    """Begin a call that hangs, with this current span."""
    shop.then(hang := Hang())
    with trace.use_span(span):
        call = begin(world, channel, kind, style)
    assert hang.begun.wait(WAIT_S)
    return call


@pytest.mark.parametrize(
    ("world", "kind", "style"),
    [
        *EACH_STYLE,
        (SyncWorld, "stream_stream", "held"),
        *((AioWorld, kind, "held") for kind in KINDS[1:]),
    ],
    indirect=["world"],
)
def test_a_reconnect_is_an_event_of_the_spans_of_the_calls_in_flight(
    shop, world, reconnecting, spans, kind, style
):
    channel = reconnecting(shop.target)
    ended, in_both = spans.tracer.start_span("ended"), spans.tracer.start_span("in both")
    with trace.use_span(ended):
        assert answer(world, channel, kind, style) == b"ab"
    old = channel.transports.active
    wait_until(lambda: old.spans == {})
    calls = [in_flight(world, channel, kind, style, shop, in_both) for _ in range(2)]
    assert world.do(channel.reconnect, "a test", drain_timeout=0)
    for call in calls:
        assert call.error().details().startswith("connection replaced: a test")
    wait_until(lambda: old.spans == {})
    assert ended.events == ()
    (event,) = in_both.events
    assert event.name == "rpcwheel.reconnect"
    assert event.attributes == {
        "rpcwheel.target": shop.target, "rpcwheel.number": 2, "rpcwheel.reason": "a test",
        "rpcwheel.calls": 2,
    }  # fmt: skip


def test_a_dead_connection_is_an_event_of_the_spans_of_its_calls(world, reconnecting, spans):
    heartbeat = rpcwheel.heartbeat if world.name == "sync" else rpcwheel.heartbeat.aio
    with FlakyServer() as server:
        channel = reconnecting(server.target)
        assert answer(world, channel) == b"ab"
        server.freeze()
        manager = world.keep(world.do(heartbeat.HeartbeatManager, interval=0.05, timeout=0.1))
        with spans.caller() as span:
            call = world.call(channel)
            world.do(manager.attach, channel)
            assert "no answer to heartbeats" in call.error().details()
            expected = {"rpcwheel.connection_dead", "rpcwheel.reconnect"}
            wait_until(lambda: set(events_of(span)) == expected)


# --- Logs ---


class SpanOfRecord(logging.Handler):
    """Keeps which span was current when a record was emitted, as OpenTelemetry's logging does."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, int, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        span_id = trace.get_current_span().get_span_context().span_id
        self.seen.append((record.rpcwheel_event, span_id, threading.current_thread().name))


@pytest.fixture
def log():
    logger, handler = logging.getLogger("rpcwheel"), SpanOfRecord()
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield handler
    logger.removeHandler(handler)
    logger.setLevel(logging.NOTSET)


def test_log_records_of_a_worker_have_the_span_of_the_caller(shop, spans, log):
    shop.then("UNAVAILABLE")
    with Kit(**RETRIED) as kit, kit.channel(shop.target) as channel, spans.caller() as span:
        assert channel.unary_unary(UNARY_UNARY).future(b"ab").result(WAIT_S) == b"ab"
    ((event, span_id, thread),) = log.seen
    assert (event, span_id) == ("RetryScheduled", span.context.span_id)
    assert thread.startswith("rpcwheel-worker")


# --- Exceptions ---


def test_calls_without_a_recording_span_are_not_noted(shop, spans):
    shop.then(hang := Hang())
    with ReconnectingChannel(shop.target) as channel:
        future = channel.unary_unary(UNARY_UNARY).future(b"ab")
        assert hang.begun.wait(WAIT_S)
        assert channel.transports.active.spans == {}
        future.cancel()
        with spans.caller():
            stream = channel.unary_stream(UNARY_STREAM)(b"ab")
            assert len(channel.transports.active.spans) == 1
            assert b"".join(stream) == b"ab"
        assert wait_until(lambda: channel.transports.active.spans == {})
