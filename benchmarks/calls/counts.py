"""What it costs to count calls, as metrics do: unary calls without counts and with them.

The calls of one pair go over loopback. Those of the other pair get their response at once, from a
channel that sends nothing: this is the cost of the counts alone, which is small beside the noise of
a network.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from functools import partial
from itertools import repeat
from statistics import median
from typing import Any

import grpc
import grpc.aio

from benchmarks.calls import aio_client, own, sync_client
from benchmarks.calls.scale import COUNTS, COUNTS_ALONE, UNARY, Row, Scale, World
from benchmarks.calls.server_process import ServerProcess
from benchmarks.calls.subjects import BARE, COUNTED, UNCOUNTED
from benchmarks.calls.turns import Burst, Taken, take_turns
from benchmarks.calls.wire import PAYLOAD, UNARY_UNARY
from rpcwheel import Kit
from rpcwheel._grpc import aio_multicallable, multicallable
from rpcwheel.aio import Kit as AioKit
from rpcwheel.telemetry import components
from rpcwheel.telemetry.call_counts import CallCounts

ALONE_CALLS = 20
"""How many times more calls a burst has if nothing is sent."""


class _AnsweredCall(multicallable.UnaryUnary):
    """Returns the response at once."""

    def _wait(self, name: str, *_: object) -> bytes:
        return PAYLOAD


class _AnsweringChannel(multicallable.Channel):
    """A channel that sends nothing."""

    def _multicallable(self, *_: Any, **__: Any) -> Any:
        return _AnsweredCall()

    def close(self) -> None:
        """Do nothing: there is no connection."""

    subscribe = unsubscribe = close


class _AioAnsweringChannel(aio_multicallable.Channel):
    """A channel of grpc.aio whose calls are one that has ended."""

    def __init__(self, ended: Any) -> None:
        self._ended = ended

    def _multicallable(self, *_: Any, **__: Any) -> Any:
        return lambda *_args, **_options: self._ended

    async def close(self, grace: float | None = None) -> None:
        """Do nothing: there is no connection."""

    get_state = wait_for_state_change = channel_ready = close  # type: ignore[assignment]


def measure(world: World, scale: Scale) -> list[Row]:
    """Two rows over loopback, and two without a network."""
    with ServerProcess("aio", BARE) as server:
        if world == "sync":
            with grpc.insecure_channel(server.targets[BARE]) as bare:
                return _sync(bare, scale)
        with asyncio.Runner() as runner:
            return _aio(runner, server.targets[BARE], scale)


def _sync(bare: grpc.Channel, scale: Scale) -> list[Row]:
    def bursts(channel: grpc.Channel, calls: int) -> dict[str, Burst]:
        pair = _pair(lambda: Kit(**own.WHOLE).intercept_channel(channel).unary_unary(UNARY_UNARY))
        return {
            name: partial(sync_client.timed, partial(_call, method, calls), calls)
            for name, method in pair.items()
        }

    return [
        *_rows("sync", COUNTS, bursts(bare, scale.calls), scale),
        *_rows("sync", COUNTS_ALONE, bursts(_AnsweringChannel(), _alone(scale)), scale),
    ]


def _aio(runner: asyncio.Runner, target: str, scale: Scale) -> list[Row]:
    async def open_channels() -> tuple[Any, Any]:
        bare = grpc.aio.insecure_channel(target)
        ended = bare.unary_unary(UNARY_UNARY)(PAYLOAD)
        await ended
        return bare, _AioAnsweringChannel(ended)

    def bursts(channel: Any, calls: int) -> dict[str, Burst]:
        def make() -> Any:
            return AioKit(**own.WHOLE).intercept_channel(channel).unary_unary(UNARY_UNARY)

        return {
            name: partial(aio_client.burst, runner, partial(_aio_call, method, calls), calls)
            for name, method in _pair(make).items()
        }

    bare, answering = runner.run(open_channels())
    rows = [
        *_rows("aio", COUNTS, bursts(bare, scale.calls), scale),
        *_rows("aio", COUNTS_ALONE, bursts(answering, _alone(scale)), scale),
    ]
    runner.run(bare.close())
    return rows


def _alone(scale: Scale) -> int:
    return ALONE_CALLS * scale.units(UNARY)


def _call(method: Any, calls: int) -> None:
    for _ in repeat(None, calls):
        method(PAYLOAD)


async def _aio_call(method: Any, calls: int) -> None:
    for _ in repeat(None, calls):
        await method(PAYLOAD)


def _pair(make: Callable[[], Any]) -> dict[str, Any]:
    """Make the multicallable without counts, and with them."""
    return {name: _made_with(counts, make) for name, counts in _COUNTS.items()}


_COUNTS = {UNCOUNTED: None, COUNTED: CallCounts()}


def _made_with(counts: CallCounts | None, make: Callable[[], Any]) -> Any:
    replaced, components._COMPONENTS.counts = components._COMPONENTS.counts, counts
    try:
        return make()
    finally:
        components._COMPONENTS.counts = replaced


def _rows(world: World, measure: str, bursts: Mapping[str, Burst], scale: Scale) -> list[Row]:
    taken = take_turns(bursts, rounds=scale.rounds, warm_up=scale.warm_up)
    return [Row("client", world, measure, name, _values(taken, name)) for name in bursts]


def _values(taken: Taken, name: str) -> dict[str, float]:
    pairs = zip(taken.costs[name], taken.costs[UNCOUNTED], strict=True)
    added_us = median((this.cpu_ns - without.cpu_ns) / 1e3 for this, without in pairs)
    return taken.values(name, UNCOUNTED) | {"added_us": added_us}
