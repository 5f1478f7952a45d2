"""What watched connections cost, beside gRPC's own means: run it all."""

from __future__ import annotations

import sys

from benchmarks._main import Program, main
from benchmarks.connections import report
from benchmarks.connections.runner import STEPS, run
from benchmarks.connections.scale import SCALES

PROGRAM = Program("connections", __doc__, "three minutes", STEPS)

if __name__ == "__main__":
    sys.exit(main(PROGRAM, run, report.page, scales=SCALES, facts=report.facts))
