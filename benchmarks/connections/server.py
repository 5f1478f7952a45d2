"""The far side, a process: `python -m benchmarks.connections.server WORLD SUBJECT...`.

One server for each subject, each on a port of its own. Prints the ports as a line of JSON; then
answers questions (`Desk`).
"""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from benchmarks._clock import Stopwatch
from benchmarks._process import obey
from benchmarks.calls.rivals import AioServerNoOp, ServerNoOp
from benchmarks.calls.wire import SERVICE
from benchmarks.connections.far import LONG_S, make_room
from benchmarks.connections.subjects import DETECTOR, NOOP, TABLE
from rpcwheel.idle import ConnectionTable, IdleConnectionDetector
from rpcwheel.idle.aio import ConnectionTable as AioConnectionTable
from rpcwheel.idle.aio import IdleConnectionDetector as AioIdleConnectionDetector

Finish = Callable[[Any], Any]
"""Waits for what a method gives, where it is a coroutine."""

OPTIONS = (
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 10),
    ("grpc.so_reuseport", 0),
)
"""Clients may ping as often as they like."""

SERVING = b"\x08\x01"


@dataclass(slots=True)
class Served:
    """One server, and what looks after it."""

    server: Any
    port: int
    table: Any = None
    detector: Any = None


class Desk:
    """Answers questions."""

    def __init__(self, served: dict[str, Served], beats: list[int], finish: Finish) -> None:
        self._served = served
        self._beats = beats
        self._finish = finish

    def answer(self, question: Any) -> object:
        """Whatever JSON can say."""
        match question:
            case "cpu":
                return time.process_time_ns()
            case "beats":
                return self._beats
            case ["state", name]:
                return self._state(self._served[name])
            case ["look", name]:
                return self._look(self._served[name])
            case ["idle", name, seconds]:
                self._served[name].detector.change(idle_timeout=seconds)
                return None
            case "psutil":
                return _timed(_psutil_lists)
        raise ValueError(f"{question}?")

    def _look(self, served: Served) -> object:
        return _timed(lambda: len(self._finish(served.detector.check())))

    def _state(self, served: Served) -> dict[str, int]:
        gc.collect()
        return {
            "descriptors": len(list(Path("/dev/fd").iterdir())),
            "entries": 0 if served.table is None else len(served.table._table),
            "memory": int(Path("/proc/self/statm").read_text().split()[1])
            * os.sysconf("SC_PAGESIZE"),
        }


def _timed(work: Callable[[], int]) -> dict[str, float]:
    watch = Stopwatch()
    count = work()
    cost = watch.per(1)
    return {"cpu_ms": cost.cpu_ns / 1e6, "wall_ms": cost.wall_ns / 1e6, "count": count}


def _psutil_lists() -> int:
    import psutil

    return len(psutil.Process().net_connections("tcp"))


def main(world: str, *subjects: str) -> None:
    """Serve until stdin ends."""
    make_room()
    if world == "aio":
        asyncio.run(_serve_aio(subjects))
    else:
        _serve(subjects)


def _serve(subjects: tuple[str, ...]) -> None:
    served: dict[str, Served] = {}
    beats: list[int] = []

    def check(_request: bytes, _context: grpc.ServicerContext) -> bytes:
        beats.append(time.monotonic_ns())
        return SERVING

    for name in subjects:
        table = ConnectionTable() if name in (TABLE, DETECTOR) else None
        first = ServerNoOp() if name == NOOP else table
        server = grpc.server(
            ThreadPoolExecutor(4),
            interceptors=() if first is None else (first,),
            options=OPTIONS,
        )
        server.add_generic_rpc_handlers(_handlers(lambda request, _: request, check))
        one = served[name] = Served(server, server.add_insecure_port("127.0.0.1:0"), table)
        if name == DETECTOR:
            one.detector = IdleConnectionDetector(server, LONG_S, connections=table, ports=one.port)
        server.start()
    obey(_ports(served), Desk(served, beats, lambda result: result).answer)
    for one in served.values():
        if one.detector is not None:
            one.detector.close()
        one.server.stop(None).wait()


async def _serve_aio(subjects: tuple[str, ...]) -> None:
    served: dict[str, Served] = {}
    beats: list[int] = []
    loop = asyncio.get_running_loop()

    async def echo(request: bytes, _: grpc.aio.ServicerContext) -> bytes:
        return request

    async def check(_request: bytes, _: grpc.aio.ServicerContext) -> bytes:
        beats.append(time.monotonic_ns())
        return SERVING

    for name in subjects:
        table = AioConnectionTable() if name in (TABLE, DETECTOR) else None
        first = AioServerNoOp() if name == NOOP else table
        server = grpc.aio.server(interceptors=() if first is None else (first,), options=OPTIONS)
        server.add_generic_rpc_handlers(_handlers(echo, check))
        one = served[name] = Served(server, server.add_insecure_port("127.0.0.1:0"), table)
        if name == DETECTOR:
            one.detector = AioIdleConnectionDetector(
                server, LONG_S, connections=table, ports=one.port
            )
        await server.start()
    desk = Desk(served, beats, lambda result: _finish(result, loop))
    await asyncio.to_thread(obey, _ports(served), desk.answer)
    for one in served.values():
        if one.detector is not None:
            one.detector.close()
        await one.server.stop(None)


def _finish(result: object, loop: asyncio.AbstractEventLoop) -> object:
    if isinstance(result, Coroutine):
        return asyncio.run_coroutine_threadsafe(result, loop).result()
    return result


def _handlers(echo: Callable[..., Any], check: Callable[..., Any]) -> Any:
    handler = grpc.unary_unary_rpc_method_handler
    return (
        grpc.method_handlers_generic_handler(SERVICE, {"UnaryUnary": handler(echo)}),
        grpc.method_handlers_generic_handler("grpc.health.v1.Health", {"Check": handler(check)}),
    )


def _ports(served: dict[str, Served]) -> dict[str, int]:
    return {name: one.port for name, one in served.items()}


if __name__ == "__main__":
    main(*sys.argv[1:])
