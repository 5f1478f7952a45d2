"""The subjects by name, and what each needs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec

from benchmarks.calls.scale import BOTH, MEASURES, RESPONSES, UNARY, Side, World

BARE, NOOP = "bare", "one no-op interceptor"
NOOP_TIMEOUT = "one no-op, and timeout="
KIT, KIT_TIMEOUT = "rpcwheel: whole Kit", "rpcwheel: timeout alone"
KIT_CHANNEL = "rpcwheel: whole Kit, own channel"
KIT_SILENCE = "rpcwheel: Kit with message_timeout"
GRPC_INTERCEPTOR, OTEL = "grpc-interceptor", "OpenTelemetry"
YARDSTICK = NOOP
"""What the ratios are to."""
TIMEOUT_S = 30.0
"""Of each call that has one; none of them ever ends by it."""

NEEDS = {GRPC_INTERCEPTOR: "grpc_interceptor", OTEL: "opentelemetry.instrumentation.grpc"}
OTEL_SDK = "opentelemetry.sdk"

_CLIENTS: dict[World, tuple[str, ...]] = {
    "sync": (BARE, NOOP, NOOP_TIMEOUT, KIT_TIMEOUT, KIT, KIT_SILENCE, GRPC_INTERCEPTOR, OTEL),
    "aio": (BARE, NOOP, NOOP_TIMEOUT, KIT_TIMEOUT, KIT, KIT_CHANNEL, KIT_SILENCE, OTEL),
}
_SERVERS = (BARE, NOOP, KIT, GRPC_INTERCEPTOR, OTEL)


@dataclass(frozen=True, slots=True)
class Skipped:
    """Something that was not measured, and why."""

    what: str
    why: str


def subjects(side: Side, world: World) -> tuple[str, ...]:
    """Those that this installation can run."""
    names = _SERVERS if side == "server" else _CLIENTS[world]
    return tuple(name for name in names if name not in missing())


def callers(side: Side, world: World, measure: str) -> Iterator[tuple[str, float | None]]:
    """Those that a measurement is of, each with the timeout that its caller gives."""
    for name in subjects(side, world):
        if name != KIT_SILENCE or measure in (RESPONSES, BOTH):
            yield name, TIMEOUT_S if name == NOOP_TIMEOUT or side == "server" else None


def measures(side: Side) -> tuple[str, ...]:
    """What is measured on a side."""
    return MEASURES if side == "client" else (UNARY, RESPONSES, BOTH)


def missing() -> dict[str, str]:
    """Who can't be measured here, and why."""
    lacks = {name: module for name, module in NEEDS.items() if not _installed(module)}
    if OTEL not in lacks and not _installed(OTEL_SDK):
        lacks[OTEL] = OTEL_SDK
    return {name: f"{module} is not installed" for name, module in lacks.items()}


def _installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # of its parent
        return False
