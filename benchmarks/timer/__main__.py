"""Measure rpcwheel's timers beside those of Python, Java, Go and Rust. Linux only."""

from __future__ import annotations

import json
import sys
import time

from benchmarks import _page
from benchmarks._main import Program
from benchmarks.timer import peers, report
from benchmarks.timer.steps import SCALES, STEPS, Run

PROGRAM = Program("timer", __doc__, "about 3 minutes", STEPS)


def main() -> int:
    """Run, print, write."""
    parser = PROGRAM.parser()
    parser.add_argument("--no-rivals", action="store_true", help="without Java, Go and Rust")
    options = parser.parse_args()
    only = PROGRAM.asked(options)
    if only is None:
        return 2
    if sys.platform != "linux":
        print("This benchmark reads clocks that only Linux has.", file=sys.stderr)
        return 2
    began, load = time.monotonic(), _page.load()
    scale = SCALES["quick" if options.quick else "full"]
    run = Run(scale, with_rivals=not options.no_rivals)
    run.run(only)
    print(f"all: {time.monotonic() - began:.0f} s", file=sys.stderr)
    if options.json is not None:
        options.json.write_text(json.dumps(run.results, indent=1) + "\n")
    facts = _page.facts("uvloop", "Cython") | {"Load before": load}
    if not options.no_rivals:
        facts |= peers.versions()
    origin = _page.Origin(facts, run.skipped, PROGRAM.command)
    PROGRAM.publish(report.page(run.results, scale, origin=origin), PROGRAM.place(options, only))
    return 0


if __name__ == "__main__":
    sys.exit(main())
