"""Calls through `grpc.aio`: the channels of the subjects, and the bursts that are timed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from functools import partial
from itertools import repeat
from typing import Any

import grpc.aio

from benchmarks._clock import Cost, Stopwatch
from benchmarks.calls import own, rivals
from benchmarks.calls.scale import BOTH, REQUESTS, RESPONSES, UNARY, Row, Scale
from benchmarks.calls.server_process import ServerProcess
from benchmarks.calls.subjects import (
    BARE,
    KIT_CHANNEL,
    KIT_INTERCEPT,
    KIT_INTERCEPTORS,
    KIT_SILENCE,
    KIT_TIMEOUT,
    NOOP,
    NOOP_TIMEOUT,
    OTEL,
    callers,
    measures,
    subjects,
)
from benchmarks.calls.turns import take_turns
from benchmarks.calls.wire import PAYLOAD, STREAM_STREAM, STREAM_UNARY, UNARY_STREAM, UNARY_UNARY

Work = Callable[[], Awaitable[None]]


def _no_ops() -> list[Any]:
    return [make() for make in rivals.AIO_NOOPS]


CHANNELS: dict[str, Callable[[str], grpc.aio.Channel]] = {
    BARE: grpc.aio.insecure_channel,
    NOOP: lambda target: _channel(target, _no_ops()),
    NOOP_TIMEOUT: lambda target: _channel(target, _no_ops()),
    KIT_TIMEOUT: lambda target: _channel(target, own.aio_client(own.TIMEOUT_ALONE)),
    KIT_INTERCEPTORS: lambda target: _channel(target, own.aio_client(own.WHOLE)),
    KIT_INTERCEPT: own.intercept_aio_channel,
    KIT_CHANNEL: own.aio_channel,
    KIT_SILENCE: lambda target: _channel(target, own.aio_client(own.SILENCE)),
    OTEL: lambda target: _channel(target, rivals.otel_aio()),
}


def _channel(target: str, interceptors: Sequence[Any]) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(target, interceptors=interceptors)


def measure(scale: Scale) -> list[Row]:
    """A row for each kind of call and each subject, with the client's cost."""
    with asyncio.Runner() as runner, ServerProcess("aio", BARE) as server:
        stack = AsyncExitStack()
        channels = runner.run(_open(server.targets[BARE], stack))
        rows = []
        for what in measures("client"):
            bursts = {
                name: partial(
                    burst, runner, LOOPS[what](channels[name], scale, timeout), scale.units(what)
                )
                for name, timeout in callers("client", "aio", what)
            }
            taken = take_turns(bursts, rounds=scale.turns(what), warm_up=scale.warm_up)
            rows += taken.rows("client", "aio", what)
        runner.run(stack.aclose())
    return rows


async def _open(target: str, stack: AsyncExitStack) -> dict[str, grpc.aio.Channel]:
    names = subjects("client", "aio")
    return {name: await stack.enter_async_context(CHANNELS[name](target)) for name in names}


def burst(runner: asyncio.Runner, work: Work, units: int) -> Cost:
    """The cost of the work on the loop, for each of its units."""
    return runner.run(_timed(work, units))


async def _timed(work: Work, units: int) -> Cost:
    watch = Stopwatch()
    await work()
    return watch.per(units)


def _unary(channel: grpc.aio.Channel, scale: Scale, timeout: float | None) -> Work:
    call = channel.unary_unary(UNARY_UNARY)

    async def work() -> None:
        for _ in repeat(None, scale.calls):
            await call(PAYLOAD, timeout=timeout)

    return work


def _responses(channel: grpc.aio.Channel, scale: Scale, timeout: float | None) -> Work:
    call, request = channel.unary_stream(UNARY_STREAM), str(scale.messages).encode()

    async def work() -> None:
        for _ in repeat(None, scale.streams):
            async for _response in call(request, timeout=timeout):
                pass

    return work


def _requests(channel: grpc.aio.Channel, scale: Scale, timeout: float | None) -> Work:
    call = channel.stream_unary(STREAM_UNARY)

    async def work() -> None:
        for _ in repeat(None, scale.streams):
            await call(repeat(PAYLOAD, scale.messages), timeout=timeout)

    return work


def _both(channel: grpc.aio.Channel, scale: Scale, timeout: float | None) -> Work:
    call = channel.stream_stream(STREAM_STREAM)

    async def work() -> None:
        for _ in repeat(None, scale.streams):
            async for _response in call(repeat(PAYLOAD, scale.messages), timeout=timeout):
                pass

    return work


LOOPS = {UNARY: _unary, RESPONSES: _responses, REQUESTS: _requests, BOTH: _both}
"""Make the work of one burst, for each kind of call."""
