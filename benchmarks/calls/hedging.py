"""The latency of unary calls to a server that delays some of them, without and with hedging."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, repeat
from typing import Any

import grpc
import grpc.aio

import rpcwheel
import rpcwheel.aio
from benchmarks.calls.scale import HEDGING, Row, Scale, World
from benchmarks.calls.server_process import ServerProcess
from benchmarks.calls.subjects import HEDGED, TIMEOUT_S, UNHEDGED
from benchmarks.calls.wire import PAYLOAD, SERVICE, UNARY_UNARY
from rpcwheel import HedgingPolicy, MethodPolicy

DELAY_S = 0.05
"""Above what a call takes that the server does not delay, on a slow machine too."""

POLICY = HedgingPolicy(delay=DELAY_S)
CONCURRENCY = 4
"""How many callers there are, each with one call at a time."""

WARM_UP = 10
"""Calls of each caller before the measurement, which make the connection."""


class SlowServer(ServerProcess):
    """The process of the server that delays some calls."""

    program = "benchmarks.calls.slow_server"

    def calls(self) -> int:
        """How many calls it has received."""
        return int(self.ask("calls"))


def measure(world: World, scale: Scale) -> list[Row]:
    """One row without hedging, one with it."""
    each = scale.hedged // CONCURRENCY
    rows = []
    for name in (UNHEDGED, HEDGED):
        with SlowServer("aio", name) as server:
            target, settings = server.targets[name], _settings(name)
            if world == "sync":
                taken_ns, received = _sync(target, settings, server, each)
            else:
                taken_ns, received = asyncio.run(_aio(target, settings, server, each))
        rows.append(Row("client", world, HEDGING, name, _values(taken_ns, received)))
    return rows


def _settings(name: str) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "timeout": TIMEOUT_S,
        "methods": {f"/{SERVICE}/*": MethodPolicy(idempotent=True)},
    }
    return settings | {"hedging": POLICY} if name == HEDGED else settings


def _sync(
    target: str, settings: dict[str, Any], server: SlowServer, each: int
) -> tuple[list[int], int]:
    """The time of each call in nanoseconds, and how many calls the server received."""
    with (
        rpcwheel.Kit(**settings) as kit,
        kit.channel(target) as channel,
        ThreadPoolExecutor(CONCURRENCY) as pool,
    ):
        call = channel.unary_unary(UNARY_UNARY)

        def caller(calls: int) -> list[int]:
            return [_timed(call) for _ in repeat(None, calls)]

        list(pool.map(caller, [WARM_UP] * CONCURRENCY))
        before = server.calls()
        taken_ns = list(chain.from_iterable(pool.map(caller, [each] * CONCURRENCY)))
        return taken_ns, server.calls() - before


def _timed(call: grpc.UnaryUnaryMultiCallable) -> int:
    began_ns = time.perf_counter_ns()
    call(PAYLOAD)
    return time.perf_counter_ns() - began_ns


async def _aio(
    target: str, settings: dict[str, Any], server: SlowServer, each: int
) -> tuple[list[int], int]:
    async with rpcwheel.aio.Kit(**settings) as kit, kit.channel(target) as channel:
        call = channel.unary_unary(UNARY_UNARY)

        async def caller(calls: int) -> list[int]:
            return [await _aio_timed(call) for _ in repeat(None, calls)]

        await asyncio.gather(*(caller(WARM_UP) for _ in range(CONCURRENCY)))
        before = server.calls()
        taken_ns = await asyncio.gather(*(caller(each) for _ in range(CONCURRENCY)))
        return list(chain.from_iterable(taken_ns)), server.calls() - before


async def _aio_timed(call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes]) -> int:
    began_ns = time.perf_counter_ns()
    await call(PAYLOAD)
    return time.perf_counter_ns() - began_ns


def _values(taken_ns: Sequence[int], received: int) -> dict[str, float]:
    ordered = sorted(taken_ns)

    def percentile_ms(percent: int) -> float:
        return ordered[math.ceil(percent / 100 * len(ordered)) - 1] / 1e6

    return {
        "p50_ms": percentile_ms(50),
        "p99_ms": percentile_ms(99),
        "longest_ms": ordered[-1] / 1e6,
        "calls": len(ordered),
        "extra_calls": received - len(ordered),
    }
