"""Prints the table of all metrics for the documentation: `python -m rpcwheel.metrics`."""

from .table import METHOD, METRICS, Metric, otel_name


def _row(metric: Metric) -> str:
    suffix = "_total" if metric.kind == "counter" else ""
    labels = ", ".join(
        "`grpc_service`, `grpc_method`" if label == METHOD else f"`{label}`"
        for label in metric.labels
    )
    name = otel_name(metric)
    other = f"`{name}`" if name else "-"
    return f"| `{metric.name}{suffix}` | {metric.kind} | {labels} | {metric.help} | {other} |"


def table() -> str:
    """Return the table as Markdown."""
    rows = ["| Prometheus | kind | labels | what | OpenTelemetry |", "|---|---|---|---|---|"]
    return "\n".join([*rows, *map(_row, METRICS)])


if __name__ == "__main__":
    print(table())
