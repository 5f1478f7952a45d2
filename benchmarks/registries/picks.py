"""What a pick costs, and what it costs to prepare a picker when the subchannels change."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from itertools import repeat
from statistics import median
from time import perf_counter_ns

import grpc

from benchmarks._clock import cost
from benchmarks.calls.scale import Row
from benchmarks.calls.turns import take_turns
from benchmarks.registries.scale import Scale
from benchmarks.registries.subjects import (
    BUSY,
    BUSY_WEIGHTED,
    BY_CHANCE,
    CHOICE,
    EQUAL,
    IDLE,
    PICK,
    PICKERS,
    RING,
    WEIGHTED,
)
from rpcwheel.balancer.pickers import (
    LeastRequest,
    Pick,
    Picker,
    RoundRobin,
    WeightedRandom,
    WeightedRoundRobin,
)
from rpcwheel.balancer.ring_hash import RingHash

MADE: dict[str, Callable[[], Picker]] = {
    EQUAL: RoundRobin,
    WEIGHTED: WeightedRoundRobin,
    BY_CHANCE: WeightedRandom,
    IDLE: LeastRequest,
    BUSY: LeastRequest,
    BUSY_WEIGHTED: LeastRequest,
    RING: lambda: RingHash("x-user-id"),
}
METADATA = (("x-user-id", "a user"),)


class Subchannel:
    """What pickers read of a subchannel."""

    state = grpc.ChannelConnectivity.READY

    def __init__(self, number: int, calls: int) -> None:
        self.id, self.calls, self.load = f"10.0.0.1:{number}", calls, calls


def measure(scale: Scale) -> list[Row]:
    """A row for each subject."""
    values: dict[str, dict[str, float]] = {name: {} for name in PICKERS}
    for size in scale.picked:
        bursts = {name: partial(cost, _burst(_picker(name, size)), scale.picks) for name in PICKERS}
        taken = take_turns(bursts, rounds=scale.pick_rounds, warm_up=1)
        for name in PICKERS:
            values[name][f"ns_{size}"] = median(each.cpu_ns for each in taken.costs[name])
    for name in MADE:
        values[name]["prepare_us"] = _prepare_us(name, scale)
    return [Row("client", "sync", PICK, name, values[name]) for name in PICKERS]


def _picker(name: str, size: int) -> Pick[Subchannel]:
    subchannels, weights = _subchannels(name, size)
    if name == CHOICE:
        return lambda _, __, ___: random.choice(subchannels)
    return MADE[name]().prepare(subchannels, weights)


def _subchannels(name: str, size: int) -> tuple[list[Subchannel], list[int]]:
    subchannels = [Subchannel(number, name in (BUSY, BUSY_WEIGHTED)) for number in range(size)]
    equal = name not in (WEIGHTED, BUSY_WEIGHTED, BY_CHANCE)
    return subchannels, [100 if equal else 50 + number % 100 for number in range(size)]


def _burst(pick: Pick[Subchannel]) -> Callable[[int], None]:
    def work(times: int) -> None:
        for _ in repeat(None, times):
            pick("/bench.Shop/UnaryUnary", None, METADATA)

    return work


def _prepare_us(name: str, scale: Scale) -> float:
    subchannels, weights = _subchannels(name, max(scale.picked))
    taken = []
    for _ in range(scale.prepared):
        picker = MADE[name]()
        began_ns = perf_counter_ns()
        picker.prepare(subchannels, weights)
        taken.append(perf_counter_ns() - began_ns)
    return median(taken) / 1e3
