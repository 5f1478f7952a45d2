"""What journals cost over their engines: run it all."""

from __future__ import annotations

import sys

from benchmarks._main import Program, main
from benchmarks.journal import __doc__ as about
from benchmarks.journal import report
from benchmarks.journal.runner import run
from benchmarks.journal.subjects import ENGINES, SCALES

PROGRAM = Program("journal", about, "half a minute", ENGINES)

if __name__ == "__main__":
    sys.exit(main(PROGRAM, run, report.page, scales=SCALES, facts=report.facts))
