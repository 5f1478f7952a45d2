"""The subjects by name, and what each needs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec

from benchmarks.calls.scale import BOTH, MEASURES, RESPONSES, UNARY, Side, World

BARE, NOOP = "bare", "one no-op interceptor"
NOOP_TIMEOUT = "one no-op, and timeout="
KIT_TIMEOUT = "rpcwheel: timeout alone"
KIT_SILENCE = "rpcwheel: Kit with message_timeout"
KIT_INTERCEPTORS = "rpcwheel: kit.client_interceptors()"
KIT_INTERCEPT = "rpcwheel: kit.intercept_channel()"
KIT_CHANNEL = "rpcwheel: kit.channel()"
KIT = "rpcwheel: whole Kit"
"""Of servers. Clients have the whole Kit in the three ways above."""
GRPC_INTERCEPTOR, OTEL = "grpc-interceptor", "OpenTelemetry"
BASELINE = NOOP
"""All ratios are relative to this subject."""
TIMEOUT_S = 30.0
"""The timeout of all calls that have one. No call reaches it."""

UNCOUNTED, COUNTED = "without counts", "with counts"
UNHEDGED, HEDGED = "without hedging", "with hedging"

NEEDS = {GRPC_INTERCEPTOR: "grpc_interceptor", OTEL: "opentelemetry.instrumentation.grpc"}
OTEL_SDK = "opentelemetry.sdk"

_KIT = (KIT_TIMEOUT, KIT_INTERCEPTORS, KIT_INTERCEPT, KIT_CHANNEL, KIT_SILENCE)
_CLIENTS: dict[World, tuple[str, ...]] = {
    "sync": (BARE, NOOP, NOOP_TIMEOUT, *_KIT, GRPC_INTERCEPTOR, OTEL),
    "aio": (BARE, NOOP, NOOP_TIMEOUT, *_KIT, OTEL),
}
_SERVERS = (BARE, NOOP, KIT, GRPC_INTERCEPTOR, OTEL)


@dataclass(frozen=True, slots=True)
class Skipped:
    """Something that was not measured, and why."""

    what: str
    why: str


def subjects(side: Side, world: World) -> tuple[str, ...]:
    """The subjects that this installation can run."""
    names = _SERVERS if side == "server" else _CLIENTS[world]
    return tuple(name for name in names if name not in missing())


def callers(side: Side, world: World, measure: str) -> Iterator[tuple[str, float | None]]:
    """The subjects of one measurement, each with the timeout that its caller gives."""
    for name in subjects(side, world):
        if name != KIT_SILENCE or measure in (RESPONSES, BOTH):
            yield name, TIMEOUT_S if name == NOOP_TIMEOUT or side == "server" else None


def measures(side: Side) -> tuple[str, ...]:
    """What is measured on a side."""
    return MEASURES if side == "client" else (UNARY, RESPONSES, BOTH)


def missing() -> dict[str, str]:
    """The subjects that cannot be measured here, and why."""
    lacks = {name: module for name, module in NEEDS.items() if not _installed(module)}
    if OTEL not in lacks and not _installed(OTEL_SDK):
        lacks[OTEL] = OTEL_SDK
    return {name: f"{module} is not installed" for name, module in lacks.items()}


def _installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # its parent is not installed
        return False
