"""What a timeout costs, beside asyncio, uvloop, threading.Timer, sched and Netty: run it all."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from benchmarks.timer import machine, plot, report
from benchmarks.timer.runner import ROOT, STEPS, Plan, Skipped, run
from benchmarks.timer.scale import SCALES, Results, Row

DOCS = ROOT / "docs" / "benchmarks"


def main() -> int:
    """Run, print, write."""
    options = _parser().parse_args()
    only = frozenset(options.only.split(",")) if options.only else frozenset(STEPS)
    if unknown := sorted(only - STEPS.keys()):
        print(f"--only takes {', '.join(STEPS)}; not {', '.join(unknown)}", file=sys.stderr)
        return 2
    plan = Plan("quick" if options.quick else "full", only, with_netty=not options.no_netty)
    complete = not options.quick and only == STEPS.keys()
    began, load = time.monotonic(), machine.load()
    rows, skipped = [], []
    for each in run(plan):
        if isinstance(each, Row):
            rows.append(each)
        else:
            print(f"skipped {each.what}: {each.why}", file=sys.stderr)
            skipped.append(each)
    print(f"all: {time.monotonic() - began:.0f} s", file=sys.stderr)
    if options.json is not None:
        options.json.write_text(json.dumps([row.as_dict() for row in rows], indent=1) + "\n")
    out = options.out or (DOCS if complete else None)
    facts = machine.facts(with_netty=plan.with_netty) | {"Load before": load}
    _publish(plan, Results(tuple(rows)), skipped, facts, out)
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
        out.mkdir(parents=True, exist_ok=True)
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
        command=" ".join(["python -m benchmarks.timer", *sys.argv[1:]]),
        plot=drawing,
    )
    print(page)
    if out is None:
        print("Not written: only a whole run goes to docs/benchmarks; --out says where else.")
    else:
        (out / "timer.md").write_text(page)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.timer", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="less of everything; under a minute")
    parser.add_argument("--only", metavar="NAMES", help=f"some of {','.join(STEPS)}")
    parser.add_argument("--no-netty", action="store_true", help="leave the JVM alone")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write the page and the plot there")
    return parser


if __name__ == "__main__":
    sys.exit(main())
