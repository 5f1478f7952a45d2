"""The targets, and whether they are met."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from benchmarks.timer.scale import Form, Results, Scale
from benchmarks.timer.subjects import ASYNCIO, NETTY, default_queue

WHEEL = default_queue("native")
CALLS = ("start", "cancel", "advance")


@dataclass(frozen=True, slots=True)
class Target:
    """One figure, and what it has to be. All are of the default queue, through the public timer."""

    text: str
    sign: Literal["≥", "≤"]
    goal: float
    unit: str
    measured: Callable[[Results, Scale], float | None]

    def verdict(self, results: Results, scale: Scale) -> tuple[str, str, str, str]:
        """The name, the measured value, the target, and whether it is met."""
        text = self.text.format(few=scale.few, many=scale.many)
        value = self.measured(results, scale)
        asked = f"{self.sign} {self.goal:g}{self.unit}"
        if value is None:
            return text, "–", asked, "not measured"
        met = value >= self.goal if self.sign == "≥" else value <= self.goal
        return text, f"{value:.3g}{self.unit}", asked, "met" if met else "**missed**"


def pair_beside_asyncio(results: Results, form: Form) -> float | None:
    """How many of our pairs take the time of one of asyncio's, both measured in one process."""
    theirs = results.value("pair", ASYNCIO, "cpu_ns", form)
    return _ratio(theirs, results.value("pair", default_queue(form), "cpu_ns", form))


def _pair_beside_netty(results: Results, key: str) -> float | None:
    netty = results.value("pair", NETTY, key, "jvm")
    return _ratio(results.value("pair", WHEEL, "cpu_ns"), netty)


def flatness(results: Results, scale: Scale, subject: str, form: Form) -> float | None:
    """What the pair costs with many pending, over its cost with few."""
    few = results.value("flat", subject, "cpu_ns", form, scale.few)
    return _ratio(results.value("flat", subject, "cpu_ns", form, scale.many), few)


def longest_ms(results: Results, subject: str, form: Form, clock: str = "cpu") -> float | None:
    """The longest of all calls while a million are canceled."""
    row = results.row("stall", subject, form)
    return None if row is None else max(row.values[f"{call}_{clock}_us"] for call in CALLS) / 1e3


def _ratio(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else one / other


TARGETS = (
    Target(
        "compiled: a pair, times faster than asyncio",
        "≥", 10, "×",
        lambda results, _: pair_beside_asyncio(results, "native"),
    ),
    Target(
        "compiled: a pair, ratio to Netty with its worker",
        "≤", 1.3, "×",
        lambda results, _: _pair_beside_netty(results, "cpu_ns"),
    ),
    Target(
        "compiled: a pair, ratio to Netty without its worker",
        "≤", 1.3, "×",
        lambda results, _: _pair_beside_netty(results, "caller_ns"),
    ),
    Target(
        "compiled: a pair with {many:,} pending, ratio to {few:,} pending",
        "≤", 1.3, "×",
        lambda results, scale: flatness(results, scale, WHEEL, "native"),
    ),
    Target(
        "compiled: memory of a pending timeout",
        "≤", 100, " bytes",
        lambda results, _: results.value("memory", WHEEL, "bytes"),
    ),
    Target(
        "compiled: longest single call while {many:,} are canceled",
        "≤", 1, " ms",
        lambda results, _: longest_ms(results, WHEEL, "native"),
    ),
    Target(
        "compiled: wake-ups with {many:,} pending and nothing due",
        "≤", 0, "",
        lambda results, _: results.value("idle", WHEEL, "wakeups"),
    ),
    Target(
        "pure Python: a pair, times faster than asyncio",
        "≥", 3, "×",
        lambda results, _: pair_beside_asyncio(results, "pure"),
    ),
)  # fmt: skip
