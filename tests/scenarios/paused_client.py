"""A client process that a test stops; prints its status for each line of input.

python -m scenarios.paused_client sync 127.0.0.1:50051 6.0

The last argument is the timeout of the heartbeat.
"""

import json
import sys

from fixtures.heartbeat_clients import Client


def main() -> None:
    """Make one call, then only heartbeats."""
    world, target, timeout = sys.argv[1:]
    with Client(world, target, timeout=float(timeout)) as client:
        client.ping()
        call = client.slow(3600.0)
        for _ in sys.stdin:
            status = {
                "number": client.bare.number,
                "answered": client.heartbeat.answered,
                "call": call.code().name if call.done() else "runs",
            }
            sys.stdout.write(json.dumps(status) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
