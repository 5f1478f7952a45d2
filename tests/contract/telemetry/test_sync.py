"""Traces of calls of `grpc`: which span gets the events of retries, hedges and reconnects."""

import logging
import threading
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from opentelemetry import trace

from fixtures.foreign_opentelemetry import events_of
from fixtures.shop import UNARY_STREAM, UNARY_UNARY, Fail, Hang, Silent
from fixtures.waiting import WAIT_S, wait_until
from rpcwheel import DeadlinePolicy, DefaultResponsePolicy, HedgingPolicy, Kit, RetryPolicy
from rpcwheel.balancer import BalancedChannel, BalancerPolicy
from rpcwheel.heartbeat import HeartbeatManager
from rpcwheel.instance import ServiceInstance
from rpcwheel.testing import FlakyServer
from rpcwheel.transport import ReconnectingChannel

RETRIED = {
    "timeout": WAIT_S,
    "retry": RetryPolicy(retry_on="UNAVAILABLE", backoff=0.001),
    "idempotent": True,
}
KINDS = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")
FORMS = [
    ("unary_unary", "blocking"), ("unary_unary", "with_call"), ("unary_unary", "future"),
    ("stream_unary", "blocking"), ("stream_unary", "future"),
    ("unary_stream", "stream"), ("stream_stream", "stream"),
]  # fmt: skip


def path(kind: str) -> str:
    return "/test.Shop/" + kind.title().replace("_", "")


def call(channel: grpc.Channel, kind: str, form: str) -> bytes:
    """Make a call that the shop echoes."""
    made = getattr(channel, kind)(path(kind))
    request = iter([b"a", b"b"]) if kind.startswith("stream") else b"ab"
    match form:
        case "blocking":
            return made(request)
        case "with_call":
            return made.with_call(request)[0]
        case "future":
            return made.future(request).result(WAIT_S)
        case _:
            return b"".join(made(request))


MAKERS = {
    "kit.channel": lambda kit, target: kit.channel(target),
    "kit.intercept_channel": lambda kit, target: kit.intercept_channel(
        grpc.insecure_channel(target)
    ),
    "kit.client_interceptors": lambda kit, target: grpc.intercept_channel(
        grpc.insecure_channel(target), *kit.client_interceptors()
    ),
}


@pytest.mark.parametrize(("kind", "form"), FORMS)
@pytest.mark.parametrize("maker", MAKERS.values(), ids=MAKERS)
def test_a_retry_is_an_event_of_the_span_of_the_caller(maker, kind, form, shop, spans):
    shop.then("UNAVAILABLE")
    with Kit(**RETRIED) as kit, maker(kit, shop.target) as channel, spans.caller() as span:
        assert call(channel, kind, form) == b"ab"
    (event,) = span.events
    assert event.name == "rpcwheel.retry"
    assert event.attributes == {
        "rpc.method": path(kind).removeprefix("/"),
        "rpc.response.status_code": "UNAVAILABLE",
        "rpcwheel.attempts": 1,
        "rpcwheel.delay_s": event.attributes["rpcwheel.delay_s"],
    }


@pytest.mark.parametrize(("kind", "form"), FORMS)
@pytest.mark.parametrize("maker", MAKERS.values(), ids=MAKERS)
def test_with_an_instrumentation_outside_its_span_gets_the_retry(
    maker, kind, form, shop, spans, theirs
):
    shop.then("UNAVAILABLE")
    with Kit(**RETRIED) as kit, maker(kit, shop.target) as inner, spans.caller() as span:
        assert call(theirs.around(inner), kind, form) == b"ab"
    (client,) = spans.clients(1)
    assert (events_of(span), events_of(client)) == ([], ["rpcwheel.retry"])
    assert client.parent.span_id == span.context.span_id


INNER_MAKERS = {
    "kit.intercept_channel": lambda kit, channel: kit.intercept_channel(channel),
    "kit.client_interceptors": lambda kit, channel: grpc.intercept_channel(
        channel, *kit.client_interceptors()
    ),
}


@pytest.mark.parametrize(
    ("kind", "form"), [one for one in FORMS if one[0] != "unary_stream"]
)  # OpenTelemetry makes such a call a generator, which is not retried
@pytest.mark.parametrize("maker", INNER_MAKERS.values(), ids=INNER_MAKERS)
def test_with_an_instrumentation_inside_each_attempt_is_a_child_of_the_caller(
    maker, kind, form, shop, spans, theirs
):
    shop.then("UNAVAILABLE")
    inner = theirs.around(grpc.insecure_channel(shop.target))
    with Kit(**RETRIED) as kit, inner, spans.caller() as span:
        assert call(maker(kit, inner), kind, form) == b"ab"
    attempts = spans.clients(2)
    assert events_of(span) == ["rpcwheel.retry"]
    for attempt in attempts:
        assert (events_of(attempt), attempt.parent.span_id) == ([], span.context.span_id)


@pytest.mark.parametrize("form", ["blocking", "future"])
def test_a_hedge_is_an_event_of_the_span_of_the_caller(form, shop, spans):
    shop.then(Hang())
    hedged = HedgingPolicy(delay=0.001, max_attempts=2)
    settings = {"timeout": WAIT_S, "hedging": hedged, "idempotent": True}
    with Kit(**settings) as kit, kit.channel(shop.target) as channel, spans.caller() as span:
        assert call(channel, "unary_unary", form) == b"ab"
    (event,) = span.events
    assert event.name == "rpcwheel.hedge"
    assert event.attributes == {"rpc.method": "test.Shop/UnaryUnary", "rpcwheel.attempt": 2}


@pytest.mark.parametrize("form", ["blocking", "future"])
def test_a_refused_retry_and_a_default_response_are_events(form, shop, spans):
    shop.then(Fail("UNAVAILABLE", details="down\n\x1b[31m for" + 1000 * "!"))
    default = DefaultResponsePolicy(on="UNAVAILABLE", default=b"none")
    settings = RETRIED | {"idempotent": False, "default_response": default}
    with Kit(**settings) as kit, kit.channel(shop.target) as channel, spans.caller() as span:
        assert call(channel, "unary_unary", form) == b"none"
    assert events_of(span) == ["rpcwheel.retry_stopped", "rpcwheel.default_response"]
    attributes = span.events[1].attributes
    assert attributes["error.type"] == "UNAVAILABLE"
    assert attributes["rpcwheel.error"].startswith("UNAVAILABLE: down \\x1b[31m for!")
    assert len(attributes["rpcwheel.error"]) == 243


def test_a_stalled_stream_is_an_event_of_the_span_of_the_caller(shop, spans):
    shop.then(Silent(after=1))
    with (
        Kit(timeout=DeadlinePolicy(message_timeout=0.05)) as kit,
        kit.channel(shop.target) as channel,
        spans.caller() as span,
        pytest.raises(grpc.RpcError, match="message_timeout"),
    ):
        call(channel, "unary_stream", "stream")
    assert events_of(span) == ["rpcwheel.stream_stalled"]


# Connections


def in_flight(channel, kind, form, shop, span):
    """Begin a call that hangs, on a thread with this current span."""
    hang = Hang()
    shop.then(hang)

    def run() -> None:
        with trace.use_span(span), pytest.raises(grpc.RpcError, match="connection replaced: a"):
            call(channel, kind, form)

    pool = ThreadPoolExecutor(1)
    running = pool.submit(run)
    pool.shutdown(wait=False)
    assert hang.begun.wait(WAIT_S)
    return running


@pytest.mark.parametrize(
    ("kind", "form"), [("unary_unary", "blocking"), ("unary_unary", "future"),
                       ("stream_stream", "stream")],
)  # fmt: skip
def test_a_reconnect_is_an_event_of_the_spans_of_the_calls_in_flight(kind, form, shop, spans):
    with ReconnectingChannel(shop.target) as channel:
        ended, in_both = spans.tracer.start_span("ended"), spans.tracer.start_span("in both")
        with trace.use_span(ended):
            assert call(channel, kind, form) == b"ab"
        running = [in_flight(channel, kind, form, shop, in_both) for _ in range(2)]
        old = channel.connections.active
        assert channel.reconnect("a test", drain_timeout=0)
        for one in running:
            one.result(WAIT_S)
        assert wait_until(lambda: old.spans == {})
    assert ended.events == ()
    (event,) = in_both.events
    assert event.name == "rpcwheel.reconnect"
    assert event.attributes == {
        "rpcwheel.target": shop.target, "rpcwheel.number": 2, "rpcwheel.reason": "a test",
        "rpcwheel.calls": 2,
    }  # fmt: skip


def test_a_reconnect_of_a_subchannel_is_an_event_of_the_calls_on_it(shop, spans):
    instance = ServiceInstance(service="test.Shop", host="127.0.0.1", port=shop.port)
    policy = BalancerPolicy(pick_timeout=WAIT_S)
    with BalancedChannel("test.Shop", [instance], balancer_policy=policy) as channel:
        span = spans.tracer.start_span("caller")
        running = in_flight(channel, "unary_unary", "blocking", shop, span)
        (subchannel,) = channel.subchannels
        assert subchannel.connection.reconnect("a test", drain_timeout=0)
        running.result(WAIT_S)
    assert events_of(span) == ["rpcwheel.reconnect"]


def test_a_reconnect_before_the_end_of_a_call_is_followed_by_its_retry(shop, spans):
    with Kit(**RETRIED) as kit, ReconnectingChannel(shop.target) as connection:
        channel, hang = kit.intercept_channel(connection), Hang()
        shop.then(hang)
        with spans.caller() as span:
            future = channel.unary_unary(UNARY_UNARY).future(b"ab")
            assert hang.begun.wait(WAIT_S)
            assert connection.reconnect("a test", drain_timeout=0)
            assert future.result(WAIT_S) == b"ab"
    assert events_of(span) == ["rpcwheel.reconnect", "rpcwheel.retry"]


def test_a_dead_connection_is_an_event_of_the_spans_of_its_calls(spans):
    with FlakyServer() as server, ReconnectingChannel(server.target) as channel:
        assert call(channel, "unary_unary", "blocking") == b"ab"
        server.freeze()
        with HeartbeatManager(interval=0.05, timeout=0.1) as manager, spans.caller() as span:
            future = channel.unary_unary(UNARY_UNARY).future(b"ab")
            manager.attach(channel)
            assert "no answer to heartbeats" in future.exception(WAIT_S).details()
            expected = {"rpcwheel.connection_dead", "rpcwheel.reconnect"}
            assert wait_until(lambda: set(events_of(span)) == expected)


def test_a_span_that_has_ended_gets_no_event_of_its_call(shop, spans, caplog):
    with ReconnectingChannel(shop.target) as channel:
        hang = Hang()
        shop.then(hang)
        with spans.caller() as span:
            future = channel.unary_unary(UNARY_UNARY).future(b"ab")
        assert hang.begun.wait(WAIT_S)
        assert channel.reconnect("a test", drain_timeout=0)
        assert future.exception(WAIT_S).code() is grpc.StatusCode.UNAVAILABLE
    assert span.events == ()
    assert [record.name for record in caplog.records if "opentelemetry" in record.name] == []


# Logs


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
        assert call(channel, "unary_unary", "future") == b"ab"
    ((event, span_id, thread),) = log.seen
    assert (event, span_id) == ("RetryScheduled", span.context.span_id)
    assert thread.startswith("rpcwheel-worker")


# Exceptions


class Broken:
    """A module of OpenTelemetry in which everything raises."""

    def __getattr__(self, name):
        raise RuntimeError(f"broken: {name}")


def test_exceptions_of_a_tracer_do_not_affect_calls(shop, spans, monkeypatch, caplog):
    monkeypatch.setattr("rpcwheel.telemetry.tracing._Api.trace", Broken())
    monkeypatch.setattr("rpcwheel.telemetry.tracing._REPORTED", set())
    for _ in range(2):
        shop.then("UNAVAILABLE")
        with Kit(**RETRIED) as kit, kit.channel(shop.target) as channel:
            assert call(channel, "unary_unary", "future") == b"ab"
    reports = [one for one in caplog.messages if "OpenTelemetry raised in begin_call" in one]
    assert len(reports) == 1
    caplog.clear()  # the frames of exceptions keep channels alive


def test_calls_without_a_recording_span_are_not_noted(shop, spans):
    hang = Hang()
    shop.then(hang)
    with ReconnectingChannel(shop.target) as channel:
        future = channel.unary_unary(UNARY_UNARY).future(b"ab")
        assert hang.begun.wait(WAIT_S)
        assert channel.connections.active.spans == {}
        future.cancel()
        with spans.caller():
            stream = channel.unary_stream(UNARY_STREAM)(b"ab")
            assert len(channel.connections.active.spans) == 1
            assert b"".join(stream) == b"ab"
        assert wait_until(lambda: channel.connections.active.spans == {})
