"""The kernel drops what is sent to one of two addresses; run in a network namespace of its own.

    unshare --map-root-user --net python -m scenarios.dropped_packets

A rule of the routing table does it, so that no firewall need be installed: a connection that is
open stays so, and its packets are lost without a word. It ends with 0 if all was as it must be.
"""

import subprocess

from fixtures.heartbeat_worlds import AioClient
from fixtures.server_process import KillableServer

ONE, OTHER = "10.77.0.1", "10.77.0.2"


def ip(command: str) -> None:
    """Run a command of iproute2."""
    subprocess.run(["ip", *command.split()], check=True)


def run() -> None:
    """See what becomes of calls with heartbeats; both worlds find silence the same way."""
    ip("link set lo up")
    for address in (ONE, OTHER):
        ip(f"addr add {address}/32 dev lo")
    ip("rule add pref 100 lookup local")  # behind what is added below
    ip("rule del pref 0")
    with KillableServer(host=ONE) as one, KillableServer(host=OTHER) as other:
        target = f"ipv4:{one.target},{other.target}"
        with AioClient(target) as client:
            assert client.ping().pid == one.pid
            call = client.slow()
            ip(f"rule add pref 50 to {ONE} blackhole")
            ended = call.ended()
            assert ended.code == "UNAVAILABLE"
            assert "no answer to heartbeats" in ended.details
            assert client.ping().pid == other.pid


if __name__ == "__main__":
    run()
