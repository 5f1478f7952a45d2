"""The switch of traces, and the names and attributes of span events."""

import math
import re
from pathlib import Path

import pytest

from rpcwheel.events import DefaultResponseUsed, FailbackQueued, HedgeSent, RetryScheduled
from rpcwheel.telemetry import switches, tracing

DOCUMENT = (Path(__file__).parents[3] / "docs" / "observability.md").read_text()


class Span:
    """A span that keeps its events."""

    def __init__(self, *, is_recording: bool = True) -> None:
        self.events: list[tuple[str, dict]] = []
        self.is_recording = lambda: is_recording

    def add_event(self, name: str, attributes: dict) -> None:
        self.events.append((name, attributes))


@pytest.fixture
def off(monkeypatch):
    """Traces are off until the test starts them."""
    sinks = []
    monkeypatch.setattr(tracing._Api, "trace", None)
    monkeypatch.setattr(tracing, "add_sink", sinks.append)
    return sinks


def test_the_document_lists_each_span_event():
    rows = re.findall(r"^\| `(rpcwheel\.\w+)` \| `(\w+)` \| ", DOCUMENT, re.MULTILINE)
    assert [*rows] == [(name, kind.__name__) for kind, name in tracing.NAMES.items()]


@pytest.mark.parametrize("value", ["off", " OFF "])
def test_the_environment_keeps_traces_off(value, monkeypatch):
    pytest.importorskip("opentelemetry.trace")
    monkeypatch.delenv("RPCWHEEL_METRICS", raising=False)
    assert switches.traces_allowed()
    monkeypatch.setenv("RPCWHEEL_TRACES", value)
    assert not switches.traces_allowed()


def test_an_unknown_value_of_the_variable_is_reported_and_has_no_effect(monkeypatch, caplog):
    pytest.importorskip("opentelemetry.trace")
    monkeypatch.delenv("RPCWHEEL_METRICS", raising=False)
    monkeypatch.setenv("RPCWHEEL_TRACES", "of\nf")
    assert switches.traces_allowed()
    assert r"RPCWHEEL_TRACES='of\nf' is not known and has no effect; it may be off" in caplog.text


def test_nothing_happens_before_start(off):
    spans = {}
    metadata = [("traceparent", "00-a-b-01")]
    assert tracing.begin_call(spans) is None
    assert spans == {}
    assert tracing.begin_delivery("queue", "/shop.Orders/Push", 2) is None
    assert tracing.with_current_trace(metadata) == tuple(metadata)
    span = Span()
    tracing.add_to_calls(HedgeSent("/shop.Orders/Get", 2), {1: span})
    assert span.events == []


@pytest.mark.parametrize(
    ("event", "attributes"),
    [
        (
            RetryScheduled("/shop.Orders/Get", 1, "UNAVAILABLE", 0.25),
            {
                "rpc.method": "shop.Orders/Get",
                "rpc.response.status_code": "UNAVAILABLE",
                "rpcwheel.attempts": 1,
                "rpcwheel.delay_s": 0.25,
            },
        ),
        (
            DefaultResponseUsed("/shop.\x1b[31m/" + 600 * "m", ValueError("a\nb")),
            {
                "rpc.method": "shop.\\x1b[31m/" + 485 * "m" + "...",
                "error.type": "ValueError",
                "rpcwheel.error": "ValueError: a b",
            },
        ),
        (
            FailbackQueued("orders", "shop.push", OSError(), math.inf, 1),
            {
                "rpcwheel.name": "orders",
                "rpcwheel.function": "shop.push",
                "error.type": "OSError",
                "rpcwheel.error": "OSError",
                "rpcwheel.pending": 1,
            },
        ),
    ],
)
def test_attributes_are_escaped_cut_and_without_infinite_times(event, attributes):
    assert tracing._attributes(event) == attributes


def test_several_calls_with_one_span_add_one_event_and_ended_spans_get_none(monkeypatch):
    monkeypatch.setattr(tracing._Api, "trace", object())
    span, ended = Span(), Span(is_recording=False)
    tracing.add_to_calls(HedgeSent("/shop.Orders/Get", 2), {1: span, 2: span, 3: ended})
    assert (len(span.events), ended.events) == (1, [])


class Broken:
    """A part of OpenTelemetry in which everything raises."""

    def __getattr__(self, name):
        raise RuntimeError(f"broken: {name}")


def test_exceptions_of_opentelemetry_are_reported_once_and_have_no_effect(monkeypatch, caplog):
    for part in ("trace", "tracer", "propagate", "context"):
        monkeypatch.setattr(tracing._Api, part, Broken())
    monkeypatch.setattr(tracing, "_REPORTED", set())
    metadata = (("traceparent", "00-a-b-01"),)
    for _ in range(2):
        assert tracing.begin_call({}) is None
        assert tracing.begin_delivery("queue", "/shop.Orders/Push", 2) is None
        assert tracing.carrier() == {}
        assert tracing.with_current_trace(metadata) == metadata
        tracing.add_to_calls(HedgeSent("/shop.Orders/Get", 2), {1: Broken()})
        for act in (tracing.make_stored_current, tracing.make_current, tracing.end):
            act(Broken())
        tracing.set_outcome(Broken(), "delivered")
    reports = [text for text in caplog.messages if "OpenTelemetry raised in" in text]
    assert len(reports) == len(set(reports)) == 9
