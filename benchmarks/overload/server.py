"""A server of a case: `python -m benchmarks.overload.server SPEC`, with a `ServerSpec` in JSON.

Prints its port. Then it obeys lines of JSON on its input, and answers each with a line: a number
makes the work of each call so many times longer than at first; null asks for the executions of the
handler, each with the time when it began and whether its caller had gone before it ended. Ends with
its input.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio

import rpcwheel
import rpcwheel.aio
from benchmarks._process import obey
from benchmarks.overload.cases import (
    ADAPTIVE,
    DEADLINE_S,
    METHOD,
    SEVERED,
    SLOTS,
    SWITCH_S,
    SWITCHING,
    World,
)
from benchmarks.overload.work import burn, durations


@dataclass(frozen=True, slots=True)
class ServerSpec:
    """The arguments of the process of a server."""

    world: World
    variant: str
    threads: int  # of the pool of a server of `grpc`
    limit: int | None  # `maximum_concurrent_rpcs`
    varies: bool = False  # whether some calls take longer than others
    burn_s: float = 0.0  # CPU time that its handler uses
    wait_s: float = 0.0  # that its handler waits, in one of `SLOTS`
    port: int = 0  # of the server that its handler calls ...
    calls: int = 0  # ... so many times, one after the other

    @property
    def has_kit(self) -> bool:
        """Whether the server has an adaptive limit."""
        return self.variant in (ADAPTIVE, SEVERED, SWITCHING)

    @property
    def target(self) -> str:
        """The server that the handler calls."""
        return f"127.0.0.1:{self.port}"


class Executions:
    """What the handlers have done, and how slow their work is."""

    def __init__(self, *, varies: bool) -> None:
        self.slowness = 1.0
        self._durations = itertools.cycle(durations() if varies else [1.0])
        self._ended: list[tuple[float, bool]] = []

    def answer(self, slowness: float | None) -> object:
        """Do what a line of the input asks for."""
        if slowness is None:
            return self._ended
        self.slowness = slowness
        return None

    def sync_handler(self, work: Callable[[float], object]) -> Callable[[bytes, Any], bytes]:
        """A handler that works on a thread."""

        def execute(request: bytes, context: Any) -> bytes:
            began_s = time.monotonic()
            try:
                work(self.slowness * next(self._durations))
            except grpc.RpcError as error:  # of a call to the next server
                context.abort(error.code(), error.details())
            is_gone = not context.is_active() or context.time_remaining() == 0.0
            self._ended.append((began_s, is_gone))
            return request

        return execute

    def aio_handler(
        self, work: Callable[[float], Awaitable[object]]
    ) -> Callable[[bytes, Any], Awaitable[bytes]]:
        """A handler that works on the loop."""

        async def execute(request: bytes, context: Any) -> bytes:
            began_s = time.monotonic()
            try:
                await work(self.slowness * next(self._durations))
            except grpc.RpcError as error:
                await context.abort(error.code(), error.details())
            except asyncio.CancelledError:
                self._ended.append((began_s, True))
                raise
            is_gone = context.cancelled() or context.time_remaining() == 0.0
            self._ended.append((began_s, is_gone))
            return request

        return execute


def sync_work(spec: ServerSpec, kit: rpcwheel.Kit | None) -> Callable[[float], None]:
    """The work of a call, given how slow it is."""
    slots = threading.Semaphore(SLOTS)
    call: Any = _method(grpc.insecure_channel(spec.target), spec, kit) if spec.calls else None

    def work(slowness: float) -> None:
        burn(spec.burn_s * slowness)
        if spec.wait_s:
            with slots:
                time.sleep(spec.wait_s * slowness)
        for _ in range(spec.calls):
            call(b"", timeout=DEADLINE_S)

    return work


def aio_work(spec: ServerSpec, kit: rpcwheel.aio.Kit | None) -> Callable[[float], Awaitable[None]]:
    """The work of a call, given how slow it is."""
    slots = asyncio.Semaphore(SLOTS)
    call: Any = _method(grpc.aio.insecure_channel(spec.target), spec, kit) if spec.calls else None

    async def work(slowness: float) -> None:
        burn(spec.burn_s * slowness)
        if spec.wait_s:
            async with slots:
                await asyncio.sleep(spec.wait_s * slowness)
        for _ in range(spec.calls):
            await call(b"", timeout=DEADLINE_S)

    return work


def _method(channel: Any, spec: ServerSpec, kit: Any) -> Any:
    """The method of the next server; its calls inherit criticality and deadline from the kit."""
    if spec.variant == ADAPTIVE:
        channel = kit.intercept_channel(channel)
    return channel.unary_unary(METHOD)


def serve(spec: ServerSpec) -> None:
    """Serve with `grpc`."""
    if spec.variant == SWITCHING:
        sys.setswitchinterval(SWITCH_S)
    kit = rpcwheel.Kit(limit="adaptive") if spec.has_kit else None
    server = grpc.server(
        kit.server_executor(max_workers=spec.threads) if kit else ThreadPoolExecutor(spec.threads),
        interceptors=kit.server_interceptors() if kit else None,
        maximum_concurrent_rpcs=spec.limit,
    )
    executions = Executions(varies=spec.varies)
    port = _add(server, executions.sync_handler(sync_work(spec, kit)))
    server.start()
    obey(port, executions.answer)
    server.stop(None)


async def aio_serve(spec: ServerSpec) -> None:
    """Serve with `grpc.aio`."""
    kit = rpcwheel.aio.Kit(limit="adaptive") if spec.has_kit else None
    server = grpc.aio.server(
        interceptors=kit.server_interceptors() if kit else None, maximum_concurrent_rpcs=spec.limit
    )
    executions = Executions(varies=spec.varies)
    port = _add(server, executions.aio_handler(aio_work(spec, kit)))
    await server.start()
    await asyncio.to_thread(obey, port, executions.answer)
    await server.stop(None)


def _add(server: Any, handler: Callable[[bytes, Any], Any]) -> int:
    _, service, method = METHOD.split("/")
    handlers = {method: grpc.unary_unary_rpc_method_handler(handler)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
    port: int = server.add_insecure_port("127.0.0.1:0")
    return port


if __name__ == "__main__":
    _spec = ServerSpec(**json.loads(sys.argv[1]))
    if _spec.world == "sync":
        serve(_spec)
    else:
        asyncio.run(aio_serve(_spec))
