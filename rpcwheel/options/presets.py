"""Options for channels and servers that have an effect and fit together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal, NamedTuple, TypeVar

from rpcwheel.durations import NEVER, Duration, positive_ns, to_ns
from rpcwheel.errors import ConfigurationError

from .names import INT_MAX, SHORTEST_MS

if TYPE_CHECKING:
    from collections.abc import Mapping

_NS_PER_MS: Final = 1_000_000

T = TypeVar("T")

ChannelPreset = Literal["any", "lan", "wan"]
ServerPreset = Literal["lan", "wan"]


class _Channel(NamedTuple):
    """A preset of a channel. Times are seconds."""

    keepalive: float
    timeout: float = 20
    while_idle: bool = True
    first: float = 1
    longest: float = 30
    connect: float = 20


_CHANNEL: Final = {
    "any": _Channel(keepalive=330, while_idle=False),  # the interval that gRPC permits, and a tenth
    "lan": _Channel(keepalive=10, timeout=5, first=0.1, longest=2, connect=5),
    "wan": _Channel(keepalive=60),
}
_SERVER: Final = {"lan": (10, 5), "wan": (60, 20)}
"""Presets of a server: seconds between two pings, and seconds to wait for the answer."""


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
    """Make options for a channel. Times are seconds or a `timedelta`; None: the preset's value.

    Args:
        preset: `"any"` fits every server, also with gRPC's defaults, which permit one ping in five
            minutes and none without calls: 330 s, and 20 s for the answer. `"lan"` detects a dead
            server within 15 s (10 + 5), `"wan"` within 80 s (60 + 20). Both need a server that
            permits such pings, for instance by `server_options()`.
        keepalive: Time of silence on the connection before a ping, at least 1 s, because gRPC does
            not ping more often. `float("inf")`: no pings.
        ping_timeout: Time to wait for the answer before the connection counts as dead; gRPC's
            default is 60 s.
        while_idle: Whether to ping while no call is open.
        first_reconnect: The first wait between two attempts to connect: 1 s, for `"lan"` 0.1 s.
        longest_reconnect: The longest wait: 30 s, for `"lan"` 2 s.
        connect_timeout: The limit of an attempt to connect, with TLS: 20 s, for `"lan"` 5 s.
        client_idle: Time without calls after which the channel closes its connection. None: gRPC's
            default, 30 minutes.
        own_connection: Whether the channel has a connection of its own. By default gRPC shares it
            among equal channels of a process.

    Raises:
        ConfigurationError: The preset is unknown, or a time is out of range.
        TypeError: A value is of a wrong type.
    """
    own = _of(preset, _CHANNEL)
    every = _ms("keepalive", keepalive, own.keepalive, least=SHORTEST_MS)
    first = _ms("first_reconnect", first_reconnect, own.first)
    longest = _ms("longest_reconnect", longest_reconnect, own.longest)
    if longest < first:
        times = (longest_reconnect, first_reconnect)
        of_longest, of_first = (", its default" if time is None else "" for time in times)
        advice = ": set both" if None in times else ""
        raise ConfigurationError(
            f"longest_reconnect ({longest} ms{of_longest}) is shorter than first_reconnect "
            f"({first} ms{of_first}){advice}"
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
    """Make options for a server. Times are seconds or a `timedelta`; None: the preset's value.

    Args:
        preset: `"wan"` detects a dead client within 80 s (60 + 20), `"lan"` within 15 s (10 + 5).
            Both permit the pings of every preset of `channel_options`.
        keepalive: Time of silence on a connection before the server pings, at least 1 s.
            `float("inf")`: no pings.
        ping_timeout: Time to wait for the answer before the client counts as dead.
        while_idle: Whether pings are sent and permitted while no call is open.
        permit_every: The shortest interval of pings from a client; gRPC's default is 300 s. After
            three pings at a shorter interval the server ends the connection ("too_many_pings").
        connection_idle: Time without calls after which a connection is closed; after a call it may
            take twice as long. Pings are not calls. None: never. See also `rpcwheel.idle`.
        connection_age: Time after which a connection is closed gracefully, 10 % more or less.
        connection_grace: Time for which calls may go on after that. None: no limit.

    Raises:
        ConfigurationError: The preset is unknown, or a time is out of range.
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
        raise ConfigurationError("connection_grace applies after connection_age; give both")
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
    if preset not in tuple(presets):  # it may have no hash
        raise ConfigurationError(f"preset must be one of {', '.join(presets)}, not {preset!r}")
    return presets[preset]


def _ms(name: str, value: Duration | None, default: float, *, least: int = 1) -> int:
    """Convert a time to whole milliseconds, at least `least`; infinity to gRPC's value for it."""
    duration = default if value is None else value
    if to_ns(duration, subject=name) == NEVER:
        return INT_MAX
    ms = (positive_ns(duration, subject=name) + _NS_PER_MS // 2) // _NS_PER_MS
    if ms < least:
        raise ConfigurationError(
            f"{name} must be at least {least / 1000:g} s (gRPC takes no less), not {duration!r}"
        )
    return min(ms, INT_MAX)


def _flag(name: str, value: object) -> int:
    if not isinstance(value, int) or value not in {True, False}:
        raise TypeError(f"{name} must be True or False, not {value!r}")
    return int(value)
