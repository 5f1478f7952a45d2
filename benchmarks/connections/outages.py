"""How long it takes to get through once a server is back that could not be reached.

During the outage each subject makes a call every now and then, all of which fail, so that gRPC's
waits between its attempts grow. When the server is back, each gets a new connection in its own way
and makes one call that waits; one leaves its channel alone.
"""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from statistics import median

import grpc

from benchmarks.calls.scale import Row, World
from benchmarks.connections.far import Far
from benchmarks.connections.relay import Relay
from benchmarks.connections.replacing import AioHeld, Held
from benchmarks.connections.scale import Scale
from benchmarks.connections.subjects import (
    GLOBAL,
    LOCAL,
    NO_INTERCEPTOR,
    RECOVERY,
    RENEWED,
    UNTOUCHED,
)

SUBJECTS = (RENEWED, LOCAL, GLOBAL, UNTOUCHED)
PAUSE_S = 0.05
TIMEOUT_S = 60.0
"""Longer than gRPC's waits grow here."""


def measure(world: World, scale: Scale) -> list[Row]:
    """A row for each subject."""
    taken: dict[str, list[float]] = {name: [] for name in SUBJECTS}
    with Far("aio", NO_INTERCEPTOR) as far, Relay(far.targets[NO_INTERCEPTOR]) as relay:
        for _ in range(scale.outages):
            sync = world == "sync"
            times = _sync(relay, scale) if sync else asyncio.run(_aio(relay, scale))
            for name, seconds in times.items():
                taken[name].append(seconds)
    return [
        Row(
            "client",
            world,
            RECOVERY,
            name,
            {"answered_ms": 1e3 * median(times), "longest_ms": 1e3 * max(times)},
        )
        for name, times in taken.items()
    ]


def _sync(relay: Relay, scale: Scale) -> dict[str, float]:
    # the unchanged channel has its own connection too; otherwise it would keep that of GLOBAL open
    held = {name: Held(LOCAL if name == UNTOUCHED else name, relay.target) for name in SUBJECTS}
    for one in held.values():
        one.call()
    with ThreadPoolExecutor(len(SUBJECTS)) as pool:
        relay.cut()
        end = time.monotonic() + scale.outage_s
        list(pool.map(lambda one: _fail(one, end), held.values()))
        relay.accept_again()
        times = dict(zip(held, pool.map(_recover, held, held.values()), strict=True))
    for one in held.values():
        one.close()
    return times


def _fail(held: Held, end: float) -> None:
    while time.monotonic() < end:
        try:
            held.call()
        except grpc.RpcError:
            time.sleep(PAUSE_S)


def _recover(name: str, held: Held) -> float:
    began = time.monotonic()
    if name != UNTOUCHED:
        held.renew()
    held.call(wait_s=TIMEOUT_S)
    return time.monotonic() - began


async def _aio(relay: Relay, scale: Scale) -> dict[str, float]:
    held = {name: AioHeld(LOCAL if name == UNTOUCHED else name, relay.target) for name in SUBJECTS}
    for one in held.values():
        await one.call()
    relay.cut()
    end = time.monotonic() + scale.outage_s
    await asyncio.gather(*(_aio_fail(one, end) for one in held.values()))
    relay.accept_again()
    times = await asyncio.gather(*(_aio_recover(*item) for item in held.items()))
    for one in held.values():
        await one.close()
    return dict(zip(held, times, strict=True))


async def _aio_fail(held: AioHeld, end: float) -> None:
    while time.monotonic() < end:
        try:
            await held.call()
        except grpc.RpcError:
            await asyncio.sleep(PAUSE_S)


async def _aio_recover(name: str, held: AioHeld) -> float:
    began = time.monotonic()
    if name != UNTOUCHED:
        await held.renew()
    await held.call(wait_s=TIMEOUT_S)
    return time.monotonic() - began
