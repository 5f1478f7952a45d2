"""What is left on a server after thousands of connections that came and went.

Most are raw sockets, which say nothing, or HTTP/2's first bytes and nothing more; each fifth is a
gRPC channel that makes a call. Before them there are a tenth as many that do not count.
"""

from __future__ import annotations

import socket
import time

from benchmarks.calls.scale import Row, World
from benchmarks.calls.wire import PAYLOAD, UNARY_UNARY
from benchmarks.connections.channels import bare
from benchmarks.connections.far import Far
from benchmarks.connections.scale import Scale
from benchmarks.connections.subjects import CHURN, CHURNED, DETECTOR

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
IDLE_S = 1.5
"""So that the detector looks twice a second."""


def measure(world: World, scale: Scale) -> list[Row]:
    """A row for each subject, each in a process of its own."""
    return [_row(world, name, scale) for name in CHURNED]


def _row(world: World, name: str, scale: Scale) -> Row:
    with Far(world, name) as far:
        if name == DETECTOR:
            far.ask(["idle", name, IDLE_S])
        end = time.monotonic() + scale.cycles_s
        _cycle(far.targets[name], scale.cycles // 10, end)
        before = _settled(far, name, scale)
        cpu_ns, began = far.cpu_ns(), time.monotonic()
        done = _cycle(far.targets[name], scale.cycles, end)
        used_ms, wall_s = (far.cpu_ns() - cpu_ns) / 1e6, time.monotonic() - began
        after = _settled(far, name, scale)
    values: dict[str, float] = {"cycles": done, "cpu_ms": used_ms, "wall_s": wall_s}
    for key, divisor in (("descriptors", 1), ("entries", 1), ("memory", 2**20)):
        values[f"{key}_before"] = before[key] / divisor
        values[f"{key}_after"] = after[key] / divisor
    return Row("server", world, CHURN, name, values)


def _settled(far: Far, name: str, scale: Scale) -> dict[str, int]:
    time.sleep(scale.settle_s)
    state: dict[str, int] = far.ask(["state", name])
    return state


def _cycle(target: str, times: int, end: float) -> int:
    """Open and close connections; gives how many."""
    host, _, port = target.rpartition(":")
    for number in range(times):
        if time.monotonic() > end:
            return number
        if number % 5 == 0:
            with bare(target) as channel:
                channel.unary_unary(UNARY_UNARY)(PAYLOAD)
        else:
            with socket.create_connection((host, int(port))) as raw:
                if number % 2:
                    raw.sendall(PREFACE)
    return times
