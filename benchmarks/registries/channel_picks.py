"""What a channel does for each call until it has a subchannel, with few instances and with many."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from itertools import repeat
from statistics import median
from typing import Any

from benchmarks._clock import cost
from benchmarks.calls.scale import Row, World
from benchmarks.calls.turns import take_turns
from benchmarks.calls.wire import SERVICE
from benchmarks.connections.far import Far
from benchmarks.registries.picks import METADATA
from benchmarks.registries.scale import Scale
from benchmarks.registries.subjects import CHANNEL_PICK, CHANNEL_PICKERS, STATE
from rpcwheel.balancer import BalancedChannel
from rpcwheel.balancer.aio import BalancedChannel as AioBalancedChannel
from rpcwheel.instance import ServiceInstance

METHOD = f"/{SERVICE}/UnaryUnary"
CONNECT_TIMEOUT_S = 60.0


def measure(world: World, scale: Scale) -> list[Row]:
    """A row for each subject."""
    return asyncio.run(_measure(world, scale))


async def _measure(world: World, scale: Scale) -> list[Row]:
    values: dict[str, dict[str, float]] = {name: {} for name in (STATE, *CHANNEL_PICKERS)}
    with Far("aio", "0") as far:
        (target,) = far.targets.values()
        for size in (scale.few, scale.listed):
            async with _channels(world, _instances(target, size)) as channels:
                state = next(iter(channels.values())).subchannels[0].channel.get_state
                works = {STATE: _burst(state)} | {
                    name: _burst(partial(channel._pool.pick, METHOD, None, METADATA))
                    for name, channel in channels.items()
                }
                bursts = {name: partial(cost, work, scale.picks) for name, work in works.items()}
                taken = take_turns(bursts, rounds=scale.pick_rounds, warm_up=1)
                for name in works:
                    values[name][f"ns_{size}"] = median(each.cpu_ns for each in taken.costs[name])
                if size == scale.listed:
                    for name, channel in channels.items():
                        values[name]["update_ms"] = _update_ms(channel, target, scale)
    return [Row("client", world, CHANNEL_PICK, name, values[name]) for name in values]


def _instances(target: str, size: int) -> list[ServiceInstance]:
    host, _, port = target.rpartition(":")
    return [
        ServiceInstance(service=SERVICE, host=host, port=int(port), id=f"instance-{number:06}")
        for number in range(size)
    ]


@asynccontextmanager
async def _channels(
    world: World, instances: Sequence[ServiceInstance]
) -> AsyncIterator[dict[str, Any]]:
    """A channel for each picker, with all connections that it needs."""
    make: Any = BalancedChannel if world == "sync" else AioBalancedChannel
    channels = {
        name: make(SERVICE, instances, lb_policy=lb_policy)
        for name, lb_policy in CHANNEL_PICKERS.items()
    }
    try:
        for channel in channels.values():
            await _connected(channel)
        yield channels
    finally:
        for channel in channels.values():
            closing = channel.close()
            if closing is not None:
                await closing


async def _connected(channel: Any) -> None:
    """Wait until each subchannel is READY that the pick connects."""
    until_s = time.monotonic() + CONNECT_TIMEOUT_S
    while channel._pool.pick(METHOD, None, METADATA) is None or any(
        one.connection is not None and not one.is_ready() for one in channel.subchannels
    ):
        if time.monotonic() > until_s:
            raise TimeoutError(f"{channel!r} is not connected after {CONNECT_TIMEOUT_S} s")
        await asyncio.sleep(0.01)


def _burst(pick: Callable[[], Any]) -> Callable[[int], None]:
    def work(times: int) -> None:
        for _ in repeat(None, times):
            pick()

    return work


def _update_ms(channel: Any, target: str, scale: Scale) -> float:
    """How long an update takes that replaces one instance; the others are the same objects."""
    taken = []
    kept = _instances(target, scale.listed - 1)
    (replaced,) = _instances(target, 1)
    channel.update([*kept, replaced])
    for number in range(scale.prepared):
        replaced = replaced.replace(id=f"other-{number}")
        began_ns = time.perf_counter_ns()
        channel.update([*kept, replaced])
        taken.append(time.perf_counter_ns() - began_ns)
    return median(taken) / 1e6
