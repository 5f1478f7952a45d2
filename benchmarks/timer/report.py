"""The page that a run writes: `docs/benchmarks/timer.md`."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from benchmarks.timer import tables
from benchmarks.timer.runner import Skipped
from benchmarks.timer.scale import Results, Scale
from benchmarks.timer.stalls import CANCELS_A_START, CANCELS_A_TURN
from benchmarks.timer.subject import CALLS_A_TURN, DELAY_S

NOTES = f"""\
How it is measured:

* Costs are CPU time of the whole process in nanoseconds for each call: medians of bursts in which
  the subjects take turns. Time that other programs use is not included. Lateness, pairs/s and
  "any, wall" are wall time and depend on other programs.
* A pair is `new_timeout(task, {DELAY_S:g}).cancel()` through the public timer, or the same with
  an alternative. Pending timeouts are due after half to one and a half times that delay. "delays
  vary": no two successive delays are equal.
* asyncio and uvloop are measured in a burst while their loop does not run; the ratios are to
  these figures. "turning": the loop runs one iteration after every {CALLS_A_TURN} calls, which is
  included.
* Fire: all timeouts are due, within a hundred ticks, when the clock starts. The task does
  nothing.
* Bytes: the growth of the process. `gc.collect()`: a full collection with all timeouts pending.
* Longest call: while all timeouts are canceled, one is started after every {CANCELS_A_START}
  cancels, and the timer is advanced without due timeouts (or the loop runs one iteration) after
  every {CANCELS_A_TURN:,}. CPU time of the thread, without the cycle collector, the smallest of
  the longest calls of several runs. "any, gc on" and "any, wall" are the longest of all calls in
  one run and in all runs.
* Idle wake-ups: voluntary context switches of all threads of the process, without the one that
  the wait itself needs.
* `HashedWheel` has its defaults, those of Netty: ticks of 100 ms, so it fires up to 100 ms late.
* Netty's start and cancel fill queues that its worker empties at its next ticks. Its figures are
  CPU time of the caller and the worker. sched's cancel searches all pending timeouts.
"""


def page(
    results: Results,
    scale: Scale,
    *,
    facts: dict[str, str],
    skipped: Sequence[Skipped],
    command: str,
    plot: str | None,
) -> str:
    """The page, as Markdown."""
    parts = ["# Timer", _origin(facts, command, results)]
    parts += [f"Not measured: {each.what} ({each.why})." for each in skipped]
    parts += ["## Targets", tables.verdicts(results, scale)]
    if plot is not None:
        parts.append(f"![Costs of a pair, longest call, memory, garbage collection]({plot})")
    for title, show in (
        (f"Cost of a call in ns of CPU time ({scale.few:,} pending)", tables.calls),
        (f"{scale.many:,} pending", tables.million),
        ("Lateness, and four threads at once", tables.lateness),
    ):
        shown = show(results, scale)
        if shown:
            parts += [f"## {title}", shown]
    return "\n\n".join([*parts, NOTES])


def _origin(facts: dict[str, str], command: str, results: Results) -> str:
    lines = [f"* {name}: {value}" for name, value in facts.items()]
    lines.append(f"* Command: `{command}`; in the median a burst took {_noise(results)}")
    return "\n".join(lines)


def _noise(results: Results) -> str:
    """How much other programs used the machine: wall time over CPU time."""
    ratios = [
        row.values["wall_ns"] / row.values["cpu_ns"]
        for row in results.rows
        if row.measure in {"pair", "start", "cancel", "flat"} and row.form != "jvm"
    ]
    if not ratios:
        return "no figures to compare."
    return f"{median(ratios):.2f} times its CPU time in wall time (1.0: no other program ran)."
