"""The targets, and whether they are met."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks._page import Verdict, verdict
from benchmarks.calls.hedging import DELAY_S, POLICY
from benchmarks.calls.scale import COUNTS_ALONE, HEDGING, UNARY, Results, World
from benchmarks.calls.subjects import (
    COUNTED,
    HEDGED,
    KIT_CHANNEL,
    KIT_INTERCEPT,
    KIT_INTERCEPTORS,
    UNHEDGED,
)


@dataclass(frozen=True, slots=True)
class CostTarget:
    """The client's cost of a unary call, relative to the no-op interceptor."""

    world: World
    subject: str
    key: str
    at_most: float

    def verdict(self, results: Results) -> Verdict:
        """Compare."""
        value = results.value("client", self.world, UNARY, self.subject, self.key)
        clock = {"cpu_ratio": "CPU time", "wall_ratio": "wall time"}[self.key]
        about = f"{self.world}, {self.subject}: {clock}, × no-op"
        return verdict(about, value, self.at_most, "{:.3f}×")


@dataclass(frozen=True, slots=True)
class CountsTarget:
    """What the counts add to the client's CPU time of a unary call, without a network."""

    world: World
    at_most_us: float = 4.0

    def verdict(self, results: Results) -> Verdict:
        """Compare."""
        value = results.value("client", self.world, COUNTS_ALONE, COUNTED, "added_us")
        return verdict(f"{self.world}, counts alone: CPU time", value, self.at_most_us, "{:.1f} µs")


@dataclass(frozen=True, slots=True)
class HedgingLatencyTarget:
    """The 99th percentile with hedging: at most the delay and twice the median without hedging."""

    world: World

    def verdict(self, results: Results) -> Verdict:
        """Compare."""
        median_ms = results.value("client", self.world, HEDGING, UNHEDGED, "p50_ms")
        value = results.value("client", self.world, HEDGING, HEDGED, "p99_ms")
        at_most = 1e3 * DELAY_S + 2 * (median_ms or 0.0)
        return verdict(f"{self.world}, hedging: p99", value, at_most, "{:.1f} ms")


@dataclass(frozen=True, slots=True)
class HedgingBudgetTarget:
    """The extra calls that the server received: at most what the retry budget of 10 s allows."""

    world: World

    def verdict(self, results: Results) -> Verdict:
        """Compare."""
        value = results.value("client", self.world, HEDGING, HEDGED, "extra_calls")
        calls = results.value("client", self.world, HEDGING, HEDGED, "calls") or 0.0
        assert isinstance(POLICY.retry_budget, float)
        at_most = POLICY.retry_budget * calls + POLICY.min_retries
        return verdict(f"{self.world}, hedging: extra calls", value, at_most, "{:.0f}")


WORLDS: tuple[World, ...] = ("sync", "aio")

TARGETS = (
    *(
        CostTarget(world, subject, key, at_most)
        for world in WORLDS
        for subject, at_most in (
            (KIT_INTERCEPT, 1.0),
            (KIT_CHANNEL, 1.0),
            (KIT_INTERCEPTORS, 1.25),
        )
        for key in ("wall_ratio", "cpu_ratio")
    ),
    *(CountsTarget(world) for world in WORLDS),
    *(target(world) for world in WORLDS for target in (HedgingLatencyTarget, HedgingBudgetTarget)),
)
"""Through a channel of rpcwheel's own, a unary call with all policies costs no more than through
one interceptor that does nothing; through rpcwheel's interceptors, at most a quarter more."""
