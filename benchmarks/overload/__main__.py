"""Overload of a server, and outages as its clients handle them: run the cases."""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks import _page
from benchmarks._main import Program, write_rows
from benchmarks.calls.subjects import Skipped
from benchmarks.overload import __doc__ as about
from benchmarks.overload import plot, report
from benchmarks.overload.cases import NAMES, cases, outage_cases
from benchmarks.overload.figures import Outcome
from benchmarks.overload.outage import report as outage_report
from benchmarks.overload.outage import runner as outage_runner
from benchmarks.overload.outage.figures import OutageOutcome
from benchmarks.overload.runner import Runner

FULL_S, QUICK_S = 10.0, 3.0

PROGRAM = Program("overload", about, f"phases of {QUICK_S:g} s", NAMES)


def main() -> int:
    """Run, print, write."""
    parser = PROGRAM.parser()
    parser.add_argument("--seconds", type=float, help=f"of each phase; {FULL_S:g}")
    parser.add_argument("--poisson", action="store_true", help="calls at random times")
    parser.add_argument("--plot", type=Path, metavar="DIR", help="write charts there")
    options = parser.parse_args()
    only = PROGRAM.asked(options)
    if only is None:
        return 2
    facts = report.facts(_page.load())
    seconds = options.seconds or (QUICK_S if options.quick else FULL_S)
    options.quick = seconds < FULL_S
    results = [
        *Runner(seconds, poisson=options.poisson).run(cases(only)),
        *outage_runner.run(outage_cases(only), seconds),
    ]
    outcomes = [each for each in results if isinstance(each, Outcome)]
    outages = [each for each in results if isinstance(each, OutageOutcome)]
    skipped = [each for each in results if isinstance(each, Skipped)]
    figures = [each.as_dict() for each in outcomes] + [each.as_dict() for each in outages]
    write_rows(options, figures)
    page = report.page(
        outcomes,
        origin=_page.Origin(facts, skipped, PROGRAM.command),
        notes=report.notes(seconds, poisson=options.poisson),
        clients=outage_report.section(outages, seconds),
    )
    out = PROGRAM.place(options, only)
    PROGRAM.publish(page, out)
    for directory in {options.plot, out} - {None}:
        plot.write(outcomes, directory)
        outage_report.write_charts(outages, directory)
    return 0


if __name__ == "__main__":
    sys.exit(main())
