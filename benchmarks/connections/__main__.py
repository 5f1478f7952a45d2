"""What watched connections cost, beside gRPC's own means: run it all."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from benchmarks.calls.far import ROOT
from benchmarks.calls.scale import Results, Row
from benchmarks.calls.subjects import Skipped
from benchmarks.connections import report
from benchmarks.connections.runner import STEPS, run
from benchmarks.connections.scale import SCALES
from benchmarks.timer import machine

DOCS = ROOT / "docs" / "benchmarks"


def main() -> int:
    """Run, print, write."""
    options = _parser().parse_args()
    only = frozenset(options.only.split(",")) if options.only else frozenset(STEPS)
    if unknown := sorted(only - STEPS.keys()):
        print(f"--only takes {', '.join(STEPS)}; not {', '.join(unknown)}", file=sys.stderr)
        return 2
    facts = report.facts(machine.load())
    scale = "quick" if options.quick else "full"
    told = list(run(only, scale))
    rows = [each for each in told if isinstance(each, Row)]
    if options.json is not None:
        options.json.write_text(json.dumps([row.as_dict() for row in rows], indent=1) + "\n")
    page = report.page(
        Results(tuple(rows)),
        SCALES[scale],
        facts=facts,
        skipped=[each for each in told if isinstance(each, Skipped)],
        command=" ".join(["python -m benchmarks.connections", *sys.argv[1:]]),
    )
    print(page)
    complete = not options.quick and only == STEPS.keys()
    out = options.out or (DOCS if complete else None)
    if out is None:
        print("Not written: only a whole run goes to docs/benchmarks; --out says where else.")
    else:
        out.mkdir(parents=True, exist_ok=True)
        (out / "connections.md").write_text(page)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.connections", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="less of everything; three minutes")
    parser.add_argument("--only", metavar="NAMES", help=f"some of {','.join(STEPS)}")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write the page there")
    return parser


if __name__ == "__main__":
    sys.exit(main())
