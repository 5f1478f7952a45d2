"""The page that a run writes: `docs/benchmarks/overload.md`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

from benchmarks import _page
from benchmarks._page import EMPTY, Origin, table
from benchmarks.overload.cases import (
    BURN_S,
    CHAIN_CALLS,
    CLIENTS,
    DEADLINE_S,
    HANDLERS,
    PLAIN,
    SCENARIOS,
    SHORT_WAIT_S,
    SLOTS,
    SWITCH_S,
    VARIANTS,
    WAIT_S,
    WORLDS,
)
from benchmarks.overload.figures import (
    SETTLED_ANSWERED,
    SETTLED_GOODPUT,
    Outcome,
    PhaseFigures,
)
from benchmarks.overload.load import CONNECTIONS, NAIVE_ATTEMPTS
from benchmarks.overload.plot import TITLES, file_name
from benchmarks.overload.verdict import verdicts

LATE_S = 0.02
"""A load that sent 1 call in 100 later than this did not keep its schedule."""

HEADERS = (
    "server, client (capacity)",
    "phase",
    "offered",
    "goodput",
    "answered",
    "wasted",
    "p50, ms",
    "p99, ms",
    "settled, s",
    "failed",
)

NOTES = """\
How to repeat it:

* `python -m benchmarks.overload` takes about 100 minutes, on a machine that does nothing else.
* `--only` takes any names of scenarios ({scenarios}), worlds ({worlds}), handlers ({handlers}),
  servers ({variants}) and clients ({clients}). Half a minute each, with phases of 3 s:

      python -m benchmarks.overload --seconds 3 --only phases,sync,wait,adaptive,plain
      python -m benchmarks.overload --seconds 3 --only halved,aio,burn,adaptive

* `--plot DIR` writes the charts, `--json FILE` all figures; `--poisson` sends calls at random
  times.

How it is measured:

* The server and the load have a process each. {connections} connections, or as many for each
  criticality, carry calls without messages, each with a deadline of {deadline:g} s. Calls begin
  when they are due, {arrivals}, whatever became of the earlier ones; a page says so if
  1 in 100 was sent more than {late:.0f} ms late. Each phase takes {seconds:g} s.
* Handlers wait {wait:.0f} ms, {slots} at a time: on as many threads, or on more and with a
  semaphore, or with a semaphore of asyncio. Others burn {burn:.0f} ms of CPU: they loop until
  their thread has used that. "Varied" ones take different times with the same mean,
  exponentially distributed, the longest 3.7 times the mean. The capacity is that of the bare
  server, with the number of callers that suits it best, each of which makes one call after the
  other.
* Servers are "bare", "fixed" (`maximum_concurrent_rpcs`: {limits}), or "adaptive"
  (`Kit(limit="adaptive")`, and no other setting). Clients are "plain", "naive" (up to {naive}
  attempts, each with the whole deadline, after any failure and at once), or "kit" (`RetryPolicy`
  with RESOURCE_EXHAUSTED and UNAVAILABLE). Those without a kit send the criticality themselves, as
  metadata.
* Offered load and goodput are shares of the capacity of the phase. Goodput is calls that were
  answered within the deadline, "answered" the same as a share of the calls. "Wasted" are executions
  of the handler whose caller had gone before they ended. p50 and p99 are of the calls that got a
  response. A phase has settled when {settled:.0%} of its calls are answered, or {enough:.0%} of the
  capacity is used, in the next second and in the rest of the phase. "Failed" are shares of the
  calls by status code.
* "Switching" is "adaptive" with `sys.setswitchinterval({switch})`: after this time, in place of
  5 ms, a thread that computes lets others run, among them the one that accepts calls.
* A slower downstream is simulated: the handlers wait {short_wait:.0f} ms, then 10 times as long.
* In a spike, calls of criticality CRITICAL are half of the capacity, and SHEDDABLE ones 12 times
  the capacity.
* In the chain, CRITICAL calls have a first server, and SHEDDABLE ones another. Both make {calls}
  calls, one after the other, to a second one, which makes one call to a third one, whose handlers
  wait {short_wait:.0f} ms. CRITICAL calls are 18% and SHEDDABLE ones 60% of the capacity; when the
  third server is slow, they are 90% and 300%. All servers have an adaptive limit. In "severed", the
  calls that handlers make have the whole deadline again, and no criticality.
"""


def page(
    outcomes: Sequence[Outcome],
    *,
    origin: Origin,
    notes: str,
    clients: Iterable[str],
) -> str:
    """The page, as Markdown."""
    parts = origin.parts("Overload")
    if lines := list(verdicts(outcomes)):
        parts += ["## Targets", table(("", "measured", "target", ""), lines)]
    for scenario, group in groupby(outcomes, key=lambda outcome: outcome.case.scenario):
        parts += [f"## {SCENARIOS[scenario].about}", *_tables(list(group))]
    if outcomes:
        parts.append(notes)
    return "\n\n".join([*parts, *clients])


def facts(load: str) -> dict[str, str]:
    """The machine and the versions, by name."""
    return _page.facts("grpcio") | {"Load before": load}


def notes(seconds: float, *, poisson: bool) -> str:
    """How it was measured."""
    limits = ", ".join(f"{handler.best_limit} for {name}" for name, handler in HANDLERS.items())
    return NOTES.format(
        scenarios=", ".join(SCENARIOS),
        worlds=", ".join(WORLDS),
        handlers=", ".join(HANDLERS),
        variants=", ".join(VARIANTS),
        clients=", ".join(CLIENTS),
        connections=CONNECTIONS,
        deadline=DEADLINE_S,
        arrivals="at random times" if poisson else "at even intervals",
        late=1e3 * LATE_S,
        seconds=seconds,
        wait=1e3 * WAIT_S,
        short_wait=1e3 * SHORT_WAIT_S,
        slots=SLOTS,
        burn=1e3 * BURN_S,
        limits=limits,
        naive=NAIVE_ATTEMPTS,
        settled=SETTLED_ANSWERED,
        enough=SETTLED_GOODPUT,
        calls=CHAIN_CALLS,
        switch=SWITCH_S,
    )


def _tables(outcomes: Sequence[Outcome]) -> Iterator[str]:
    for (world, handler), group in groupby(outcomes, key=_world_and_handler):
        together = list(group)
        yield f"### `{TITLES[world]}`, handlers that {HANDLERS[handler].about}"
        if together[0].case.client == PLAIN:
            yield f"![Goodput]({file_name(together[0])})"
        yield table(HEADERS, [line for outcome in together for line in _lines(outcome)])
        yield from _warnings(together)


def _world_and_handler(outcome: Outcome) -> tuple[str, str]:
    return outcome.case.world, outcome.case.handler


def _lines(outcome: Outcome) -> Iterator[tuple[str, ...]]:
    name = f"{outcome.case.variant}, {outcome.case.client} ({outcome.capacity:.0f}/s)"
    for figures in outcome.figures():
        yield name, *_cells(figures)
        name = ""


def _cells(figures: PhaseFigures) -> Iterator[str]:
    yield figures.phase
    yield f"{figures.offered:.2f}"
    yield f"{figures.goodput:.2f}"
    critical = "" if figures.critical is None else f" (CRITICAL: {figures.critical:.1%})"
    yield f"{figures.answered:.1%}{critical}"
    yield f"{figures.wasted:.1%}"
    for took_s in (figures.p50_s, figures.p99_s):
        yield EMPTY if took_s is None else f"{1e3 * took_s:,.0f}"
    yield EMPTY if figures.settled_s is None else f"{figures.settled_s:.1f}"
    yield ", ".join(f"{code} {share:.1%}" for code, share in figures.failed.items())


def _warnings(outcomes: Sequence[Outcome]) -> Iterator[str]:
    for outcome in outcomes:
        if outcome.late_s > LATE_S:
            late_ms = 1e3 * outcome.late_s
            yield f"**The load of {outcome.case} fell behind by {late_ms:.0f} ms (p99).**"
