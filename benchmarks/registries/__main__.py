"""What channels by name cost a call, and how fast registries converge: run it all."""

from __future__ import annotations

import sys

from benchmarks._main import Program, main
from benchmarks.registries import report
from benchmarks.registries.runner import STEPS, run
from benchmarks.registries.scale import SCALES

PROGRAM = Program("registries", __doc__, "three minutes", STEPS)

if __name__ == "__main__":
    sys.exit(main(PROGRAM, run, report.page, scales=SCALES, facts=report.facts))
