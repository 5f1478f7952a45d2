"""The server of a case: `python -m benchmarks.overload.server SPEC`, with a spec in JSON.

Prints its port. Then it obeys lines of JSON on its input, and answers each with a line: a number
makes the work of each call so many times slower than at first; null asks for the executions of the
handler, each with the time when it began and whether its caller had gone before it ended. Ends with
its input.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio

import rpcwheel
import rpcwheel.aio
from benchmarks.overload.cases import (
    ADAPTIVE,
    FIXED,
    HANDLERS,
    METHOD,
    SLOTS,
    WAIT_S,
    World,
)
from benchmarks.overload.work import burn


@dataclass(frozen=True, slots=True)
class ServerSpec:
    """What the process of a server is told."""

    world: World
    handler: str
    variant: str
    loops: int  # that a handler burns

    @property
    def limit(self) -> int | None:
        """`maximum_concurrent_rpcs`."""
        return HANDLERS[self.handler].best_limit if self.variant == FIXED else None


class Executions:
    """The work of the handlers, and what they have done."""

    def __init__(self, spec: ServerSpec) -> None:
        self._loops = spec.loops
        self._is_burning = spec.handler == "burn"
        self._slowness = 1.0
        self._ended: list[tuple[float, bool]] = []

    def answer(self, line: str) -> object:
        """Obey a line of the input."""
        slowness = json.loads(line)
        if slowness is None:
            return self._ended
        self._slowness = slowness
        return None

    def _end(self, began_s: float, *, is_gone: bool) -> None:
        self._ended.append((began_s, is_gone))

    @property
    def _wait_s(self) -> float:
        return WAIT_S * self._slowness

    def _burn(self) -> None:
        burn(round(self._loops * self._slowness))


class SyncExecutions(Executions):
    """Executions on threads."""

    def __init__(self, spec: ServerSpec) -> None:
        super().__init__(spec)
        self._slots = threading.Semaphore(SLOTS)

    def execute(self, request: bytes, context: Any) -> bytes:
        """The handler."""
        began_s = time.monotonic()
        if self._is_burning:
            self._burn()
        else:
            with self._slots:
                time.sleep(self._wait_s)
        is_gone = not context.is_active() or context.time_remaining() == 0.0
        self._end(began_s, is_gone=is_gone)
        return request


class AioExecutions(Executions):
    """Executions on a loop."""

    def __init__(self, spec: ServerSpec) -> None:
        super().__init__(spec)
        self._slots = asyncio.Semaphore(SLOTS)

    async def execute(self, request: bytes, context: Any) -> bytes:
        """The handler."""
        began_s = time.monotonic()
        try:
            if self._is_burning:
                self._burn()
            else:
                async with self._slots:
                    await asyncio.sleep(self._wait_s)
        except asyncio.CancelledError:
            self._end(began_s, is_gone=True)
            raise
        is_gone = context.cancelled() or context.time_remaining() == 0.0
        self._end(began_s, is_gone=is_gone)
        return request


def obey(port: int, answer: Callable[[str], object]) -> None:
    """Print the port, and answer the lines of the input until it ends."""
    print(port, flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(line)), flush=True)


def serve(spec: ServerSpec) -> None:
    """Serve with `grpc`."""
    executions, threads = SyncExecutions(spec), HANDLERS[spec.handler].threads
    if spec.variant == ADAPTIVE:
        kit = rpcwheel.Kit(limit="adaptive")
        server = grpc.server(
            kit.server_executor(max_workers=threads), interceptors=kit.server_interceptors()
        )
    else:
        server = grpc.server(ThreadPoolExecutor(threads), maximum_concurrent_rpcs=spec.limit)
    port = _add(server, executions.execute)
    server.start()
    obey(port, executions.answer)
    server.stop(None)


async def aio_serve(spec: ServerSpec) -> None:
    """Serve with `grpc.aio`."""
    executions = AioExecutions(spec)
    if spec.variant == ADAPTIVE:
        kit = rpcwheel.aio.Kit(limit="adaptive")
        server = grpc.aio.server(interceptors=kit.server_interceptors())
    else:
        server = grpc.aio.server(maximum_concurrent_rpcs=spec.limit)
    port = _add(server, executions.execute)
    await server.start()
    await asyncio.to_thread(obey, port, executions.answer)
    await server.stop(None)


def _add(server: Any, execute: Callable[..., Any]) -> int:
    _, service, method = METHOD.split("/")
    handlers = {method: grpc.unary_unary_rpc_method_handler(execute)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
    port: int = server.add_insecure_port("127.0.0.1:0")
    return port


if __name__ == "__main__":
    _spec = ServerSpec(**json.loads(sys.argv[1]))
    if _spec.world == "sync":
        serve(_spec)
    else:
        asyncio.run(aio_serve(_spec))
