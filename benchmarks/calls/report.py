"""The page that a run leaves: `docs/benchmarks/calls.md`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version

from benchmarks.calls.scale import MEASURES, UNARY, Results, Row, Scale
from benchmarks.calls.subjects import TIMEOUT_S, YARDSTICK, Skipped
from benchmarks.calls.verdict import TARGETS
from benchmarks.calls.wire import PAYLOAD
from benchmarks.timer import machine
from benchmarks.timer.tables import figure, table

PACKAGES = (
    "grpcio",
    "grpc-interceptor",
    "opentelemetry-instrumentation-grpc",
    "opentelemetry-sdk",
)

TITLES = {
    ("client", "sync"): "Client, `grpc`",
    ("client", "aio"): "Client, `grpc.aio`",
    ("server", "sync"): "Server, `grpc`",
    ("server", "aio"): "Server, `grpc.aio`",
}

NOTES = """\
How it is measured:

* Over loopback, {payload} bytes a message, without serializers, to a server in another process. The
  subjects take turns in bursts of {calls} calls, or of {streams} × {messages} messages of streams,
  in another order each round; {rounds} rounds of calls, {stream_rounds} of streams.
* Each of the two processes is held to a processor of its own.
* CPU: of the whole process that is measured, gRPC's threads too: the client's in the tables of
  clients, the server's in those of servers. Wall time, as the caller sees it, includes the far side
  and the way there. Both are microseconds a call, or a message of a stream; medians of the bursts.
* "× no-op" is over *{yardstick}*, which returns `continuation(...)`: the median of
  the ratios within each round, and in brackets the middle half of them. Where that half is wide,
  others used the machine.
* The whole Kit: a deadline of {timeout:g} s, the slow-call event, retries and policies by method;
  nothing fails and nothing is slow. The callers of clients give no timeout unless the name says so:
  what gRPC itself needs for a deadline is in our figures, and not in the no-op's. On the server's
  side all calls come with a deadline.
* grpc-interceptor does nothing but hand on; it has no client for grpc.aio. OpenTelemetry makes
  spans with its SDK, and exports them nowhere.
"""


def page(
    results: Results,
    scale: Scale,
    *,
    facts: Mapping[str, str],
    skipped: Sequence[Skipped],
    command: str,
) -> str:
    """All of it, as Markdown."""
    origin = [f"* {name}: {value}" for name, value in facts.items()] + [f"* Made by `{command}`"]
    parts = ["# What interceptors cost a call", "\n".join(origin)]
    parts += [f"Not measured: {each.what} ({each.why})." for each in skipped]
    verdicts = [target.verdict(results) for target in TARGETS]
    parts += [
        "## Targets",
        table(("unary call, over one no-op interceptor", "measured", "asked for", ""), verdicts),
    ]
    for (side, world), title in TITLES.items():
        shown = [
            _measure(what, rows)
            for what in MEASURES
            if (rows := list(results.of(side, world, what)))
        ]
        parts += [f"## {title}", *shown] if shown else []
    return "\n\n".join([*parts, _notes(scale)])


def facts(load: str) -> dict[str, str]:
    """The machine and the versions, by name."""
    return machine.facts(with_netty=False) | {"Versions": packages(*PACKAGES), "Load before": load}


def packages(*names: str) -> str:
    """Their versions."""
    return ", ".join(f"{name} {_version(name)}" for name in names)


def _measure(what: str, rows: Sequence[Row]) -> str:
    title = "unary, a call" if what == UNARY else f"{what}, a message"
    headers = (title, "CPU, µs", "× no-op", "", "wall, µs", "× no-op", "")
    lines = [(row.subject, *_cells(row, "cpu"), *_cells(row, "wall")) for row in rows]
    return table(headers, lines)


def _cells(row: Row, clock: str) -> tuple[str, str, str]:
    ratio, q1, q3 = (row.values[f"{clock}_ratio{part}"] for part in ("", "_q1", "_q3"))
    half = "" if row.subject == YARDSTICK else f"({q1:.2f}–{q3:.2f})"
    return figure(row.values[f"{clock}_us"]), f"{ratio:.2f}", half


def _notes(scale: Scale) -> str:
    return NOTES.format(
        payload=len(PAYLOAD),
        calls=scale.calls,
        streams=scale.streams,
        messages=scale.messages,
        rounds=scale.rounds,
        stream_rounds=scale.stream_rounds,
        yardstick=YARDSTICK,
        timeout=TIMEOUT_S,
    )


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"
