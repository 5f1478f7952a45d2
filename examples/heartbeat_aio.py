"""A frozen server is detected and replaced, in aio; run it: python examples/heartbeat_aio.py.

One target has two servers. The first one is frozen: its connection stays open, and gRPC would wait
forever. Heartbeats detect it, end the call, and the channel connects to the second server.
"""

import asyncio
import sys
import time

import grpc
from audit_pb2 import Line
from audit_pb2_grpc import AuditStub
from audit_server import AuditServer

from rpcwheel.heartbeat import HeartbeatState
from rpcwheel.heartbeat.aio import Heartbeat, HeartbeatManager
from rpcwheel.transport.aio import ReconnectingChannel

INTERVAL, TIMEOUT = 1.0, 5.0  # the defaults are 60 s and 180 s


def print_state(_: Heartbeat, old: HeartbeatState, new: HeartbeatState) -> None:
    """Print the new state of the connection."""
    print(f"    connection: {old.name} -> {new.name}")


async def main() -> int:
    """Make a call before, during and after the freeze of the first server."""
    with AuditServer("one") as one, AuditServer("two") as two:
        async with (
            ReconnectingChannel(f"ipv4:{one.target},{two.target}") as channel,
            HeartbeatManager(interval=INTERVAL, timeout=TIMEOUT) as heartbeats,
        ):
            heartbeats.attach(channel).add_listener(print_state)
            audit = AuditStub(channel)  # still works after the replacement
            await audit.Push(Line(text="order 1"))
            one.freeze()
            took, began = 0.0, time.monotonic()
            try:
                await audit.Push(Line(text="order 2"))  # it has no timeout
            except grpc.aio.AioRpcError as error:
                took = time.monotonic() - began
                print(f"order 2: {error.code().name} after {took:.1f} s,", error.details())
            receipt = await audit.Push(Line(text="order 3"))
            print(f"order 3: answered on connection {channel.number}")
    return 0 if receipt.number == 1 and took < 10 * TIMEOUT else 1  # server two's first call


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
