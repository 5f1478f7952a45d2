"""How long a new connection takes: `reconnect()`, beside closing a channel and making another.

All subjects end with a call that is answered. Where a channel is made anew its user's stubs are to
be made anew too, which is not in the figures.
"""

from __future__ import annotations

import asyncio
import random
import time
from statistics import median

from benchmarks.calls.scale import Row, World
from benchmarks.calls.wire import PAYLOAD, UNARY_UNARY
from benchmarks.connections.channels import OWN_CONNECTION, aio_bare, bare
from benchmarks.connections.far import Far
from benchmarks.connections.scale import Scale
from benchmarks.connections.subjects import (
    LOCAL,
    NO_INTERCEPTOR,
    RENEWED,
    REPLACEMENT,
    REPLACERS,
)
from rpcwheel.transport import ReconnectingChannel
from rpcwheel.transport.aio import ReconnectingChannel as AioReconnectingChannel

Taken = dict[str, list[tuple[int, int]]]
"""Of each subject: nanoseconds until there was another channel, and until a call was answered."""


class Held:
    """The channel of a subject, which can be given a new connection."""

    def __init__(self, subject: str, target: str) -> None:
        self._options = OWN_CONNECTION if subject == LOCAL else []
        self._target = target
        self._reconnecting = ReconnectingChannel(target) if subject == RENEWED else None
        self._channel = self._reconnecting or bare(target, self._options)

    def renew(self) -> None:
        """Have a new connection from here on."""
        if self._reconnecting is not None:
            self._reconnecting.reconnect(force=True)
        else:
            self._channel.close()
            self._channel = bare(self._target, self._options)

    def call(self, *, wait_s: float | None = None) -> None:
        """Make a call, which waits so long for a connection if there is none."""
        call = self._channel.unary_unary(UNARY_UNARY)
        call(PAYLOAD, timeout=wait_s, wait_for_ready=wait_s is not None)

    def close(self) -> None:
        """Close the channel."""
        self._channel.close()


class AioHeld:
    """The same of grpc.aio."""

    def __init__(self, subject: str, target: str) -> None:
        self._options = OWN_CONNECTION if subject == LOCAL else []
        self._target = target
        self._reconnecting = AioReconnectingChannel(target) if subject == RENEWED else None
        self._channel = self._reconnecting or aio_bare(target, self._options)

    async def renew(self) -> None:
        """Have a new connection from here on."""
        if self._reconnecting is not None:
            self._reconnecting.reconnect(force=True)
        else:
            await self._channel.close()
            self._channel = aio_bare(self._target, self._options)

    async def call(self, *, wait_s: float | None = None) -> None:
        """Make a call, which waits so long for a connection if there is none."""
        call = self._channel.unary_unary(UNARY_UNARY)
        await call(PAYLOAD, timeout=wait_s, wait_for_ready=wait_s is not None)

    async def close(self) -> None:
        """Close the channel."""
        await self._channel.close()


def measure(world: World, scale: Scale) -> list[Row]:
    """A row for each subject; they take turns."""
    with Far("aio", NO_INTERCEPTOR) as far:
        target = far.targets[NO_INTERCEPTOR]
        taken = _sync(target, scale) if world == "sync" else asyncio.run(_aio(target, scale))
    return [Row("client", world, REPLACEMENT, name, _values(taken, name)) for name in taken]


def _sync(target: str, scale: Scale) -> Taken:
    held = {name: Held(name, target) for name in REPLACERS}
    for one in held.values():
        one.call()
    taken: Taken = {name: [] for name in held}
    for name in _turns(scale):
        began_ns = time.perf_counter_ns()
        held[name].renew()
        renewed_ns = time.perf_counter_ns()
        held[name].call()
        taken[name].append((renewed_ns - began_ns, time.perf_counter_ns() - began_ns))
    for one in held.values():
        one.close()
    return taken


async def _aio(target: str, scale: Scale) -> Taken:
    held = {name: AioHeld(name, target) for name in REPLACERS}
    for one in held.values():
        await one.call()
    taken: Taken = {name: [] for name in held}
    for name in _turns(scale):
        began_ns = time.perf_counter_ns()
        await held[name].renew()
        renewed_ns = time.perf_counter_ns()
        await held[name].call()
        taken[name].append((renewed_ns - began_ns, time.perf_counter_ns() - began_ns))
    for one in held.values():
        await one.close()
    return taken


def _turns(scale: Scale) -> list[str]:
    shuffled = random.Random(1)
    return [
        name
        for _ in range(scale.replacements)
        for name in shuffled.sample(REPLACERS, len(REPLACERS))
    ]


def _values(taken: Taken, name: str) -> dict[str, float]:
    """Medians, and how they compare within a round with another channel of its own connection."""
    pairs = zip(taken[name], taken[LOCAL], strict=True)
    return {
        "renewed_us": median(renewed for renewed, _ in taken[name]) / 1e3,
        "answered_us": median(answered for _, answered in taken[name]) / 1e3,
        "ratio": median(own[1] / its[1] for own, its in pairs),
    }
