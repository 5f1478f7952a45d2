"""The targets, and whether they are met."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.calls.scale import UNARY, Results, World
from benchmarks.calls.subjects import KIT, KIT_CHANNEL


@dataclass(frozen=True, slots=True)
class Target:
    """A ratio over the no-op interceptor, of the client's cost of a unary call."""

    world: World
    subject: str
    key: str
    at_most: float

    def verdict(self, results: Results) -> tuple[str, str, str, str]:
        """What it is about, what was measured, what is asked for, and whether it is met."""
        value = results.value("client", self.world, UNARY, self.subject, self.key)
        clock = {"cpu_ratio": "CPU time", "wall_ratio": "wall time"}[self.key]
        text = f"{self.world}, {self.subject}: {clock}"
        asked = f"≤ {self.at_most:.2f}×"
        if value is None:
            return text, "–", asked, "not measured"
        return text, f"{value:.3f}×", asked, "met" if value <= self.at_most else "**missed**"


TARGETS = tuple(
    Target(world, subject, key, at_most)
    for world, subject, at_most in (
        ("sync", KIT, 1.10),
        ("aio", KIT, 1.10),
        ("aio", KIT_CHANNEL, 1.0),
    )
    for key in ("wall_ratio", "cpu_ratio")
)
"""With all of the Kit on, a unary call is to cost at most a tenth more than through one interceptor
that does nothing. grpc.aio starts a task for each call that is intercepted; our own channel needs
none, and is to cost less than such an interceptor."""
