"""Finds options without an effect, and options of a channel and a server that do not fit together.

Pure. Each rule is a generator of findings. tests/interop/grpcio/test_canaries_options.py shows over
real sockets that gRPC behaves as the rules say.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Final, Literal

from .names import (
    FLOOR_MS,
    IDLE_FLOOR_MS,
    INT_MAX,
    KNOWN,
    OF_CHANNELS,
    OF_SERVERS,
    PROVED_ON,
    RETIRED,
    SHORTEST_MS,
    STRIKES,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

Severity = Literal["error", "warning", "note"]
Where = Literal["channel", "server"]

TIME: Final = "grpc.keepalive_time_ms"
TIMEOUT: Final = "grpc.keepalive_timeout_ms"
PING_TIMEOUT: Final = "grpc.http2.ping_timeout_ms"
WITHOUT_CALLS: Final = "grpc.keepalive_permit_without_calls"
WITHOUT_DATA: Final = "grpc.http2.max_pings_without_data"
FLOOR: Final = "grpc.http2.min_ping_interval_without_data_ms"
STRIKES_ALLOWED: Final = "grpc.http2.max_ping_strikes"
CLIENT_IDLE: Final = "grpc.client_idle_timeout_ms"
CONNECTION_IDLE: Final = "grpc.max_connection_idle_ms"
CONNECT: Final = "grpc.min_reconnect_backoff_ms"

SUSPICIOUS_MS: Final = 100
"""Fewer milliseconds were probably meant as seconds."""

MAY_BE_SHORT: Final = {
    "grpc.initial_reconnect_backoff_ms",
    "grpc.max_reconnect_backoff_ms",
    CONNECT,  # see `_of_channel`
}

COUNTS: Final = {WITHOUT_CALLS, WITHOUT_DATA, STRIKES_ALLOWED, "grpc.use_local_subchannel_pool"}
"""Options that are integers, in addition to those that end with `_ms`."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that `check_options` found.

    `severity` is "error" (connections break, or the option has no effect), "warning" (probably a
    mistake) or "note" (good to know). `side` is "channel" or "server", and `option` the name as
    given. `problem` says what happens, and `remedy` what to do.
    """

    severity: Severity
    side: Where
    option: str
    problem: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.severity}: {self.side}, {self.option}: {self.problem}; {self.remedy}"


def check_options(
    channel: Iterable[object] = (), server: Iterable[object] | None = None
) -> list[Finding]:
    """Check the options of a channel and of a server.

    Args:
        channel: The `options` of `grpc.insecure_channel`.
        server: The `options` of `grpc.server`. None: gRPC's defaults, as for a server of others.

    Returns:
        Findings, errors first; empty if there are none.

    Raises:
        TypeError: An argument is not iterable.
    """
    near, far = _Side("channel"), _Side("server")
    findings = chain(
        near.read(channel),
        far.read(() if server is None else server),
        _alone(near),
        _alone(far),
        _of_channel(near),
        _of_server(far),
        _refused(near, far),
        _closed_while_idle(near, far),
    )
    order = ("error", "warning", "note")
    return sorted(dict.fromkeys(findings), key=lambda finding: order.index(finding.severity))


@dataclass(slots=True)
class _Side:
    """The options of one side, as gRPC reads them: of two with one name, the first."""

    name: Where
    numbers: dict[str, int] = field(default_factory=dict)

    def read(self, options: Iterable[object]) -> Iterator[Finding]:
        """Read options; yield a finding for each that gRPC refuses or ignores, and skip it."""
        seen: set[str] = set()
        for option in options:
            if not isinstance(option, (tuple, list)) or len(option) != 2:  # noqa: PLR2004 - a pair
                yield self.error(
                    repr(option), "it is not a pair: gRPC raises ValueError", "give (name, value)"
                )
                continue
            key = option[0]
            name = key.decode(errors="replace") if isinstance(key, bytes) else str(key)
            if name in seen:
                yield self.says(
                    "warning", name, "given twice; gRPC uses the first", "leave one out"
                )
            elif finding := self._ill_named(name) or self._ill_typed(name, option[1]):
                yield finding
            elif isinstance(option[1], int):
                self.numbers[name] = int(option[1])
            seen.add(name)

    def get(self, name: str, default: int) -> int:
        """Return the value of an option."""
        return self.numbers.get(name, default)

    @property
    def interval_ms(self) -> int:
        """The interval of pings; `INT_MAX`: never. A server's default of two hours is ignored."""
        return max(self.get(TIME, INT_MAX), SHORTEST_MS)

    def says(self, severity: Severity, option: str, problem: str, remedy: str) -> Finding:
        return Finding(severity, self.name, option, problem, remedy)

    def error(self, option: str, problem: str, remedy: str) -> Finding:
        return self.says("error", option, problem, remedy)

    def _ill_named(self, name: str) -> Finding | None:
        if name in KNOWN:
            other = OF_SERVERS if self.name == "channel" else OF_CHANNELS
            if name not in other:
                return None
            where = "server" if self.name == "channel" else "channel"
            return self.error(name, f"has no effect in a {self.name}", f"give it to the {where}")
        problem = f"gRPC (grpcio {PROVED_ON}) has no such option and ignores it"
        if name in RETIRED:
            return self.error(name, problem, f"give {RETIRED[name]} instead")
        near = difflib.get_close_matches(name, KNOWN, n=1, cutoff=0.8)
        near = near or [full for full in (f"grpc.{name}", f"grpc.{name}_ms") if full in KNOWN]
        if near:
            return self.error(name, problem, f"did you mean {near[0]}?")
        return self.says("warning", name, problem, "leave it out, unless something else reads it")

    def _ill_typed(self, name: str, value: object) -> Finding | None:
        ms = name.endswith("_ms")
        if value is None or (isinstance(value, int) and not -INT_MAX - 1 <= value <= INT_MAX):
            return self.error(
                name, f"gRPC raises for {value!r}", f"give a whole number, at most {INT_MAX}"
            )
        if (ms or name in COUNTS) and not isinstance(value, int):
            unit = "whole milliseconds, an int" if ms else "an int"
            return self.error(name, f"gRPC ignores {value!r}", f"give {unit}")
        if ms and isinstance(value, bool):
            return self.error(name, f"gRPC reads {value} as {value:d} ms", "give milliseconds")
        return None


def _alone(side: _Side) -> Iterator[Finding]:
    """Check one side by itself."""
    for name, value in side.numbers.items():
        if name.endswith("_ms") and 0 < value < SUSPICIOUS_MS and name not in MAY_BE_SHORT:
            meant = f"if {value} s were meant, give {value * 1000}"
            yield side.says("warning", name, f"{value} milliseconds is very short", meant)
    if TIMEOUT in side.numbers:
        if PING_TIMEOUT not in side.numbers:
            yield side.error(
                TIMEOUT,
                "has no effect on a peer that does not answer: gRPC waits 60 s",
                f"give {PING_TIMEOUT} instead",
            )
        else:
            yield side.says("note", TIMEOUT, f"gRPC uses {PING_TIMEOUT}", "leave it out")
    if side.interval_ms == INT_MAX:
        return
    if PING_TIMEOUT not in side.numbers and TIMEOUT not in side.numbers:
        yield side.says(
            "note", TIME, "gRPC waits 60 s for the answer to a ping", f"give {PING_TIMEOUT} too"
        )
    if side.get(TIME, INT_MAX) <= 0:
        yield side.says(
            "warning",
            TIME,
            "0 does not switch it off: gRPC pings every second",
            f"leave it out, or give {INT_MAX}",
        )
    elif side.get(TIME, INT_MAX) < SHORTEST_MS:
        yield side.says("note", TIME, "gRPC pings at most once a second", f"give {SHORTEST_MS}")


def _of_channel(near: _Side) -> Iterator[Finding]:
    pings = near.interval_ms < INT_MAX
    if near.get(WITHOUT_CALLS, 0) and not pings:
        yield near.says(
            "warning", WITHOUT_CALLS, "a channel without keepalive never pings", f"give {TIME} too"
        )
    if pings and near.get(WITHOUT_DATA, STRIKES):
        yield near.says(
            "warning",
            WITHOUT_DATA if WITHOUT_DATA in near.numbers else TIME,
            f"after {near.get(WITHOUT_DATA, STRIKES)} pings without data gRPC pings once a minute "
            "at most, also if the server does not answer",
            f"give ({WITHOUT_DATA!r}, 0)",
        )
    if near.get(CONNECT, INT_MAX) < SHORTEST_MS:
        yield near.says(
            "warning",
            CONNECT,
            f"it is not a wait, but the limit of an attempt to connect, with TLS: "
            f"{near.numbers[CONNECT]} ms",
            "leave it out; to reconnect sooner give grpc.max_reconnect_backoff_ms",
        )
    if pings and near.get(CLIENT_IDLE, INT_MAX) <= near.interval_ms and near.get(WITHOUT_CALLS, 0):
        yield near.says(
            "warning",
            CLIENT_IDLE,
            "the channel closes its idle connection before the first ping",
            f"make it longer than {TIME}, or leave out {WITHOUT_CALLS}",
        )


def _of_server(far: _Side) -> Iterator[Finding]:
    if TIME in far.numbers and far.interval_ms < INT_MAX and not far.get(WITHOUT_CALLS, 0):
        yield far.says(
            "note",
            TIME,
            "clients that die while no call is open are not detected",
            f"give ({WITHOUT_CALLS!r}, 1)",
        )
    if far.get(CONNECTION_IDLE, INT_MAX) < INT_MAX:
        yield far.says(
            "note",
            CONNECTION_IDLE,
            "closes a connection after up to twice the time; pings do not keep it open, but "
            "heartbeats that are calls do",
            "with heartbeats use rpcwheel.idle, which does not count them as use",
        )


def _refused(near: _Side, far: _Side) -> Iterator[Finding]:
    """Check whether the server refuses the pings of the channel."""
    strikes = far.get(STRIKES_ALLOWED, STRIKES)
    every = near.interval_ms
    if every == INT_MAX or strikes <= 0:
        return
    ends = f"GOAWAY too_many_pings after {strikes + 2} pings, {(strikes + 2) * every / 1000:g} s"
    floor = far.get(FLOOR, FLOOR_MS)
    if every < floor:
        yield near.error(
            TIME,
            f"pings every {every / 1000:g} s, the server permits one in {floor / 1000:g} s: {ends}",
            f"make it {floor * 11 // 10}, or give the server ({FLOOR!r}, {every * 9 // 10})",
        )
    elif every < floor * 21 // 20:
        yield near.says(
            "warning",
            TIME,
            "hardly longer than the interval that the server permits; delays in the network may "
            "shorten the time between two pings",
            f"make it {floor * 11 // 10} or more",
        )
    if near.get(WITHOUT_CALLS, 0) and not far.get(WITHOUT_CALLS, 0) and every < IDLE_FLOOR_MS:
        yield near.error(
            WITHOUT_CALLS,
            f"the server does not permit pings while no call is open: {ends}",
            f"give the server ({WITHOUT_CALLS!r}, 1) too, or leave it out here",
        )


def _closed_while_idle(near: _Side, far: _Side) -> Iterator[Finding]:
    idle = far.get(CONNECTION_IDLE, INT_MAX)
    if near.get(WITHOUT_CALLS, 0) and near.interval_ms < INT_MAX and idle < INT_MAX:
        yield near.says(
            "note",
            WITHOUT_CALLS,
            f"the server closes connections without calls after {idle / 1000:g} s, pings or not",
            f"take {CONNECTION_IDLE} from the server if idle connections are to stay",
        )
