"""A client in a process of its own, to be frozen by a test; tells how it is for each line of input.

python -m scenarios.paused_client sync 127.0.0.1:50051
"""

import json
import sys

from fixtures.heartbeat_worlds import AioClient, SyncClient


def main() -> None:
    """Be used once, then be silent."""
    make_client = {"sync": SyncClient, "aio": AioClient}[sys.argv[1]]
    with make_client(sys.argv[2]) as client:
        client.ping()
        call = client.slow()
        for _ in sys.stdin:
            story = {
                "number": client.bare.number,
                "answered": client.heartbeat.answered,
                "call": call.ended().code if call.done.done() else "runs",
            }
            sys.stdout.write(json.dumps(story) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
