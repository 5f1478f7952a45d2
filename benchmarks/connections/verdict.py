"""The targets, and whether they are met."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks._page import Verdict, verdict
from benchmarks.calls.scale import Results, World
from benchmarks.connections.scale import FULL
from benchmarks.connections.subjects import HEARTBEATS, OURS, UNWATCHED


@dataclass(frozen=True, slots=True)
class Target:
    """The CPU time of a client whose idle channels are kept alive, of a core's."""

    world: World
    below_percent: float

    def verdict(self, results: Results) -> Verdict:
        """Compare."""
        value = percent(results, self.world, OURS)
        text = f"{self.world}: heartbeats of {FULL.channels:,} idle channels, every 60 s"
        goal = "{:g} % of a core"
        return verdict(text, value, self.below_percent, "{:.2f} %", sign="<", goal_form=goal)


TARGETS = (Target("sync", 2.0), Target("aio", 2.0))


def percent(results: Results, world: World, subject: str) -> float | None:
    """A subject's CPU time with 1,000 channels at an interval of 60 s.

    Measured with others, what is more than that of the same channels without heartbeats is scaled.
    """

    def value(name: str, key: str) -> float | None:
        return results.value("client", world, HEARTBEATS, name, key)

    measured = value(subject, "cpu_percent")
    interval_s, channels = value(subject, "interval_s"), value(subject, "channels")
    if measured is None or not interval_s or not channels:
        return None
    rest = min(value(UNWATCHED, "cpu_percent") or 0.0, measured)
    scaled = (measured - rest) * interval_s / FULL.interval_s * FULL.channels / channels
    return rest + scaled


def each_us(results: Results, world: World, subject: str) -> float | None:
    """CPU time of one of a subject's heartbeats: what is more than without any, by those sent."""

    def value(name: str, key: str) -> float:
        return results.value("client", world, HEARTBEATS, name, key) or 0.0

    sent, rest = value(subject, "sent"), value(UNWATCHED, "cpu_percent")
    if not sent:
        return None
    share = max(0.0, value(subject, "cpu_percent") - rest) / 100
    return 1e6 * share * value(subject, "interval_s") / sent
