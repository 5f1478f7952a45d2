"""The kernel drops packets to one of two addresses; run it in a network namespace.

    unshare --map-root-user --net python -m scenarios.dropped_packets

A rule of the routing table drops them, so no firewall is needed: open connections stay open, and
their packets are lost silently. Exit status 0: the connection was replaced.
"""

import subprocess

import grpc

from fixtures.heartbeat_clients import Client
from fixtures.server_process import KillableServer

ONE, OTHER = "10.77.0.1", "10.77.0.2"


def ip(command: str) -> None:
    """Run a command of iproute2."""
    subprocess.run(["ip", *command.split()], check=True)


def run() -> None:
    """Check the calls of a client with heartbeats."""
    ip("link set lo up")
    for address in (ONE, OTHER):
        ip(f"addr add {address}/32 dev lo")
    ip("rule add pref 100 lookup local")  # behind the rule that is added below
    ip("rule del pref 0")
    with KillableServer(host=ONE) as one, KillableServer(host=OTHER) as other:
        target = f"ipv4:{one.target},{other.target}"
        with Client("aio", target) as client:
            assert client.ping() == one.pid
            call = client.slow()
            ip(f"rule add pref 50 to {ONE} blackhole")
            error = call.error()
            assert error.code() is grpc.StatusCode.UNAVAILABLE
            assert "no answer to heartbeats" in error.details()
            assert client.ping() == other.pid


if __name__ == "__main__":
    run()
