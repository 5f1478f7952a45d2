"""What a server does with more calls than it can execute: run the cases."""

from __future__ import annotations

import sys

from benchmarks import _page
from benchmarks._main import Program, write_rows
from benchmarks.overload import __doc__ as about
from benchmarks.overload import report
from benchmarks.overload.cases import NAMES, cases
from benchmarks.overload.runner import Runner

FULL_S, QUICK_S = 10.0, 3.0

PROGRAM = Program("overload", about, f"phases of {QUICK_S:g} s", NAMES)


def main() -> int:
    """Run, print, write."""
    parser = PROGRAM.parser()
    parser.add_argument("--seconds", type=float, help=f"of each phase; {FULL_S:g}")
    parser.add_argument("--poisson", action="store_true", help="calls at random times")
    options = parser.parse_args()
    only = PROGRAM.asked(options)
    if only is None:
        return 2
    facts = report.facts(_page.load())
    seconds = options.seconds or (QUICK_S if options.quick else FULL_S)
    options.quick = seconds < FULL_S
    outcomes = list(Runner(seconds, poisson=options.poisson).run(cases(only)))
    write_rows(options, outcomes)
    page = report.page(outcomes, facts=facts, command=PROGRAM.command)
    PROGRAM.publish(page, PROGRAM.place(options, only))
    return 0


if __name__ == "__main__":
    sys.exit(main())
