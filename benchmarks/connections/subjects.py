"""The subjects by name, and what each step is of."""

from __future__ import annotations

from importlib.util import find_spec

from benchmarks.calls.scale import World

HEARTBEATS, UNARY, REPLACEMENT, RECOVERY = "heartbeats", "unary", "replacement", "recovery"
FROZEN, SERVING, ROUND, CHURN = "frozen", "serving", "round", "churn"
"""What rows are of."""

WORLDS: tuple[World, ...] = ("sync", "aio")

BARE, NOOP = "bare channel", "one no-op interceptor"
RECONNECTING = "rpcwheel: ReconnectingChannel"
ATTACHED = "rpcwheel: the same, with a heartbeat"
CALLERS = (BARE, NOOP, RECONNECTING, ATTACHED)
"""The channels that make unary calls."""

UNWATCHED = "no heartbeats"
OURS = "rpcwheel: HeartbeatManager"
KEEPALIVE = "gRPC's keepalive"
EACH: dict[World, str] = {"sync": "a thread for each channel", "aio": "a task for each channel"}
SPREAD: dict[World, str] = {"sync": "a thread for each, spread", "aio": "a task for each, spread"}
"""The same, but they don't all begin at once."""

RENEWED = "rpcwheel: reconnect()"
LOCAL = "a new channel, own connection"
GLOBAL = "a new channel"
UNTOUCHED = "the same channel, waiting"
REPLACERS = (RENEWED, LOCAL, GLOBAL)

DOCUMENTED = "gRPC's keepalive_timeout_ms"
WORKING = "gRPC's http2.ping_timeout_ms"
NOTHING = "nothing at all"
FINDERS = (OURS, WORKING, DOCUMENTED, NOTHING)
"""How a frozen server is found."""

NO_INTERCEPTOR = "no interceptor"
TABLE = "rpcwheel: ConnectionTable"
DETECTOR = "rpcwheel: and IdleConnectionDetector"
SERVERS = (NO_INTERCEPTOR, NOOP, TABLE, DETECTOR)

LOOK, CLOSING, PSUTIL = "a check, nothing idle", "a check that closes half", "psutil: list them"
CHURNED = (NO_INTERCEPTOR, DETECTOR)


def beating(world: World) -> tuple[str, ...]:
    """Whose idle channels are watched for a while."""
    return (UNWATCHED, OURS, KEEPALIVE, EACH[world], SPREAD[world])


def has_psutil() -> bool:
    """Whether it is installed."""
    return find_spec("psutil") is not None
