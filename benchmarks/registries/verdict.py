"""The targets, and whether they are met."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks._page import Verdict, verdict
from benchmarks.calls.scale import Results, World
from benchmarks.registries.subjects import BARE, FEW, GRPC_MANY, MANY, ONE, UNARY


@dataclass(frozen=True, slots=True)
class Target:
    """The cost of a unary call through a channel by name, over that of another channel."""

    world: World
    subject: str
    over: str
    clock: str
    at_most: float

    def verdict(self, results: Results) -> Verdict:
        """Compare."""
        text = f"{self.world}, {self.subject}, over {self.over}: {self.clock} time"
        value = ratio(results, self.world, self.subject, self.over, self.clock)
        return verdict(text, value, self.at_most, "{:.3f}×", goal_form="{:.2f}×")


def ratio(results: Results, world: World, subject: str, over: str, clock: str) -> float | None:
    """Of the medians; over the bare channel, the median of the ratios within each round."""
    if over == BARE:
        return results.value("client", world, UNARY, subject, f"{clock}_ratio")
    own, its = (
        results.value("client", world, UNARY, name, f"{clock}_us") for name in (subject, over)
    )
    return own / its if own and its else None


TARGETS = tuple(
    Target(world, subject, over, clock, at_most)
    for world in ("sync", "aio")
    for subject, over, at_most in ((ONE, BARE, 1.05), (FEW, BARE, 1.05), (MANY, GRPC_MANY, 1.10))
    for clock in ("wall", "cpu")
)
"""Calls that go to many connections in turn cost gRPC itself more than calls on one, so that those
are compared with its own channel to as many."""
