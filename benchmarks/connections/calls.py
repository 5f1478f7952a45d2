"""What a unary call costs through a channel that reconnects, beside one of grpc's."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, ExitStack
from functools import partial

import grpc.aio

from benchmarks.calls import aio_client, sync_client
from benchmarks.calls.scale import UNARY as KIND
from benchmarks.calls.scale import Row, World
from benchmarks.calls.turns import Burst, take_turns
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
        make = sync_client.LOOPS[KIND]
        bursts = {
            name: partial(sync_client.timed, make(channel, scale, None), scale.calls)
            for name, channel in channels.items()
        }
        return _rows("sync", bursts, scale)


def _aio(target: str, scale: Scale) -> list[Row]:
    with asyncio.Runner() as runner:
        stack = AsyncExitStack()
        channels = runner.run(_open(target, stack))
        make = aio_client.LOOPS[KIND]
        bursts = {
            name: partial(aio_client.burst, runner, make(channel, scale, None), scale.calls)
            for name, channel in channels.items()
        }
        rows = _rows("aio", bursts, scale)
        runner.run(stack.aclose())
    return rows


async def _open(target: str, stack: AsyncExitStack) -> dict[str, grpc.aio.Channel]:
    channels = {}
    for name in CALLERS:
        channels[name] = await stack.enter_async_context(aio_caller(name, target))
    manager = await stack.enter_async_context(AioHeartbeatManager())
    manager.attach(channels[ATTACHED])
    return channels


def _rows(world: World, bursts: dict[str, Burst], scale: Scale) -> list[Row]:
    taken = take_turns(bursts, rounds=scale.rounds, warm_up=scale.warm_up)
    return [Row("client", world, UNARY, name, taken.values(name, BARE)) for name in bursts]
