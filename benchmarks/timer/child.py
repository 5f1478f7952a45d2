"""One measurement in this process: `python -m benchmarks.timer.child MEASURE SCALE SUBJECT...`.

Prints a line of JSON. `RPCWHEEL_PURE=1` in its environment chooses the pure form.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Sequence

from benchmarks.timer import calls, firing, idle, million, stalls, threads
from benchmarks.timer.scale import SCALES, Row, Scale

MEASURES: dict[str, Callable[[Sequence[str], Scale], list[Row]]] = {
    "calls": calls.measure,
    "million": million.measure,
    "stall": stalls.measure,
    "fire": firing.fire,
    "lateness": firing.lateness,
    "idle": idle.measure,
    "threads": threads.measure,
}


def main(measure: str, scale: str, *subjects: str) -> None:
    """Measure, and print the rows."""
    logging.getLogger("rpcwheel").setLevel(logging.CRITICAL)  # slow tasks are what we make
    rows = MEASURES[measure](subjects, SCALES[scale])
    print(json.dumps([row.as_dict() for row in rows]))


if __name__ == "__main__":
    main(*sys.argv[1:])
