"""One step in this process: `python -m benchmarks.calls.child WHAT WORLD SCALE`.

Prints a line of JSON.
"""

from __future__ import annotations

import sys

from benchmarks._child import print_rows
from benchmarks.calls import aio_client, counts, hedging, servers, sync_client
from benchmarks.calls.scale import SCALES, Row


def main(what: str, world: str, scale: str) -> None:
    """Measure, and print the rows."""
    print_rows(measure(what, world, scale))


def measure(what: str, world: str, scale: str) -> list[Row]:
    """All rows of a step."""
    match what, world:
        case "client", "sync":
            return sync_client.measure(SCALES[scale])
        case "client", "aio":
            return aio_client.measure(SCALES[scale])
        case "server", "sync" | "aio":
            return servers.measure(world, SCALES[scale])
        case "counts", "sync" | "aio":
            return counts.measure(world, SCALES[scale])
        case "hedging", "sync" | "aio":
            return hedging.measure(world, SCALES[scale])
        case _:
            raise ValueError(f"client, server, counts or hedging, sync or aio; not {what} {world}")


if __name__ == "__main__":
    main(*sys.argv[1:])
