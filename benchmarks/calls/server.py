"""The servers, as a process: `python -m benchmarks.calls.server WORLD SUBJECT...`.

One server for each subject, each on a port of its own, all in this process: a server that is not
called costs nothing. Prints the ports as a line of JSON. Then it answers each line on its stdin
with the CPU time that the process has used, and ends when its stdin does.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import grpc.aio

from benchmarks._process import obey
from benchmarks.calls import own, rivals
from benchmarks.calls.subjects import BARE, GRPC_INTERCEPTOR, KIT, NOOP, OTEL
from benchmarks.calls.wire import PAYLOAD, SERVICE

INTERCEPTORS: dict[str, Callable[[str], Any]] = {
    BARE: lambda _: (),
    NOOP: lambda world: (rivals.AioServerNoOp() if world == "aio" else rivals.ServerNoOp(),),
    KIT: lambda world: own.server_interceptors(aio=world == "aio"),
    GRPC_INTERCEPTOR: lambda world: (rivals.grpc_interceptor_server(aio=world == "aio"),),
    OTEL: lambda world: (rivals.otel_server(aio=world == "aio"),),
}
"""The interceptors of each subject, by world."""


def main(world: str, *subjects: str) -> None:
    """Serve until stdin ends."""
    if world == "aio":
        asyncio.run(_serve_aio(subjects))
    else:
        _serve(subjects)


def _serve(subjects: tuple[str, ...]) -> None:
    ports, servers = {}, []
    for name in subjects:
        server = grpc.server(ThreadPoolExecutor(4), interceptors=INTERCEPTORS[name]("sync"))
        server.add_generic_rpc_handlers((_handlers(_echo, _stream, _sum, _echo_all),))
        ports[name] = server.add_insecure_port("127.0.0.1:0")
        server.start()
        servers.append(server)
    obey(ports, _cpu_ns)
    for server in servers:
        server.stop(None).wait()


async def _serve_aio(subjects: tuple[str, ...]) -> None:
    ports, servers = {}, []
    for name in subjects:
        server = grpc.aio.server(interceptors=INTERCEPTORS[name]("aio"))
        handlers = _handlers(_aio_echo, _aio_stream, _aio_sum, _aio_echo_all)
        server.add_generic_rpc_handlers((handlers,))
        ports[name] = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        servers.append(server)
    await asyncio.to_thread(obey, ports, _cpu_ns)
    for server in servers:
        await server.stop(None)


def _cpu_ns(_: object) -> int:
    return time.process_time_ns()


def _handlers(*behaviours: Callable[..., Any]) -> grpc.GenericRpcHandler:
    unary, responses, requests, both = behaviours
    return grpc.method_handlers_generic_handler(
        SERVICE,
        {
            "UnaryUnary": grpc.unary_unary_rpc_method_handler(unary),
            "UnaryStream": grpc.unary_stream_rpc_method_handler(responses),
            "StreamUnary": grpc.stream_unary_rpc_method_handler(requests),
            "StreamStream": grpc.stream_stream_rpc_method_handler(both),
        },
    )


def _echo(request: bytes, _: grpc.ServicerContext) -> bytes:
    return request


def _stream(request: bytes, _: grpc.ServicerContext) -> Iterator[bytes]:
    for _number in range(int(request)):
        yield PAYLOAD


def _sum(requests: Iterator[bytes], _: grpc.ServicerContext) -> bytes:
    return str(sum(1 for _request in requests)).encode()


def _echo_all(requests: Iterator[bytes], _: grpc.ServicerContext) -> Iterator[bytes]:
    yield from requests


async def _aio_echo(request: bytes, _: grpc.aio.ServicerContext) -> bytes:
    return request


async def _aio_stream(request: bytes, _: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
    for _number in range(int(request)):
        yield PAYLOAD


async def _aio_sum(requests: AsyncIterator[bytes], _: grpc.aio.ServicerContext) -> bytes:
    return str(len([1 async for _request in requests])).encode()


async def _aio_echo_all(
    requests: AsyncIterator[bytes], _: grpc.aio.ServicerContext
) -> AsyncIterator[bytes]:
    async for request in requests:
        yield request


if __name__ == "__main__":
    main(*sys.argv[1:])
