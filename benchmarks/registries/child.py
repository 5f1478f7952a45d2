"""One measurement in this process: `python -m benchmarks.registries.child SCALE STEP WHO...`.

Prints a line of JSON.
"""

from __future__ import annotations

import logging
import sys

from benchmarks._child import print_rows
from benchmarks.calls.scale import Row
from benchmarks.connections.far import make_room
from benchmarks.registries import calls, channel_picks, converge, picks, republish, restart
from benchmarks.registries.scale import SCALES


def main(scale: str, step: str, *who: str) -> None:
    """Measure, and print the rows."""
    print_rows(measure(scale, step, *who))


def measure(scale: str, step: str, *who: str) -> list[Row]:
    """Measure one world (calls, picks of channels), or one engine and subject."""
    logging.getLogger("rpcwheel").setLevel(logging.CRITICAL)  # engines die here on purpose
    logging.getLogger("kazoo").setLevel(logging.CRITICAL)
    make_room()
    match step, who:
        case "calls", ("sync" | "aio" as world,):
            return calls.measure(world, SCALES[scale])
        case "picks", ():
            return picks.measure(SCALES[scale])
        case "picks", ("sync" | "aio" as world,):
            return channel_picks.measure(world, SCALES[scale])
        case "converge", (engine, subject):
            return converge.measure(engine, subject, SCALES[scale])
        case "restart", (engine, subject):
            return restart.measure(engine, subject, SCALES[scale])
        case "republish", (engine, subject):
            return republish.measure(engine, subject, SCALES[scale])
        case _:
            raise ValueError(f"no such step: {step} {who}")


if __name__ == "__main__":
    main(*sys.argv[1:])
