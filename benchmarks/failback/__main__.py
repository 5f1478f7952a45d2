"""What failback costs: run it all."""

from __future__ import annotations

import json
import sys
import tempfile
from typing import Any

from benchmarks import _child, _page
from benchmarks._main import Program
from benchmarks.calls.subjects import Skipped
from benchmarks.failback import __doc__ as about
from benchmarks.failback import report
from benchmarks.failback.scale import BACKLOGS, DURABILITIES, SCALES, STEPS

TIMEOUT_S = 3600.0

PROGRAM = Program("failback", about, "about two minutes", STEPS)


def main() -> int:
    """Run, print, write."""
    options = PROGRAM.parser().parse_args()
    only = PROGRAM.asked(options)
    if only is None:
        return 2
    facts, scale = report.facts(_page.load()), "quick" if options.quick else "full"
    appends: list[dict[str, Any]] = []
    waiting: list[dict[str, Any]] = []
    backlog: list[dict[str, Any]] = []
    skipped: list[Skipped] = []

    def run(step: str, into: list[dict[str, Any]], *arguments: str) -> None:
        module = f"benchmarks.failback.{step}"
        output = _child.output_of(module, scale, *arguments, timeout_s=TIMEOUT_S)
        if isinstance(output, str):
            skipped.append(Skipped(f"{step} {arguments[0]}", output))
        else:
            into += output

    if "appends" in only:
        for durability in DURABILITIES:
            run("appends", appends, durability)
    if "waiting" in only:
        with tempfile.TemporaryDirectory() as directory:  # 5 GB
            run("waiting", waiting, directory)
    if "backlog" in only:
        for name in BACKLOGS:
            run("backlog", backlog, name)
    if options.json is not None:
        options.json.write_text(json.dumps([*appends, *waiting, *backlog], indent=1) + "\n")
    page = report.page(
        appends,
        waiting[0] if waiting else None,
        backlog,
        SCALES[scale],
        origin=_page.Origin(facts, skipped, PROGRAM.command),
    )
    PROGRAM.publish(page, PROGRAM.place(options, only))
    return 0


if __name__ == "__main__":
    sys.exit(main())
