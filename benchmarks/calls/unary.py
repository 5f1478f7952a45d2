"""What a unary call costs through each of some channels, whose bursts take turns."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial
from typing import Protocol

import grpc
import grpc.aio

from benchmarks.calls import aio_client, sync_client
from benchmarks.calls.scale import UNARY, Row, World
from benchmarks.calls.turns import Burst, take_turns


class Amount(Protocol):
    """How much is measured."""

    @property
    def calls(self) -> int:
        """The calls of one burst."""

    @property
    def rounds(self) -> int:
        """How many rounds there are."""

    @property
    def warm_up(self) -> int:
        """Bursts of each channel before the first round."""


def compare(
    channels: Mapping[str, grpc.Channel], measure: str, baseline: str, scale: Amount
) -> list[Row]:
    """A row for each channel, with the client's cost; the ratios are to the baseline."""
    make = sync_client.LOOPS[UNARY]
    bursts = {
        name: partial(sync_client.timed, make(channel, scale, None), scale.calls)
        for name, channel in channels.items()
    }
    return _rows("sync", bursts, measure, baseline, scale)


def compare_aio(
    runner: asyncio.Runner,
    channels: Mapping[str, grpc.aio.Channel],
    measure: str,
    baseline: str,
    scale: Amount,
) -> list[Row]:
    """The same for grpc.aio."""
    make = aio_client.LOOPS[UNARY]
    bursts = {
        name: partial(aio_client.burst, runner, make(channel, scale, None), scale.calls)
        for name, channel in channels.items()
    }
    return _rows("aio", bursts, measure, baseline, scale)


def _rows(
    world: World, bursts: dict[str, Burst], measure: str, baseline: str, scale: Amount
) -> list[Row]:
    taken = take_turns(bursts, rounds=scale.rounds, warm_up=scale.warm_up)
    return [Row("client", world, measure, name, taken.values(name, baseline)) for name in bursts]
