"""The page that a run writes: `docs/benchmarks/calls.md`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from benchmarks import _page
from benchmarks._page import Origin, figure, table
from benchmarks.calls import hedging
from benchmarks.calls.scale import (
    COUNTS,
    COUNTS_ALONE,
    HEDGING,
    MEASURES,
    UNARY,
    Results,
    Row,
    Scale,
    World,
)
from benchmarks.calls.slow_server import DELAY_S, ONE_IN, WORK_S
from benchmarks.calls.subjects import BASELINE, TIMEOUT_S
from benchmarks.calls.verdict import TARGETS, WORLDS
from benchmarks.calls.wire import PAYLOAD

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
How the cost is measured:

* Calls go over loopback to a server in another process, with {payload} bytes in each message and
  without serializers. The subjects take turns in bursts of {calls} calls, or of {streams} streams
  with {messages} messages each, in another order in each round: {rounds} rounds of calls,
  {stream_rounds} of streams.
* Each of the two processes is bound to one processor.
* CPU is the CPU time of the measured process with gRPC's threads: of the client in the tables of
  clients, of the server in those of servers. Wall time is that of the caller, and includes the
  other process and the network. Both are microseconds for each call, or for each message of a
  stream; medians of the bursts.
* "× no-op" is the ratio to *{baseline}*, which returns `continuation(...)`: the median of the
  ratios within each round, and in brackets their quartiles. If the quartiles are far apart, other
  programs used the machine.
* "whole Kit" has a deadline of {timeout:g} s, `slow_call_threshold`, retries and policies by
  method. No call fails and none is slow. `kit.client_interceptors()` are given to a channel of
  gRPC, `kit.intercept_channel()` gets such a channel, and `kit.channel()` is a
  `ReconnectingChannel` with the same policies. "timeout alone" and "Kit with message_timeout" are
  measured as client interceptors. The callers pass no timeout unless the name says so: the
  figures of rpcwheel include the cost of a deadline in gRPC, those of the no-op do not. In the
  tables of servers, all calls have a deadline.
* The interceptor of grpc-interceptor does nothing either; it has none for clients of grpc.aio.
  OpenTelemetry creates spans with its SDK and does not export them.

How the counts are measured:

* Metrics count each call and each attempt. The same bursts are made through two
  `kit.intercept_channel()`, of which one counts. Over loopback, the noise is larger than the cost.
  "alone" gets its responses at once, without a network. "added" is the median of the differences
  within each round. In all other tables, metrics are off.

How hedging is measured:

* The server, in another process, answers each call after {work:g} ms, but delays 1 call in
  {one_in}, chosen at random, by {slow:g} s. {callers} callers make {hedged:,} calls of an
  idempotent method through `kit.channel()`, first without hedging, then with
  `HedgingPolicy(delay={delay:g})`, which makes two attempts at most. In 1 call in {both}, the
  second attempt is delayed too.
* Extra calls are those that the server received in addition to the callers' calls. Their target
  is the budget of one window of 10 s: {budget:.0%} of the calls, and {least}. The target of p99
  is the delay plus twice the median without hedging.
"""


def page(
    results: Results,
    scale: Scale,
    *,
    origin: Origin,
) -> str:
    """The page, as Markdown."""
    parts = origin.parts("Calls: cost of interceptors, effect of hedging")
    verdicts = [target.verdict(results) for target in TARGETS]
    parts += [
        "## Targets",
        table(("unary call", "measured", "target", ""), verdicts),
    ]
    for (side, world), title in TITLES.items():
        shown = [
            _measure(what, rows)
            for what in MEASURES
            if (rows := list(results.of(side, world, what)))
        ]
        parts += [f"## {title}", *shown] if shown else []
    counted = [
        (title, list(results.of("client", world, what)))
        for world in WORLDS
        for what, title in ((COUNTS, f"{world}, over loopback"), (COUNTS_ALONE, f"{world}, alone"))
    ]
    parts += ["## Counts of calls", _counts(counted)] if any(rows for _, rows in counted) else []
    hedged = [(world, row) for world in WORLDS for row in results.of("client", world, HEDGING)]
    parts += ["## Hedging", _hedging(hedged)] if hedged else []
    return "\n\n".join([*parts, _notes(scale)])


def facts(load: str) -> dict[str, str]:
    """The machine and the versions, by name."""
    return _page.facts(*PACKAGES) | {"Load before": load}


def _measure(what: str, rows: Sequence[Row]) -> str:
    title = "unary, a call" if what == UNARY else f"{what}, a message"
    headers = (title, "CPU, µs", "× no-op", "", "wall, µs", "× no-op", "")
    lines = [(row.subject, *_cells(row, "cpu"), *_cells(row, "wall")) for row in rows]
    return table(headers, lines)


def _counts(measured: Sequence[tuple[str, Sequence[Row]]]) -> str:
    headers = ("unary calls, CPU", "without counts, µs", "with counts, µs", "added, µs", "×")
    lines = [
        (
            title,
            figure(without.values["cpu_us"]),
            figure(counted.values["cpu_us"]),
            f"{counted.values['added_us']:.1f}",
            f"{counted.values['cpu_ratio']:.2f}",
        )
        for title, rows in measured
        if rows
        for without, counted in [rows]
    ]
    return table(headers, lines)


def _hedging(rows: Sequence[tuple[World, Row]]) -> str:
    headers = ("unary calls", "p50, ms", "p99, ms", "longest, ms", "calls", "extra calls")
    return table(headers, [(f"{world}, {row.subject}", *_latencies(row)) for world, row in rows])


def _latencies(row: Row) -> Iterator[str]:
    yield from (f"{row.values[key]:,.1f}" for key in ("p50_ms", "p99_ms", "longest_ms"))
    yield from (f"{row.values[key]:,.0f}" for key in ("calls", "extra_calls"))


def _cells(row: Row, clock: str) -> tuple[str, str, str]:
    ratio, q1, q3 = (row.values[f"{clock}_ratio{part}"] for part in ("", "_q1", "_q3"))
    half = "" if row.subject == BASELINE else f"({q1:.2f}–{q3:.2f})"
    return figure(row.values[f"{clock}_us"]), f"{ratio:.2f}", half


def _notes(scale: Scale) -> str:
    return NOTES.format(
        payload=len(PAYLOAD),
        calls=scale.calls,
        streams=scale.streams,
        messages=scale.messages,
        rounds=scale.rounds,
        stream_rounds=scale.stream_rounds,
        baseline=BASELINE,
        timeout=TIMEOUT_S,
        one_in=ONE_IN,
        both=ONE_IN**2,
        slow=DELAY_S,
        work=1e3 * WORK_S,
        callers=hedging.CONCURRENCY,
        hedged=scale.hedged,
        delay=hedging.DELAY_S,
        budget=hedging.POLICY.retry_budget,
        least=hedging.POLICY.min_retries,
    )
