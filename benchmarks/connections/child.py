"""One measurement in this process: `python -m benchmarks.connections.child STEP WORLD SCALE [WHO]`.

Prints a line of JSON.
"""

from __future__ import annotations

import logging
import sys

from benchmarks._child import print_rows
from benchmarks.calls.scale import Row
from benchmarks.connections import (
    calls,
    churn,
    frozen,
    heartbeats,
    outages,
    replacing,
    serving,
)
from benchmarks.connections.far import make_room
from benchmarks.connections.scale import SCALES


def main(step: str, world: str, scale: str, *who: str) -> None:
    """Measure, and print the rows."""
    logging.getLogger("rpcwheel").setLevel(logging.CRITICAL)  # connections die here on purpose
    print_rows(measure(step, world, scale, *who))


def measure(step: str, world: str, scale: str, *who: str) -> list[Row]:
    """All of a step in one world; of heartbeats, one subject's."""
    assert world in ("sync", "aio")
    make_room()
    if step == "heartbeats":
        return heartbeats.measure(world, *who, SCALES[scale])
    return MEASURES[step](world, SCALES[scale])


MEASURES = {
    "calls": calls.measure,
    "replacing": replacing.measure,
    "outages": outages.measure,
    "frozen": frozen.measure,
    "serving": serving.measure,
    "rounds": serving.measure_rounds,
    "churn": churn.measure,
}
"""What is of one world, whole."""


if __name__ == "__main__":
    main(*sys.argv[1:])
