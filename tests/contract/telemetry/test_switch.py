"""What a program with and without OpenTelemetry's packages imports."""

import pytest

from fixtures.programs import run_program

CALL = """
import sys

if "without" in sys.argv:
    sys.modules["opentelemetry"] = None  # as if it were not installed

import rpcwheel
from rpcwheel.testing import FlakyServer

retry = rpcwheel.RetryPolicy(retry_on="UNAVAILABLE", backoff=0.001)
failback = rpcwheel.FailbackPolicy(retry_on="NOT_FOUND", backoff=0.001, default=b"later")
with FlakyServer() as server:
    server.fail(times=1)
    with rpcwheel.Kit(timeout=30, retry=retry, failback=failback, idempotent=True) as kit:
        with rpcwheel.transport.ReconnectingChannel(server.target) as channel:
            call = kit.intercept_channel(channel).unary_unary("/shop.Orders/Get")
            assert call(b"a") == b"a"
            server.fail(times=1, code="NOT_FOUND")
            assert call(b"b") == b"later"
            assert kit.flush(30)
            assert channel.reconnect("a test")
    assert len(server.calls) == 4
print("on" if rpcwheel.telemetry.tracing._Api.trace is not None else "off")
print(sorted(name for name in sys.modules if name.startswith("opentelemetry.")))
"""


@pytest.mark.parametrize(
    ("argument", "metrics"),
    [("without", ""), ("", "off")],
    ids=["not installed", "RPCWHEEL_METRICS=off"],
)
def test_traces_are_off_if_opentelemetry_is_not_installed_or_not_allowed(
    argument, metrics, monkeypatch
):
    monkeypatch.delenv("RPCWHEEL_TRACES", raising=False)
    monkeypatch.setenv("RPCWHEEL_METRICS", metrics)
    assert run_program(CALL, argument)[0] == "off\n[]\n"


FIRST_RETRY = """
import grpc
import rpcwheel
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from rpcwheel.testing import FlakyServer

trace.set_tracer_provider(TracerProvider())
retry = rpcwheel.RetryPolicy(retry_on="UNAVAILABLE", backoff=0.001)
with FlakyServer() as server, rpcwheel.Kit(timeout=30, retry=retry, idempotent=True) as kit:
    server.fail(times=1)
    with grpc.insecure_channel(server.target) as channel:
        call = grpc.intercept_channel(channel, *kit.client_interceptors()).unary_unary("/a.B/C")
        with trace.get_tracer("test").start_as_current_span("caller") as span:
            assert call(b"a") == b"a"
print(*[event.name for event in span.events])
"""


def test_traces_are_on_otherwise_from_the_first_retry_of_a_process(monkeypatch):
    for name in ("RPCWHEEL_METRICS", "RPCWHEEL_TRACES"):
        monkeypatch.delenv(name, raising=False)
    assert run_program(FIRST_RETRY)[0] == "rpcwheel.retry\n"
