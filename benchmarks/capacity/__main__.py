"""What rpcwheel occupies: run it all. Linux only."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from benchmarks import _child
from benchmarks._main import Program, write_rows
from benchmarks._page import Origin
from benchmarks.calls.subjects import Skipped
from benchmarks.capacity import __doc__ as about
from benchmarks.capacity import report
from benchmarks.capacity.child import ENGINES, SERIES
from benchmarks.capacity.subjects import SUBJECTS, Disk, Growth, Series, Threads

TIMEOUT_S = 600.0

STEPS = {"growth": SUBJECTS, "threads": ("all",), "disk": tuple(ENGINES), "series": tuple(SERIES)}
KINDS = {"growth": Growth, "threads": Threads, "disk": Disk, "series": Series}

PROGRAM = Program("capacity", about, "two minutes", STEPS)

Row = Growth | Disk | Series | Threads


def run(only: frozenset[str], scale: str) -> Iterator[Row | Skipped]:
    """Measure each subject in a process of its own."""
    for step, names in STEPS.items():
        for name in names if step in only else ():
            output = _child.output_of(
                "benchmarks.capacity.child", step, scale, name, timeout_s=TIMEOUT_S
            )
            if isinstance(output, str):
                yield Skipped(name, output)
            else:
                yield from (KINDS[step](**row) for row in output)
            print(f"{step}: {name}", file=sys.stderr, flush=True)


def main() -> int:
    """Run, print, write."""
    options = PROGRAM.parser().parse_args()
    only = PROGRAM.asked(options)
    if only is None:
        return 2
    scale = "quick" if options.quick else "full"
    results = list(run(only, scale))
    rows = [each for each in results if not isinstance(each, Skipped)]
    write_rows(options, rows)
    skipped = [each for each in results if isinstance(each, Skipped)]
    origin = Origin(report.facts(), skipped, PROGRAM.command)
    PROGRAM.publish(report.page(rows, origin=origin), PROGRAM.place(options, only))
    return 0


if __name__ == "__main__":
    sys.exit(main())
