"""The table of metrics: names, labels and sources."""

import dataclasses
import re
import typing
from pathlib import Path

from rpcwheel.metrics.__main__ import table
from rpcwheel.metrics.table import EVENTS, METRICS, otel_name

DOCUMENT = Path(__file__).parents[3] / "docs" / "observability.md"


def test_names_are_unique():
    assert len({metric.name for metric in METRICS}) == len(METRICS)
    names = [name for metric in METRICS if (name := otel_name(metric)) is not None]
    assert len(set(names)) == len(names)


def test_prometheus_accepts_the_names_and_the_labels():
    for metric in METRICS:
        assert re.fullmatch("(rpcwheel|grpc_client|grpc_server)(_[a-z]+)+", metric.name)
        assert all(re.fullmatch("[a-z]+(_[a-z]+)*", label) for label in metric.labels), metric
        assert not metric.name.endswith(("_total", "_count", "_sum", "_bucket"))


def test_histograms_have_bounds_in_order_and_other_metrics_have_none():
    for metric in METRICS:
        assert bool(metric.bounds) == (metric.kind == "histogram"), metric
        assert list(metric.bounds) == sorted(set(metric.bounds)), metric


def test_events_have_the_fields_of_labels_and_amounts():
    for metric, event, count, labels in EVENTS:
        fields = {field.name: field.type for field in dataclasses.fields(event)}
        for name, value in vars(event).items():
            if isinstance(value, property):
                fields[name] = typing.get_type_hints(value.fget)["return"]
        assert {fields[name] for name in labels} <= {str}, metric
        assert not count.amount or fields[count.amount] in (int, float), metric


def test_no_label_has_values_that_peers_or_errors_choose():
    forbidden = {"peer", "instance", "error", "function", "key", "details", "answer", "task"}
    assert not forbidden & {field for source in EVENTS for field in source.fields}


def test_the_documentation_has_the_table():
    """`python -m rpcwheel.metrics` prints it."""
    assert table() in DOCUMENT.read_text()
