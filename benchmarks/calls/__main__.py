"""What interceptors cost a call, compared with a no-op interceptor, and what hedging gains."""

from __future__ import annotations

import sys

from benchmarks._main import Program, main
from benchmarks.calls import report
from benchmarks.calls.runner import STEPS, run
from benchmarks.calls.scale import SCALES

PROGRAM = Program("calls", __doc__, "about two minutes", STEPS)

if __name__ == "__main__":
    sys.exit(main(PROGRAM, run, report.page, scales=SCALES, facts=report.facts))
