"""Runs the bursts of the subjects in turns; gives medians, and ratios within rounds."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median, quantiles

from benchmarks._clock import Cost, median_cost
from benchmarks.calls.scale import Row, Side, World
from benchmarks.calls.subjects import BASELINE

Burst = Callable[[], Cost]
"""Makes some calls and returns what each took."""


@dataclass(frozen=True, slots=True)
class Taken:
    """What the bursts of each subject took, round by round."""

    costs: Mapping[str, Sequence[Cost]]

    def rows(self, side: Side, world: World, measure: str) -> list[Row]:
        """One row for each subject."""
        return [Row(side, world, measure, name, self.values(name)) for name in self.costs]

    def values(self, name: str, baseline: str = BASELINE) -> dict[str, float]:
        """The medians in microseconds, and the ratios to the baseline."""
        cost = median_cost(self.costs[name])
        values = {"cpu_us": cost.cpu_ns / 1e3, "wall_us": cost.wall_ns / 1e3}
        pairs = list(zip(self.costs[name], self.costs[baseline], strict=True))
        values |= _ratio("cpu_ratio", [this.cpu_ns / base.cpu_ns for this, base in pairs])
        return values | _ratio("wall_ratio", [this.wall_ns / base.wall_ns for this, base in pairs])


def take_turns(bursts: Mapping[str, Burst], *, rounds: int, warm_up: int) -> Taken:
    """Run all bursts once in each round, in a new order each time."""
    for burst in bursts.values():
        for _ in range(warm_up):
            burst()
    gc.collect()
    gc.freeze()  # these objects are not part of what any subject costs
    order, shuffle = list(bursts), random.Random(1).shuffle
    costs: dict[str, list[Cost]] = {name: [] for name in bursts}
    for _ in range(rounds):
        shuffle(order)
        for name in order:
            gc.collect()
            costs[name].append(bursts[name]())
    gc.unfreeze()
    return Taken(costs)


def _ratio(name: str, ratios: Sequence[float]) -> dict[str, float]:
    q1, _, q3 = quantiles(ratios, method="inclusive") if len(ratios) > 1 else ratios * 3
    return {name: median(ratios), f"{name}_q1": q1, f"{name}_q3": q3}
