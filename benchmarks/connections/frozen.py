"""How long it takes to detect a frozen server (SIGSTOP), and until another one answers.

The connections stay open and the kernel accepts every byte. Each subject has a call with a long
deadline in flight when the server is frozen, and makes another call when the first has ended. By
then, a relay connects the same address with another server.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, ExitStack
from statistics import median

import grpc
import grpc.aio

from benchmarks.calls.scale import Row, World
from benchmarks.calls.wire import PAYLOAD, UNARY_UNARY
from benchmarks.connections.channels import aio_watched, watched
from benchmarks.connections.far import Far
from benchmarks.connections.relay import Relay
from benchmarks.connections.scale import Scale
from benchmarks.connections.subjects import FINDERS, FROZEN, NO_INTERCEPTOR, OURS
from rpcwheel.heartbeat import HeartbeatManager
from rpcwheel.heartbeat.aio import HeartbeatManager as AioHeartbeatManager

Times = tuple[float, float] | None
"""Seconds until the call that was under way ended, and until another was answered; None: never."""


def measure(world: World, scale: Scale) -> list[Row]:
    """A row for each subject. A subject that reaches the limit is not measured again."""
    taken: dict[str, list[Times]] = {name: [] for name in FINDERS}
    asked: Sequence[str] = FINDERS
    for _ in range(scale.freezes):
        with (
            Far("aio", NO_INTERCEPTOR) as far,
            Far("aio", NO_INTERCEPTOR) as other,
            Relay(far.targets[NO_INTERCEPTOR]) as relay,
        ):
            if world == "sync":
                times = _sync(asked, far, other, relay, scale)
            else:
                times = asyncio.run(_aio(asked, far, other, relay, scale))
        for name, found in zip(asked, times, strict=True):
            taken[name].append(found)
        asked = [
            name for name in asked if taken[name][-1] is not None and _is_fast(taken[name], scale)
        ]
    return [
        Row("client", world, FROZEN, name, _values(times, scale)) for name, times in taken.items()
    ]


def _is_fast(times: list[Times], scale: Scale) -> bool:
    """Whether to find out again how long it takes costs little."""
    return all(found is not None and found[1] < 4 * scale.dead_s for found in times)


def _values(times: list[Times], scale: Scale) -> dict[str, float]:
    values = {"waited_s": scale.timeout_s}
    found = [each for each in times if each is not None]
    if found:
        values["found_s"] = median(each[0] for each in found)
        values["answered_s"] = median(each[1] for each in found)
    return values


def _sync(names: Sequence[str], far: Far, other: Far, relay: Relay, scale: Scale) -> list[Times]:
    with ExitStack() as stack:
        channels = [
            stack.enter_context(watched(name, relay.target, scale.beat_s, scale.dead_s))
            for name in names
        ]
        manager = HeartbeatManager(interval=scale.beat_s, timeout=scale.dead_s)
        stack.enter_context(manager)
        for name, channel in zip(names, channels, strict=True):
            channel.unary_unary(UNARY_UNARY)(PAYLOAD)
            if name == OURS:
                manager.attach(channel)
        time.sleep(scale.beat_s * (1 + random.random()))
        relay.to(other.targets[NO_INTERCEPTOR])
        far.freeze()
        with ThreadPoolExecutor(len(names)) as pool:
            return list(pool.map(lambda channel: _find(channel, scale), channels))


def _find(channel: grpc.Channel, scale: Scale) -> Times:
    call, began = channel.unary_unary(UNARY_UNARY), time.monotonic()
    found_s = None
    while (passed := time.monotonic() - began) < scale.timeout_s:
        try:
            call(PAYLOAD, timeout=scale.timeout_s - passed, wait_for_ready=found_s is not None)
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE:
                return None
            found_s = found_s or time.monotonic() - began
        else:
            answered_s = time.monotonic() - began
            return found_s or answered_s, answered_s
    return None


async def _aio(
    names: Sequence[str], far: Far, other: Far, relay: Relay, scale: Scale
) -> list[Times]:
    async with AsyncExitStack() as stack:
        channels: list[grpc.aio.Channel] = [
            await stack.enter_async_context(
                aio_watched(name, relay.target, scale.beat_s, scale.dead_s)
            )
            for name in names
        ]
        manager = AioHeartbeatManager(interval=scale.beat_s, timeout=scale.dead_s)
        await stack.enter_async_context(manager)
        for name, channel in zip(names, channels, strict=True):
            await channel.unary_unary(UNARY_UNARY)(PAYLOAD)
            if name == OURS:
                manager.attach(channel)
        await asyncio.sleep(scale.beat_s * (1 + random.random()))
        relay.to(other.targets[NO_INTERCEPTOR])
        far.freeze()
        return list(await asyncio.gather(*(_aio_find(channel, scale) for channel in channels)))


async def _aio_find(channel: grpc.aio.Channel, scale: Scale) -> Times:
    call, began = channel.unary_unary(UNARY_UNARY), time.monotonic()
    found_s = None
    while (passed := time.monotonic() - began) < scale.timeout_s:
        try:
            await call(
                PAYLOAD, timeout=scale.timeout_s - passed, wait_for_ready=found_s is not None
            )
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE:
                return None
            found_s = found_s or time.monotonic() - began
        else:
            answered_s = time.monotonic() - began
            return found_s or answered_s, answered_s
    return None
