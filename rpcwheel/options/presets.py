"""Options for channels and servers that do what they say, and that fit each other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal, NamedTuple, TypeVar

from rpcwheel.durations import NEVER, Duration, positive_ns, to_ns
from rpcwheel.errors import ConfigurationError

from .names import INT_MAX, SHORTEST_MS

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["channel_options", "server_options"]

_NS_PER_MS: Final = 1_000_000

T = TypeVar("T")

ChannelPreset = Literal["any", "lan", "wan"]
ServerPreset = Literal["lan", "wan"]


class _Channel(NamedTuple):
    """Seconds."""

    keepalive: float
    timeout: float = 20
    while_idle: bool = True
    first: float = 1
    longest: float = 30
    connect: float = 20


_CHANNEL: Final = {
    "any": _Channel(keepalive=330, while_idle=False),  # a tenth above gRPC's floor, for the jitter
    "lan": _Channel(keepalive=10, timeout=5, first=0.1, longest=2, connect=5),
    "wan": _Channel(keepalive=60),
}
_SERVER: Final = {"lan": (10, 5), "wan": (60, 20)}
"""Every so many seconds a ping, and so many for its answer."""


def channel_options(
    *,
    preset: ChannelPreset = "any",
    keepalive: Duration | None = None,
    ping_timeout: Duration | None = None,
    while_idle: bool | None = None,
    first_reconnect: Duration | None = None,
    longest_reconnect: Duration | None = None,
    connect_timeout: Duration | None = None,
    client_idle: Duration | None = None,
    own_connection: bool = False,
) -> list[tuple[str, int]]:
    """Make the options for a channel; times in seconds or as `timedelta`, None: as the preset says.

    Args:
        preset: `"any"` fits every server, also those that permit a ping only every five minutes
            and none without calls, as by default: 330 s, 20 s for the answer. `"lan"` finds a dead
            server within 15 s (10 + 5), `"wan"` within 80 s (60 + 20); both want a server with
            `server_options()`, or one that permits such pings otherwise.
        keepalive: How long the connection may be silent before a ping, at least 1 s (gRPC does not
            ping more often). `float("inf")`: no pings.
        ping_timeout: How long the answer may take before the connection counts as dead; gRPC's own
            default is 60 s.
        while_idle: Whether pings go on while no call is open.
        first_reconnect: The first wait between attempts to connect: 1 s, `"lan"` 0.1 s.
        longest_reconnect: The longest: 30 s, `"lan"` 2 s.
        connect_timeout: How long an attempt to connect may take, TLS included: 20 s, `"lan"` 5 s.
        client_idle: Without calls for so long the channel drops its connection; None leaves gRPC's
            30 minutes.
        own_connection: Whether the channel shares its connection with no other of this process.

    Raises:
        ConfigurationError: An unknown preset, a time out of range.
        TypeError: A value is of a wrong type.
    """
    own = _of(preset, _CHANNEL)
    every = _ms("keepalive", keepalive, own.keepalive, least=SHORTEST_MS)
    first = _ms("first_reconnect", first_reconnect, own.first)
    longest = _ms("longest_reconnect", longest_reconnect, own.longest)
    if longest < first:
        raise ConfigurationError(
            f"longest_reconnect ({longest} ms) is shorter than first_reconnect ({first} ms)"
        )
    idle = own.while_idle if while_idle is None else while_idle
    pings = {
        "grpc.keepalive_time_ms": every,
        "grpc.http2.ping_timeout_ms": _ms("ping_timeout", ping_timeout, own.timeout),
        "grpc.keepalive_permit_without_calls": _flag("while_idle", idle),
        "grpc.http2.max_pings_without_data": 0,  # or, after two, only one a minute
    }
    options = pings if every < INT_MAX else {}
    options |= {
        "grpc.initial_reconnect_backoff_ms": first,
        "grpc.max_reconnect_backoff_ms": longest,
        "grpc.min_reconnect_backoff_ms": _ms("connect_timeout", connect_timeout, own.connect),
    }
    if client_idle is not None:
        options["grpc.client_idle_timeout_ms"] = _ms("client_idle", client_idle, 0, least=1000)
    if _flag("own_connection", own_connection):
        options["grpc.use_local_subchannel_pool"] = 1
    return list(options.items())


def server_options(
    *,
    preset: ServerPreset = "wan",
    keepalive: Duration | None = None,
    ping_timeout: Duration | None = None,
    while_idle: bool = True,
    permit_every: Duration = 5.0,
    connection_idle: Duration | None = None,
    connection_age: Duration | None = None,
    connection_grace: Duration | None = None,
) -> list[tuple[str, int]]:
    """Make the options for a server; times in seconds or as `timedelta`.

    Args:
        preset: `"wan"` finds a dead client within 80 s (60 + 20), `"lan"` within 15 s (10 + 5).
            Both permit the pings of every preset of `channel_options`.
        keepalive: How long a connection may be silent before the server pings, at least 1 s;
            `float("inf")`: never.
        ping_timeout: How long the answer may take before the client counts as dead.
        while_idle: Whether pings are sent and permitted while no call is open.
        permit_every: How often clients may ping; gRPC's own default is 300 s. Who does so more
            often, three times, is cut off with "too_many_pings".
        connection_idle: Connections without calls are closed after so long (at about twice that
            after a call; pings are no calls). None: never. `rpcwheel.idle` can do more.
        connection_age: Connections are ended gracefully after so long (10 % more or less).
        connection_grace: How long calls may go on after that; None: as long as they take.

    Raises:
        ConfigurationError: An unknown preset, a time out of range.
        TypeError: A value is of a wrong type.
    """
    every, timeout = _of(preset, _SERVER)
    options = {
        "grpc.keepalive_time_ms": _ms("keepalive", keepalive, every, least=SHORTEST_MS),
        "grpc.http2.ping_timeout_ms": _ms("ping_timeout", ping_timeout, timeout),
        "grpc.keepalive_permit_without_calls": _flag("while_idle", while_idle),
        "grpc.http2.min_ping_interval_without_data_ms": _ms("permit_every", permit_every, 0),
    }
    if connection_grace is not None and connection_age is None:
        raise ConfigurationError("connection_grace is the end of connection_age; give both")
    for name, value in (
        ("connection_idle", connection_idle),
        ("connection_age", connection_age),
        ("connection_grace", connection_grace),
    ):
        if value is not None:
            option = name.replace("grace", "age_grace")
            options[f"grpc.max_{option}_ms"] = _ms(name, value, 0)
    return list(options.items())


def _of(preset: str, presets: Mapping[str, T]) -> T:
    if preset not in presets:
        raise ConfigurationError(f"preset must be one of {', '.join(presets)}, not {preset!r}")
    return presets[preset]


def _ms(what: str, value: Duration | None, default: float, *, least: int = 1) -> int:
    """Whole milliseconds, at least `least`; for ever is gRPC's own word for it."""
    given = default if value is None else value
    if to_ns(given, what=what) == NEVER:
        return INT_MAX
    ms = (positive_ns(given, what=what) + _NS_PER_MS // 2) // _NS_PER_MS
    if ms < least:
        raise ConfigurationError(
            f"{what} must be at least {least / 1000:g} s (gRPC takes no less), not {given!r}"
        )
    return min(ms, INT_MAX)


def _flag(what: str, value: object) -> int:
    if value not in {True, False} or not isinstance(value, int):
        raise TypeError(f"{what} must be True or False, not {value!r}")
    return int(value)
