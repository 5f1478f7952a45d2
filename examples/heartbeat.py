"""A frozen server is noticed and replaced; run it: python examples/heartbeat.py.

Two servers have one name. The first is frozen: its connection stays open, and gRPC would wait for
an answer for ever. Heartbeats notice, end the call, and connect to the second.
"""

import sys
import time

import grpc
from audit_pb2 import Line
from audit_pb2_grpc import AuditStub
from audit_server import AuditServer

from rpcwheel.heartbeat import Heartbeat, HeartbeatManager, HeartbeatState
from rpcwheel.transport import ReconnectingChannel

INTERVAL, TIMEOUT = 0.4, 1.2  # a minute and three of them, if nothing is said


def told(_: Heartbeat, old: HeartbeatState, new: HeartbeatState) -> None:
    """Print what became of the connection."""
    print(f"    connection: {old.name} -> {new.name}")


def main() -> int:
    """Call before, while, and after the first server is frozen."""
    with (
        AuditServer("one") as one,
        AuditServer("two") as two,
        ReconnectingChannel(f"ipv4:{one.target},{two.target}") as channel,
        HeartbeatManager(interval=INTERVAL, timeout=TIMEOUT) as heartbeats,
    ):
        heartbeats.attach(channel).add_listener(told)
        audit = AuditStub(channel)  # made once: it goes on after the replacement
        audit.Push(Line(text="order 1"))
        one.freeze()
        took, began = 0.0, time.monotonic()
        try:
            audit.Push(Line(text="order 2"))  # it has no timeout
        except grpc.RpcError as error:
            took = time.monotonic() - began
            print(f"order 2: {error.code().name} after {took:.1f} s,", error.details())  # type: ignore[attr-defined]  # grpc has no types
        receipt = audit.Push(Line(text="order 3"))
        print(f"order 3: answered on connection {channel.number}")
    return 0 if receipt.number == 1 and took < 10 * TIMEOUT else 1  # the first of the second


if __name__ == "__main__":
    sys.exit(main())
