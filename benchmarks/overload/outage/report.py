"""The part of the page about clients, and its charts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

from benchmarks._page import EMPTY, table
from benchmarks._plot import Chart
from benchmarks.overload.cases import (
    BREAKER,
    BROKEN,
    DEADLINE_S,
    FAILING,
    FROZEN,
    HANGS,
    KILLED,
    NAIVE,
    OUTAGE_CLIENTS,
    PATIENT,
    PATIENT_DEADLINE_S,
    REFUSES,
    SLOTS,
    SLOW,
    THROTTLE,
    WAIT_S,
    OutageCase,
)
from benchmarks.overload.load import NAIVE_ATTEMPTS
from benchmarks.overload.outage import verdict
from benchmarks.overload.outage.figures import PEAK_S, SETTLED_S, OutageOutcome
from benchmarks.overload.outage.load import NAIVE_BACKOFF_S
from benchmarks.overload.outage.runner import AFTER, BEFORE, DOWN, LOAD
from benchmarks.overload.outage.server import CAPACITY, METHODS
from benchmarks.overload.plot import LABELS, TITLES

TITLE = "Clients of a server that is down"
ABOUT = {
    REFUSES: "A server that answers each call with UNAVAILABLE",
    PATIENT: "The same, with callers that wait longer",
    HANGS: "A server whose handlers take until the deadline",
    KILLED: "A server that is killed and started again",
    FROZEN: "A server whose process is stopped (SIGSTOP)",
    FAILING: "One of ten methods fails with INTERNAL",
    SLOW: "One of ten methods takes until the deadline",
}
DRAWN = (NAIVE, THROTTLE, BREAKER)
SHOWN_SECONDS = 5

NOTES = """\
How these clients are measured:

* `python -m benchmarks.overload --only {names}` takes {minutes:.0f}
  minutes; names of worlds, and of clients ({clients}), restrict it.
  `--json FILE` writes all seconds.
* Each client is a process with one channel, and has a server of its own. All clients of a table run
  at the same time. The load is {rate:g} calls/s at even intervals, {load:g} of the capacity: of one
  method, or of {methods} methods in turn. Each call has a deadline of {deadline:g} s,
  of callers that wait longer {patient:g} s.
* Handlers wait {wait:.0f} ms, {slots} at a time, so the capacity is {capacity:g} calls/s. A handler
  that takes until the deadline is one of the {slots}. A server works for {before:g} s, is down for
  {down:g} s, and works for {after:g} s more. One that was killed is started again after {down:g} s,
  and has returned when it listens.
* Channels have `channel_options(preset="lan")`, and servers `server_options(preset="lan")`. So a
  channel waits for at most 2.4 s before it connects again, and closes a connection whose server
  does not answer a ping.
* "Naive" makes up to {attempts} attempts, {backoff:.0f} ms apart, each with the whole deadline.
  Kits have `RetryPolicy(retry_on={{"UNAVAILABLE", "RESOURCE_EXHAUSTED"}})` and `idempotent=True`,
  and some have `throttle=2.0` or `breaker=BreakerPolicy()`.
* "Sent" are the attempts of the time while the server, or the method, was down, as a share of the
  calls in this time: all that the client gave to gRPC's channel, also if that had no connection.
  "Arrived" are those that the server's Python saw then or later; it sees only some of those whose
  deadline had passed, or whose connection was closed, before a stopped process read them. Health
  checks, which breakers make, count in neither.
* "Answered" are calls that got their response within the deadline, as a share of those due in each
  of the seconds after the return, and in the time later than {settled:g} s after it. "Peak" is the
  most arrivals in any {peak:g} s after the return, as a multiple of the capacity, without those
  whose deadline had passed: a process that was stopped reads them when it continues, and gRPC drops
  them. (Of 4,000 such arrivals in six runs, the handlers of 23 were executed.)
"""


def section(outcomes: Sequence[OutageOutcome], seconds: float) -> Iterator[str]:
    """The part of the page, with phases of so many seconds; nothing without outcomes."""
    if not outcomes:
        return
    yield f"## {TITLE}"
    if verdicts := list(verdict.lines(outcomes)):
        headers = ("the worse of both worlds; missed in bold", "target")
        yield table((*headers, *(LABELS[client] for client in verdict.CLIENTS)), verdicts)
    for (scenario, world), group in groupby(outcomes, key=_scenario_and_world):
        together = list(group)
        yield f"### {ABOUT[scenario]}, `{TITLES[world]}`"
        if scenario in BROKEN:
            yield _broken_table(together)
        else:
            yield f"![Calls answered in time]({file_name(together[0].case)})"
            yield _down_table(together)
        late_ms = 1e3 * max(outcome.late_s for outcome in together)
        yield f"99% of the calls were sent at most {late_ms:.0f} ms late."
    yield _notes(seconds)


def _scenario_and_world(outcome: OutageOutcome) -> tuple[str, str]:
    return outcome.case.scenario, outcome.case.world


def _down_table(outcomes: Sequence[OutageOutcome]) -> str:
    seconds = [f"{number}. s" for number in range(2, SHOWN_SECONDS + 1)]
    headers = ("client", "sent", "arrived", "answered, 1. s", *seconds, "later", "peak")
    return table(headers, [list(_down_cells(outcome)) for outcome in outcomes])


def _down_cells(outcome: OutageOutcome) -> Iterator[str]:
    yield LABELS[outcome.case.client]
    yield f"{outcome.sent:.1%}"
    yield EMPTY if outcome.case.scenario == KILLED else f"{outcome.arrived:.1%}"
    answered = [f"{share:.0%}" for share in outcome.seconds[:SHOWN_SECONDS]]
    yield from answered + [EMPTY] * (SHOWN_SECONDS - len(answered))  # of a quick run
    yield f"{outcome.settled:.1%}"
    yield f"{outcome.peak:.2f}"


def _broken_table(outcomes: Sequence[OutageOutcome]) -> str:
    headers = ("client", "sent, of the broken method", "answered, of the others")
    lines = [
        (LABELS[each.case.client], f"{each.sent:.1%}", f"{each.others:.1%}") for each in outcomes
    ]
    return table(headers, lines)


def _notes(seconds: float) -> str:
    return NOTES.format(
        names=",".join(ABOUT),
        minutes=len(ABOUT) * len(TITLES) * ((BEFORE + DOWN + AFTER) * seconds + 10.0) / 60,
        clients=", ".join(OUTAGE_CLIENTS),
        rate=LOAD * CAPACITY,
        load=LOAD,
        deadline=DEADLINE_S,
        patient=PATIENT_DEADLINE_S,
        methods=len(METHODS),
        wait=1e3 * WAIT_S,
        slots=SLOTS,
        capacity=CAPACITY,
        before=BEFORE * seconds,
        down=DOWN * seconds,
        after=AFTER * seconds,
        attempts=NAIVE_ATTEMPTS,
        backoff=1e3 * NAIVE_BACKOFF_S,
        settled=SETTLED_S,
        peak=PEAK_S,
    )


def file_name(case: OutageCase) -> str:
    """The file of the chart of a scenario."""
    return f"overload-{case.scenario}-{case.world}.svg"


def write_charts(outcomes: Sequence[OutageOutcome], directory: Path) -> None:
    """Write a chart for each scenario of a server that is down, and world."""
    down = [outcome for outcome in outcomes if outcome.case.scenario not in BROKEN]
    for name, group in groupby(down, key=lambda outcome: file_name(outcome.case)):
        (directory / name).write_text(_timeline(list(group)))


def _timeline(outcomes: Sequence[OutageOutcome]) -> str:
    """The calls answered in time by some clients."""
    first = outcomes[0]
    ends_s = float(int(first.ends_s))
    title = f"{TITLES[first.case.world]}, {ABOUT[first.case.scenario].lower()}"
    chart = Chart(f"{title}: calls answered in time, per second", (0.0, ends_s), 1.1 * CAPACITY)
    chart.area([(0.0, LOAD * CAPACITY), (ends_s, LOAD * CAPACITY)])
    times = [(round(at_s), f"{at_s:.0f}") for at_s in (0.0, first.down_s, first.up_s, ends_s)]
    chart.axes(times, [0.25 * CAPACITY * number for number in range(5)], "seconds")
    for begins_s, until_s, name in (
        (0.0, first.down_s, "works"),
        (first.down_s, first.up_s, "is down"),
        (first.up_s, ends_s, "has returned"),
    ):
        chart.phase((begins_s + until_s) / 2, begins_s, name)
    chart.line([(0.0, CAPACITY), (ends_s, CAPACITY)], "capacity")
    drawn = [outcome for outcome in outcomes if outcome.case.client in DRAWN]
    for outcome in drawn:
        goodput = enumerate(outcome.goodput()[: int(ends_s)])
        chart.line([(second + 0.5, answered) for second, answered in goodput], outcome.case.client)
    chart.legend((outcome.case.client, LABELS[outcome.case.client]) for outcome in drawn)
    return chart.svg()
