"""What a unary call costs through a channel that reconnects, beside one of grpc's."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, ExitStack

import grpc.aio

from benchmarks.calls.scale import Row, World
from benchmarks.calls.unary import compare, compare_aio
from benchmarks.connections.channels import aio_caller, caller
from benchmarks.connections.far import Far
from benchmarks.connections.scale import Scale
from benchmarks.connections.subjects import ATTACHED, BARE, CALLERS, NO_INTERCEPTOR, UNARY
from rpcwheel.heartbeat import HeartbeatManager
from rpcwheel.heartbeat.aio import HeartbeatManager as AioHeartbeatManager


def measure(world: World, scale: Scale) -> list[Row]:
    """A row for each subject, by the client's cost."""
    with Far("aio", NO_INTERCEPTOR) as far:
        target = far.targets[NO_INTERCEPTOR]
        return _sync(target, scale) if world == "sync" else _aio(target, scale)


def _sync(target: str, scale: Scale) -> list[Row]:
    with ExitStack() as stack:
        channels = {name: stack.enter_context(caller(name, target)) for name in CALLERS}
        stack.enter_context(HeartbeatManager()).attach(channels[ATTACHED])
        return compare(channels, UNARY, BARE, scale)


def _aio(target: str, scale: Scale) -> list[Row]:
    with asyncio.Runner() as runner:
        stack = AsyncExitStack()
        channels = runner.run(_open(target, stack))
        rows = compare_aio(runner, channels, UNARY, BARE, scale)
        runner.run(stack.aclose())
    return rows


async def _open(target: str, stack: AsyncExitStack) -> dict[str, grpc.aio.Channel]:
    channels = {}
    for name in CALLERS:
        channels[name] = await stack.enter_async_context(aio_caller(name, target))
    manager = await stack.enter_async_context(AioHeartbeatManager())
    manager.attach(channels[ATTACHED])
    return channels
