"""The page that a run leaves: `docs/benchmarks/timer.md`."""

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

* Costs are CPU time of the whole process in nanoseconds a call, medians of bursts in which the
  subjects take turns: what the machine gives to others is not in them. Lateness, pairs/s and
  "any, wall" are wall time, and depend on what else runs.
* A pair is `new_timeout(task, {DELAY_S:g}).cancel()` through the public timer, or the rival's
  like. What is pending is due from half to one and a half times that. "Delays vary": no two in a
  row are alike.
* asyncio and uvloop are measured in a burst, their loop not turning while the clock runs; that is
  what the ratios are to. "Turning": the loop turns every {CALLS_A_TURN} calls, and that counts.
* Fire: all are due, within a hundred ticks, when the clock starts; the task does nothing.
* Bytes: what the process grew by. `gc.collect()`: the whole of it, with all pending.
* Longest call: while all are cancelled, a start every {CANCELS_A_START} and an empty advance (for a
  loop: a turn) every {CANCELS_A_TURN:,} cancels; thread CPU time, collector off, the least of
  several runs' longest. "Any, gc on" and "any, wall" are of one run and of any.
* Idle wake-ups: voluntary context switches of all threads of the process, beyond the one that it
  takes to wait.
* `HashedWheel` has its defaults, Netty's: ticks of 100 ms, so it fires up to 100 ms late.
* Netty's start and cancel fill queues that its worker empties at its next ticks; its figures are
  CPU time of the caller with the worker's added. sched's cancel searches all that is pending.
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
    """All of it, as Markdown."""
    parts = ["# The timer in figures", _origin(facts, command, results)]
    parts += [f"Not measured: {each.what} ({each.why})." for each in skipped]
    parts += ["## Targets", tables.verdicts(results, scale)]
    if plot is not None:
        parts.append(f"![Costs of a pair, longest call, memory, garbage collection]({plot})")
    for title, show in (
        (f"What a call costs, in ns of CPU time ({scale.few:,} pending)", tables.calls),
        (f"{scale.many:,} pending", tables.million),
        ("Lateness, and four threads at once", tables.lateness),
    ):
        shown = show(results, scale)
        if shown:
            parts += [f"## {title}", shown]
    return "\n\n".join([*parts, NOTES])


def _origin(facts: dict[str, str], command: str, results: Results) -> str:
    lines = [f"* {name}: {value}" for name, value in facts.items()]
    lines.append(f"* Made by `{command}`; in the median a burst took {_noise(results)}")
    return "\n".join(lines)


def _noise(results: Results) -> str:
    """How much of the machine others took: wall time over CPU time."""
    ratios = [
        row.values["wall_ns"] / row.values["cpu_ns"]
        for row in results.rows
        if row.measure in {"pair", "start", "cancel", "flat"} and row.form != "jvm"
    ]
    if not ratios:
        return "no figures to compare."
    return f"{median(ratios):.2f} times its CPU time in wall time (1.0: nobody else was there)."
