"""What a timeout costs, beside asyncio, uvloop, threading.Timer, sched and Netty: run it all."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from benchmarks._main import Program, write_rows
from benchmarks.timer import machine, plot, report
from benchmarks.timer.runner import STEPS, Plan, Skipped, run
from benchmarks.timer.scale import SCALES, Results, Row

PROGRAM = Program("timer", __doc__, "under a minute", STEPS)


def main() -> int:
    """Run, print, write."""
    parser = PROGRAM.parser()
    parser.add_argument("--no-netty", action="store_true", help="leave the JVM alone")
    options = parser.parse_args()
    only = PROGRAM.asked(options)
    if only is None:
        return 2
    plan = Plan("quick" if options.quick else "full", only, with_netty=not options.no_netty)
    began, load = time.monotonic(), machine.load()
    rows, skipped = [], []
    for each in run(plan):
        if isinstance(each, Row):
            rows.append(each)
        else:
            print(f"skipped {each.what}: {each.why}", file=sys.stderr)
            skipped.append(each)
    print(f"all: {time.monotonic() - began:.0f} s", file=sys.stderr)
    write_rows(options, rows)
    facts = machine.facts(with_netty=plan.with_netty) | {"Load before": load}
    _publish(plan, Results(tuple(rows)), skipped, facts, PROGRAM.place(options, only))
    return 0


def _publish(
    plan: Plan,
    results: Results,
    skipped: list[Skipped],
    facts: dict[str, str],
    out: Path | None,
) -> None:
    """Print the page; write it, and the plot, if there is a place for them."""
    scale = SCALES[plan.scale]
    drawing = None
    if out is not None:
        if plot.available():
            drawing = "timer.svg"
            plot.draw(results, scale, out / drawing)
        else:
            skipped.append(Skipped("the plot", "matplotlib is not installed"))
    page = report.page(
        results,
        scale,
        facts=facts,
        skipped=skipped,
        command=PROGRAM.command,
        plot=drawing,
    )
    PROGRAM.publish(page, out)


if __name__ == "__main__":
    sys.exit(main())
