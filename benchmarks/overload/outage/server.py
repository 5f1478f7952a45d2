"""A server that can be broken: `python -m benchmarks.overload.outage.server SPEC`.

SPEC is a `ServerSpec` in JSON. Prints its port. Then it obeys lines of JSON on its input, and
answers each with a line: `[how, methods]` breaks these methods, and repairs all others; null asks
for the calls that have arrived, each with the time, the time when it was sent, and its method. Ends
with its input.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio

from benchmarks._process import obey
from benchmarks.overload.cases import DEADLINE_S, METHOD, SLOTS, SLOW, WAIT_S, World
from rpcwheel.options import server_options

METHODS = tuple(f"{METHOD}{number}" for number in range(10))
SENT_KEY = "sent"
"""The metadata with the time when an attempt was sent; no health check has it."""

CAPACITY = SLOTS / WAIT_S
"""Calls a second."""

HANGS_S = 1.2 * DEADLINE_S
"""How long a handler takes that does not answer in time."""

OPTIONS = server_options(preset="lan")


@dataclass(frozen=True, slots=True)
class ServerSpec:
    """The arguments of the process of a server."""

    world: World
    port: int = 0  # 0: any


class Service:
    """Which methods are broken, and which calls have arrived."""

    def __init__(self) -> None:
        self._broken: dict[str, str] = {}
        self._arrivals: list[tuple[float, float, str]] = []

    def answer(self, question: Any) -> object:
        """Do what a line of the input asks for."""
        match question:
            case None:
                return self._arrivals[:]
            case [how, methods]:
                self._broken = dict.fromkeys(methods, how)
            case unknown:
                raise ValueError(f"null or [how, methods], not {unknown}")
        return None

    def arrived(self, details: Any) -> None:
        """Note the arrival of a call, unless it is a health check."""
        sent_s = dict(details.invocation_metadata).get(SENT_KEY)
        if sent_s is not None:
            self._arrivals.append((time.monotonic(), float(sent_s), details.method))

    def work_of(self, method: str) -> tuple[grpc.StatusCode | None, float]:
        """The status of a method that fails, or how long it works."""
        how = self._broken.get(method)
        if how is None or how == SLOW:
            return None, HANGS_S if how else WAIT_S
        return grpc.StatusCode[how], 0.0


class SyncArrivals(grpc.ServerInterceptor):
    """Notes each call before it waits for a thread."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def intercept_service(self, continuation: Callable[[Any], Any], details: Any) -> Any:
        self._service.arrived(details)
        return continuation(details)


class AioArrivals(grpc.aio.ServerInterceptor):
    """Notes each call before it waits for a slot."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], details: Any
    ) -> Any:
        self._service.arrived(details)
        return await continuation(details)


def sync_handler(service: Service, method: str) -> Callable[[bytes, Any], bytes]:
    """The handler of a method of `grpc`, which waits on one of `SLOTS` threads."""

    def execute(request: bytes, context: Any) -> bytes:
        code, wait_s = service.work_of(method)
        if code is not None:
            context.abort(code, "broken")
        time.sleep(wait_s)
        return request

    return execute


def aio_handler(
    service: Service, method: str, slots: asyncio.Semaphore
) -> Callable[[bytes, Any], Awaitable[bytes]]:
    """The handler of a method of `grpc.aio`, which waits in one of the slots."""

    async def execute(request: bytes, context: Any) -> bytes:
        code, wait_s = service.work_of(method)
        if code is not None:
            await context.abort(code, "broken")
        async with slots:
            await asyncio.sleep(wait_s)
        return request

    return execute


def serve(spec: ServerSpec) -> None:
    """Serve with `grpc`."""
    service = Service()
    server = grpc.server(
        ThreadPoolExecutor(SLOTS), interceptors=[SyncArrivals(service)], options=OPTIONS
    )
    port = _add(server, spec, lambda method: sync_handler(service, method))
    server.start()
    obey(port, service.answer)
    server.stop(None)


async def aio_serve(spec: ServerSpec) -> None:
    """Serve with `grpc.aio`."""
    service, slots = Service(), asyncio.Semaphore(SLOTS)
    server = grpc.aio.server(interceptors=[AioArrivals(service)], options=OPTIONS)
    port = _add(server, spec, lambda method: aio_handler(service, method, slots))
    await server.start()
    await asyncio.to_thread(obey, port, service.answer)
    await server.stop(None)


def _add(
    server: Any, spec: ServerSpec, handler: Callable[[str], Callable[[bytes, Any], Any]]
) -> int:
    handlers = {
        method.rpartition("/")[2]: grpc.unary_unary_rpc_method_handler(handler(method))
        for method in METHODS
    }
    _, name, _ = METHOD.split("/")
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, handlers),))
    port: int = server.add_insecure_port(f"127.0.0.1:{spec.port}")
    return port


if __name__ == "__main__":
    sys.setswitchinterval(0.0005)  # an arrival is noted soon
    _spec = ServerSpec(**json.loads(sys.argv[1]))
    if _spec.world == "sync":
        serve(_spec)
    else:
        asyncio.run(aio_serve(_spec))
