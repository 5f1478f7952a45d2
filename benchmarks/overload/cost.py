"""What a limit costs on an idle server, without gRPC: what it does for one call.

    python -m benchmarks.overload.cost

A call of `grpc` is its interceptor, and `submit` until the end of its function on a thread; beside
it the same with a `ThreadPoolExecutor` and no interceptor. A call of `grpc.aio` is a task that runs
the interceptor and ends; beside it a task that does not. Both wait for the end, so the difference
is that of one call. The bursts of all subjects take turns; the figures are medians.
"""

from __future__ import annotations

import asyncio
import contextvars
import gc
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from statistics import median
from types import SimpleNamespace
from typing import Any

import grpc

from benchmarks._clock import Cost, cost
from rpcwheel import Kit
from rpcwheel.aio import Kit as AioKit

CALLS, ROUNDS = 2_000, 51


def echo(request: object, _: object) -> object:
    """The handler of calls of `grpc`."""
    return request


async def aio_echo(request: object, _: object) -> object:
    """The handler of calls of `grpc.aio`. A plain function would run on a thread."""
    return request


HANDLER: Any = grpc.unary_unary_rpc_method_handler(echo)
AIO_HANDLER: Any = grpc.unary_unary_rpc_method_handler(aio_echo)
METADATA = (("user-agent", "grpc-python/1.85.0"), ("rpcwheel-nonce", "5f0c-1"))
DETAILS: Any = SimpleNamespace(method="/shop.Orders/Get", invocation_metadata=METADATA)
EVENT = SimpleNamespace(call_details=SimpleNamespace(deadline=time.time() + 1e6))


def noop(*_: object) -> None:
    """Stands for a handler."""


def sync_calls(limit: Any, executor: ThreadPoolExecutor) -> Callable[[int], object]:
    """Returns a function that makes calls as gRPC does, one after the other."""
    # The callbacks of calls that wait: the thread may not have ended the call before.
    state = SimpleNamespace(
        client="open", condition=threading.Condition(), callbacks=deque(maxlen=1)
    )

    def call() -> Future[None]:
        context = contextvars.Context()
        if limit is not None:
            context.run(limit.intercept_service, lambda _: HANDLER, DETAILS)
        return executor.submit(context.run, noop, EVENT, state)

    ended = threading.Semaphore(0)

    def calls(number: int) -> None:
        for _ in range(number):
            call().add_done_callback(lambda _: ended.release())
            ended.acquire()

    return calls


def aio_calls(limit: Any, loop: asyncio.AbstractEventLoop) -> Callable[[int], object]:
    """Returns a function that runs tasks as those of gRPC, one after the other."""

    async def handler(_: object) -> grpc.RpcMethodHandler:
        return AIO_HANDLER

    async def call() -> None:
        if limit is None:
            await handler(DETAILS)
        else:
            await limit.intercept_service(handler, DETAILS)

    async def calls(number: int) -> None:
        for _ in range(number):
            await asyncio.create_task(call())

    return lambda number: loop.run_until_complete(calls(number))


@contextmanager
def subjects() -> Iterator[dict[str, Callable[[int], object]]]:
    """The calls of each subject by its name; the baseline of a world first."""
    loop = asyncio.new_event_loop()
    kit, aio_kit = Kit(limit="adaptive"), AioKit(limit="adaptive")
    limit: Any = kit.server_interceptors()[0]
    with ThreadPoolExecutor(1) as plain, kit.server_executor(1) as limited:
        yield {
            "grpc": sync_calls(None, plain),
            "grpc, limit": sync_calls(limit, limited),
            "grpc.aio": aio_calls(None, loop),
            "grpc.aio, limit": aio_calls(aio_kit.server_interceptors()[0], loop),
        }
    kit.close()
    loop.run_until_complete(aio_kit.close())
    loop.close()


def main() -> int:
    """Measure, and print a table."""
    costs: dict[str, list[Cost]] = {}
    with subjects() as bursts:
        gc.collect()
        gc.freeze()
        for _ in range(ROUNDS + 1):
            for name, burst in bursts.items():
                costs.setdefault(name, []).append(cost(burst, CALLS))
    for baseline in ("grpc", "grpc.aio"):
        name = f"{baseline}, limit"
        pairs = list(zip(costs[name][1:], costs[baseline][1:], strict=True))
        more = median(this.cpu_ns - base.cpu_ns for this, base in pairs)
        ratio = median(this.cpu_ns / base.cpu_ns for this, base in pairs)
        base_us = median(base.cpu_ns for _, base in pairs) / 1e3
        print(f"{baseline}: {base_us:.2f} us; with a limit {more / 1e3:.2f} us more, x{ratio:.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
