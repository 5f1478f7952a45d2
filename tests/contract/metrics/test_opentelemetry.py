"""Metrics through the API and the SDK of OpenTelemetry."""

import threading
from collections.abc import Iterator

import pytest
from opentelemetry.sdk.metrics import Histogram, MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from fixtures.forks import holds_in_child
from fixtures.waiting import wait_until
from rpcwheel.events import FailbackDelivered, RetryScheduled, TaskFailed, emit
from rpcwheel.metrics import opentelemetry
from rpcwheel.metrics.table import METRICS, otel_name
from rpcwheel.telemetry import components
from rpcwheel.timer import WheelTimer

GET = "/shop.Orders/Measured"


@pytest.fixture
def reader() -> Iterator[InMemoryMetricReader]:
    reader = InMemoryMetricReader()
    stop = opentelemetry.start(MeterProvider([reader]))
    yield reader
    stop()


def points(reader: InMemoryMetricReader, name: str) -> list:
    data = reader.get_metrics_data()
    scopes = data.resource_metrics[0].scope_metrics if data else ()
    (scope,) = (one for one in scopes if one.scope.name == "rpcwheel")
    return [point for one in scope.metrics if one.name == name for point in one.data.data_points]


def test_the_duration_of_a_call_has_the_attributes_of_the_semantic_conventions(reader):
    calls = components.count_calls().client.method(GET, "unary")
    for code in ("OK", "NOT_FOUND"):
        calls.end(calls.begin(), code)
    found = points(reader, "rpc.client.call.duration")
    assert [(dict(point.attributes), point.count) for point in found] == [
        (
            {
                "rpc.system.name": "grpc",
                "rpc.method": "shop.Orders/Measured",
                "rpc.response.status_code": "OK",
            },
            1,
        ),
        (
            {
                "rpc.system.name": "grpc",
                "rpc.method": "shop.Orders/Measured",
                "rpc.response.status_code": "NOT_FOUND",
                "error.type": "NOT_FOUND",
            },
            1,
        ),
    ]
    assert found[0].explicit_bounds == (
        *(0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10),
    )


def test_the_duration_of_an_attempt_has_the_attributes_of_gRFC_A66(reader):  # noqa: N802
    attempts = components.count_calls().attempts.method(GET, "unary")
    attempts.end(attempts.begin(), "UNAVAILABLE")
    (point,) = points(reader, "grpc.client.attempt.duration")
    assert dict(point.attributes) == {
        "grpc.method": "shop.Orders/Measured",
        "grpc.status": "UNAVAILABLE",
    }


@pytest.mark.parametrize(
    ("code", "is_error"), [("NOT_FOUND", False), ("INTERNAL", True), ("OK", False)]
)
def test_not_every_status_is_an_error_of_a_server(reader, code, is_error):
    served = components.count_calls().server.method(GET, "unary")
    served.end(served.begin(), code)
    (point,) = points(reader, "rpc.server.call.duration")
    assert ("error.type" in point.attributes) == is_error


def test_after_the_stop_nothing_is_recorded():
    reader = InMemoryMetricReader()
    stop = opentelemetry.start(MeterProvider([reader]))
    stop()
    calls = components.count_calls().client.method(GET, "unary")
    calls.end(calls.begin(), "OK")
    emit(FailbackDelivered("measured", "push", 2, 12.0))
    assert points(reader, "rpc.client.call.duration") == []
    assert points(reader, "rpcwheel.failback.delivery") == []


def test_every_metric_without_labels_is_in_each_collection(reader):
    expected = {otel_name(one) for one in METRICS if one.kind == "counter" and not one.labels}
    for _ in range(2):
        data = reader.get_metrics_data()
        scopes = data.resource_metrics[0].scope_metrics
        found = {one.name for scope in scopes for one in scope.metrics}
        assert expected <= found <= {otel_name(one) for one in METRICS}


def test_each_collection_has_the_events_before_it(reader):
    def retries() -> int:
        found = points(reader, "rpcwheel.retries")
        method = "shop.Orders/Collected"
        return sum(point.value for point in found if point.attributes["rpc.method"] == method)

    for expected in (1, 2, 3):
        emit(RetryScheduled("/shop.Orders/Collected", 1, "UNAVAILABLE", 0.1))
        assert retries() == expected
    emit(FailbackDelivered("measured", "push", 2, 12.0))
    (point,) = points(reader, "rpcwheel.failback.delivery")
    assert (dict(point.attributes), point.sum) == ({"rpcwheel.queue": "measured"}, 12.0)


def test_what_can_be_added_up_is_no_gauge(reader):
    with WheelTimer(name="measured"):
        data = reader.get_metrics_data().resource_metrics[0].scope_metrics
    kinds = {one.name: type(one.data).__name__ for scope in data for one in scope.metrics}
    assert kinds["rpcwheel.timer.pending"] == "Sum"
    assert kinds["rpcwheel.timer.max_lateness"] == "Gauge"


def test_durations_are_recorded_on_a_worker_so_that_calls_take_no_locks_of_an_sdk(
    reader, monkeypatch, rpcwheel_events
):
    threads = []

    def record(*_, **__):
        threads.append(threading.current_thread())
        raise OSError  # a defect of the SDK

    monkeypatch.setattr(Histogram, "record", record)
    calls = components.count_calls().client.method(GET, "unary")
    for _ in range(opentelemetry.MAX_QUEUED):
        calls.end(calls.begin(), "OK")
    assert wait_until(lambda: rpcwheel_events.of(TaskFailed))  # the worker continues
    assert threads
    assert threading.current_thread() not in threads


def test_durations_that_wait_to_be_recorded_are_not_recorded_by_a_forked_child_too(reader):
    calls = components.count_calls().client.method(GET, "unary")
    calls.end(calls.begin(), "OK")
    assert holds_in_child(lambda: not points(reader, "rpc.client.call.duration"))
    assert [point.count for point in points(reader, "rpc.client.call.duration")] == [1]
