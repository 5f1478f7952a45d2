"""One measurement in this process: `python -m benchmarks.calls.child SIDE WORLD SCALE`.

Prints a line of JSON.
"""

from __future__ import annotations

import json
import sys

from benchmarks.calls import aio_client, servers, sync_client
from benchmarks.calls.scale import SCALES, Row


def main(side: str, world: str, scale: str) -> None:
    """Measure, and print the rows."""
    print(json.dumps([row.as_dict() for row in measure(side, world, scale)]))


def measure(side: str, world: str, scale: str) -> list[Row]:
    """All kinds of calls, on one side, in one world."""
    match side, world:
        case "client", "sync":
            return sync_client.measure(SCALES[scale])
        case "client", "aio":
            return aio_client.measure(SCALES[scale])
        case "server", "sync" | "aio":
            return servers.measure(world, SCALES[scale])
        case _:
            raise ValueError(f"client or server, sync or aio; not {side} {world}")


if __name__ == "__main__":
    main(*sys.argv[1:])
