"""Metrics through prometheus_client."""

import shutil
import subprocess

import prometheus_client
import pytest
from prometheus_client.parser import text_string_to_metric_families

from fixtures.programs import run_program
from rpcwheel.events import FailbackQueued, RetryScheduled, emit
from rpcwheel.metrics import Collector
from rpcwheel.metrics.prometheus import exposition, split_method
from rpcwheel.telemetry.switches import metric_sinks

PROMTOOL = shutil.which("promtool")
HOSTILE = '/shop.Orders/Get"} 1\nrpcwheel_retries_total{grpc_method="\\'


def read(registry) -> dict:
    """Return the samples, parsed: by name, and the values of labels in the order of their names."""
    text = prometheus_client.generate_latest(registry).decode()
    return {
        (sample.name, *(sample.labels[name] for name in sorted(sample.labels))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def registry_with(collector) -> prometheus_client.CollectorRegistry:
    registry = prometheus_client.CollectorRegistry()
    registry.register(collector)
    return registry


@pytest.fixture
def registry() -> prometheus_client.CollectorRegistry:
    return registry_with(Collector())


@pytest.mark.parametrize("name", ["/shop.Orders/Scraped", HOSTILE], ids=["plain", "hostile"])
def test_an_event_is_in_the_next_scrape_and_its_name_adds_no_line_and_no_label(registry, name):
    service, _, method = name[1:].partition("/")
    for _ in range(2):
        before = read(registry).get(("rpcwheel_retries_total", method, service), 0)
        emit(RetryScheduled(name, 1, "UNAVAILABLE", 0.1))
        found = read(registry)
        assert found["rpcwheel_retries_total", method, service] == before + 1
        assert {len(key) for key in found if key[0] == "rpcwheel_retries_total"} == {3}


def test_a_name_that_another_library_registered_is_left_to_it():
    emit(FailbackQueued("taken", "push", OSError(), 1.0, 1))
    counter = prometheus_client.Counter("rpcwheel_failback_queued", "of another library", ["queue"])
    try:
        counter.labels("taken").inc(7)
        text, _ = exposition("")
        lines = text.decode().splitlines()
        assert [line for line in lines if 'queued_total{queue="taken"}' in line] == [
            'rpcwheel_failback_queued_total{queue="taken"} 7.0'
        ]
    finally:
        prometheus_client.REGISTRY.unregister(counter)


def test_a_second_collector_in_the_registry_adds_nothing():
    prometheus_client.REGISTRY.register(second := Collector())
    try:
        text = prometheus_client.generate_latest().decode()
    finally:
        prometheus_client.REGISTRY.unregister(second)
    assert text.count("# TYPE rpcwheel_callbacks_failed_total ") == 1


def test_the_exporter_of_opentelemetry_for_prometheus_has_the_metrics_alone():
    class Exporter(prometheus_client.registry.Collector):
        def collect(self):
            return ()

    Exporter.__module__ = "opentelemetry.exporter.prometheus"
    prometheus_client.REGISTRY.register(exporter := Exporter())
    try:
        text = prometheus_client.generate_latest().decode()
    finally:
        prometheus_client.REGISTRY.unregister(exporter)
    assert "rpcwheel_" not in text


def test_a_name_that_is_not_utf_8_does_not_end_the_scrape(registry):
    emit(FailbackQueued("caf\udce9", "push", OSError(), 1.0, 1))
    assert ("rpcwheel_failback_queued_total", "caf?") in read(registry)


@pytest.mark.parametrize("paths", [("/abc", "xyz"), ("a/b", "/a/b")])
def test_methods_with_the_same_labels_are_one_series(paths, call_counts):
    for path in paths:
        counts = call_counts.server.method(path, "unary")
        counts.end(counts.begin(), "OK")
    registry = registry_with(Collector())
    samples = [
        (sample.name, *sample.labels.items())
        for family in registry.collect()
        for sample in family.samples
    ]
    assert len(set(samples)) == len(samples)
    service, method = split_method(paths[0])
    labels = {"grpc_type": "unary", "grpc_service": service, "grpc_method": method}
    assert registry.get_sample_value("grpc_server_started_total", labels) == 2
    assert registry.get_sample_value("grpc_server_handling_seconds_count", labels) == 2
    handled = registry.get_sample_value("grpc_server_handled_total", {**labels, "grpc_code": "OK"})
    assert handled == 2


@pytest.mark.skipif(PROMTOOL is None, reason="promtool (Debian: prometheus) is not installed")
def test_promtool_accepts_the_exposition():
    emit(RetryScheduled(HOSTILE, 1, "UNAVAILABLE", 0.1))
    text = prometheus_client.generate_latest(registry_with(Collector()))
    checked = subprocess.run(
        [PROMTOOL, "check", "metrics"], input=text, capture_output=True, check=False
    )
    assert (checked.returncode, checked.stderr.decode()) == (0, "")


PROGRAM = """
import sys
from rpcwheel.timer import WheelTimer
WheelTimer().stop()
print(*(name for name in ("prometheus_client", "opentelemetry.metrics") if name in sys.modules))
"""


BOTH = ("prometheus", "otel")


@pytest.mark.parametrize(
    ("value", "chosen"),
    [("", BOTH), ("0", ()), ("False", ()), ("otel", ("otel",)), ("nonsense", BOTH)],
)
def test_the_environment_chooses_what_is_switched_on(monkeypatch, caplog, value, chosen):
    monkeypatch.setenv("RPCWHEEL_METRICS", value)
    assert metric_sinks.__wrapped__() == chosen
    assert ("RPCWHEEL_METRICS='nonsense'" in caplog.text) == (value == "nonsense")


@pytest.mark.parametrize(
    ("value", "imported"), [("OFF", "\n"), ("prometheus", "prometheus_client\n")]
)
def test_what_is_not_switched_on_is_not_imported(monkeypatch, value, imported):
    monkeypatch.setenv("RPCWHEEL_METRICS", value)
    assert run_program(PROGRAM) == (imported, "")


def test_a_kit_alone_switches_metrics_on(monkeypatch):
    monkeypatch.delenv("RPCWHEEL_METRICS", raising=False)
    program = "import sys, rpcwheel\nrpcwheel.Kit()\nprint('prometheus_client' in sys.modules)"
    assert run_program(program) == ("True\n", "")


def test_an_old_api_of_opentelemetry_leaves_the_program_and_prometheus_alone():
    old = "import opentelemetry.metrics as m; m.Meter.create_histogram = lambda self, name: None\n"
    output, errors = run_program(old + PROGRAM)
    assert "prometheus_client" in output
    assert "metrics for otel stay off: opentelemetry-api is too old" in errors


def test_the_missing_package_of_the_wanted_metrics_is_named(monkeypatch):
    monkeypatch.setenv("RPCWHEEL_METRICS", "prometheus")
    program = "import sys\nsys.modules['prometheus_client'] = None\n" + PROGRAM
    program += """
import rpcwheel
try:
    rpcwheel.metrics.Collector
except rpcwheel.errors.ExtraMissing as error:
    print(error)
"""
    output, errors = run_program(program)
    assert output.endswith("prometheus_client: pip install 'rpcwheel[prometheus]'\n")
    assert "RPCWHEEL_METRICS=prometheus is not installed: pip install 'rpcwheel[prom" in errors


def test_a_module_that_a_test_has_made_is_not_the_package():
    made = "import sys, types\nsys.modules['prometheus_client'] = types.ModuleType('x')\n"
    assert run_program(made + PROGRAM)[1] == ""


def test_a_star_import_works_without_the_package():
    program = "import sys\nsys.modules['prometheus_client'] = None\nfrom rpcwheel.metrics import *"
    program += "\nprint('start' in dir(), 'Collector' in dir())"
    assert run_program(program) == ("True False\n", "")
