"""The kernel drops what is sent to one of two addresses; run in a network namespace of its own.

    unshare --map-root-user --net python -m scenarios.dropped_packets sync

A rule of the routing table does it, so that no firewall need be installed: a connection that is
open stays so, and its packets are lost without a word. It ends with 0 if all was as it must be.
"""

import subprocess
import sys

from fixtures.heartbeat_worlds import AioClient, SyncClient
from fixtures.server_process import KillableServer

ONE, OTHER = "10.77.0.1", "10.77.0.2"


def ip(command: str) -> None:
    """Run a command of iproute2."""
    subprocess.run(["ip", *command.split()], check=True)


def run(make_client: type[SyncClient | AioClient]) -> None:
    """See what becomes of calls without and with heartbeats."""
    ip("link set lo up")
    for address in (ONE, OTHER):
        ip(f"addr add {address}/32 dev lo")
    ip("rule add pref 100 lookup local")  # behind what is added below
    ip("rule del pref 0")
    with KillableServer(host=ONE) as one, KillableServer(host=OTHER) as other:
        target = f"ipv4:{one.target},{other.target}"
        with make_client(target, interval=None) as without, make_client(target) as client:
            assert without.ping().pid == client.ping().pid == one.pid
            call = client.slow()
            ip(f"rule add pref 50 to {ONE} blackhole")
            assert without.ping(timeout=1.0).code == "DEADLINE_EXCEEDED"
            ended = call.ended()
            assert ended.code == "UNAVAILABLE"
            assert "no answer to heartbeats" in ended.details
            assert client.ping().pid == other.pid


if __name__ == "__main__":
    run({"sync": SyncClient, "aio": AioClient}[sys.argv[1]])
