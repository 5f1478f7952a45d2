"""Types that several packages share: the kind of a call, the result of an attempt, what follows it.

Also what clients and servers of rpcwheel exchange in metadata: `Criticality`, and the keys of a
refusal.

Times are integer nanoseconds on the clock of the timer in use; only `DEADLINE` is always on
`time.monotonic_ns()`. Status codes are strings (`"UNAVAILABLE"`), because this module does not
import grpc.
"""

from __future__ import annotations

import difflib
import enum
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from rpcwheel.errors import ConfigurationError, short_repr

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "CODES",
    "CODES_SCHEMA",
    "CRITICALITY",
    "CRITICALITY_KEY",
    "CRITICALITY_SCHEMA",
    "DEADLINE",
    "DEFAULT_CRITICALITY",
    "NONCE_KEY",
    "NOT_EXECUTED_CODES",
    "PUSHBACK_KEY",
    "REFUSAL_CODES",
    "REFUSED_KEY",
    "STATUS_CODES",
    "TRIED",
    "AttemptResult",
    "Criticality",
    "Kind",
    "NextAttempt",
    "Stop",
    "checked_code",
    "checked_codes",
    "checked_criticality",
    "classes_by_kind",
    "criticality_named",
]

STATUS_CODES: Final = (
    "OK",
    "CANCELLED",
    "UNKNOWN",
    "INVALID_ARGUMENT",
    "DEADLINE_EXCEEDED",
    "NOT_FOUND",
    "ALREADY_EXISTS",
    "PERMISSION_DENIED",
    "RESOURCE_EXHAUSTED",
    "FAILED_PRECONDITION",
    "ABORTED",
    "OUT_OF_RANGE",
    "UNIMPLEMENTED",
    "INTERNAL",
    "UNAVAILABLE",
    "DATA_LOSS",
    "UNAUTHENTICATED",
)
"""gRPC's status codes, by number."""

CODES: Final = frozenset(STATUS_CODES[1:])
"""gRPC's status codes that are errors."""

CODES_SCHEMA: Final = {
    "anyOf": [
        {"enum": sorted(CODES)},
        {"type": "array", "items": {"enum": sorted(CODES)}, "minItems": 1},
    ]
}
"""The JSON schema of a setting that names status codes: one, or a list."""

DEADLINE: Final[ContextVar[int | None]] = ContextVar("rpcwheel_deadline", default=None)
"""The deadline of the call that is being served, on `time.monotonic_ns()`; None without a deadline.

Set and read by `rpcwheel.call`. `rpcwheel.failback` clears it for deliveries in the background."""


TRIED: Final[ContextVar[list[object] | None]] = ContextVar("rpcwheel_tried", default=None)
"""The subchannels that the attempts of a call were sent to; None if the call may go to any.

Set for the attempts of hedged calls, and for those that follow a refused attempt.

`rpcwheel.call` sets it for each attempt. `rpcwheel.balancer` prefers a subchannel that is not in
the list, and appends the one that it picks."""


class Criticality(enum.IntEnum):
    """How much a call matters when a server has to refuse some: the least critical ones first.

    The levels are those of the Google SRE book, "Handling Overload". A higher one is greater, and
    none is false. `str` and `format` give the `label`.
    """

    CRITICAL_PLUS = 4
    """A refusal has serious consequences that users see."""
    CRITICAL = 3
    """A refusal is seen by users. The level of a call that does not say otherwise."""
    SHEDDABLE_PLUS = 2
    """A refusal now and then is expected; such as batch jobs, which try again."""
    SHEDDABLE = 1
    """Refusals are expected, for some time also of all calls."""

    def __init__(self, _: int) -> None:
        self.label: str = self.name.lower()
        """The name in lower case: the value in metadata, and the label in metrics."""

    def __str__(self) -> str:
        return self.label

    def __format__(self, spec: str) -> str:
        return format(self.label, spec)


DEFAULT_CRITICALITY: Final = Criticality.CRITICAL
"""The criticality of a call that does not say otherwise."""

CRITICALITY: Final[ContextVar[Criticality | None]] = ContextVar(
    "rpcwheel_criticality", default=None
)
"""The criticality of the call that is being served; None if its client has not set one.

Set and read by `rpcwheel.call`, as `DEADLINE` is."""

CRITICALITY_KEY: Final = "rpcwheel-criticality"
"""The metadata entry of a call with the `label` of its criticality."""

_IN_ANY_CASE: Final = "|".join(
    "".join("[-_]" if char == "_" else f"[{char}{char.upper()}]" for char in level.label)
    for level in Criticality
)
CRITICALITY_SCHEMA: Final = {
    "anyOf": [
        {"enum": [level.label for level in Criticality]},
        {"type": "string", "pattern": f"^({_IN_ANY_CASE})$"},
    ]
}
"""The JSON schema of a setting that is a criticality. Editors complete the usual names."""

NONCE_KEY: Final = "rpcwheel-nonce"
"""The metadata entry of an attempt with a value that no other attempt has. A server that refuses
the attempt returns the value, see `REFUSED_KEY`."""

REFUSED_KEY: Final = "rpcwheel-refused"
"""The trailing metadata of an attempt that a server of rpcwheel has refused before its handler,
with one of `REFUSAL_CODES`: the value of `NONCE_KEY`, or "" if the attempt had none. The value
proves that the server itself has refused this attempt: trailing metadata that a handler has got
from another server and passes on has another value."""

REFUSAL_CODES: Final = frozenset({"RESOURCE_EXHAUSTED", "UNAVAILABLE"})
"""The status codes of refused attempts: the server has too many calls, or is being stopped."""

NOT_EXECUTED_CODES: Final = REFUSAL_CODES | {"UNIMPLEMENTED"}
"""The status codes with which a server may say that it has not executed a call. UNIMPLEMENTED is
that of a Dubbo provider that is being stopped."""

HEARTBEAT_KEY: Final = "rpcwheel-heartbeat"
"""The metadata entry of a heartbeat, whatever its method."""

PUSHBACK_KEY: Final = "grpc-retry-pushback-ms"
"""The trailing metadata by which a server asks how long to wait before the next attempt
("pushback", gRFC A6), in decimal digits."""

_BY_LABEL: Final = {level.label: level for level in Criticality}


class Kind(enum.Enum):
    """The four kinds of call; the value is `(streams_requests, streams_responses)`."""

    UNARY_UNARY = (False, False)
    UNARY_STREAM = (False, True)
    STREAM_UNARY = (True, False)
    STREAM_STREAM = (True, True)

    def __init__(self, *_: object) -> None:
        self.streams_requests: bool = self.value[0]
        """Whether the client sends a stream of messages."""
        self.streams_responses: bool = self.value[1]
        """Whether the server sends a stream of messages."""
        self.grpc_type: str = (
            ("bidi_stream" if self.streams_responses else "client_stream")
            if self.streams_requests
            else ("server_stream" if self.streams_responses else "unary")
        )
        """The name of the kind in metrics, as in go-grpc-prometheus."""


def classes_by_kind(base: type, parts: Mapping[Kind, tuple[type, ...]]) -> dict[Kind, Any]:
    """Make the class of each kind of call: `base`, followed by the classes that depend on the kind.

    Each has the attribute `kind`, and no `__dict__` if no base has one.
    """
    common = {"__slots__": (), "__module__": base.__module__, "__doc__": base.__doc__}
    return {
        kind: type(f"{base.__name__}_{kind.name}", (base, *others), {**common, "kind": kind})
        for kind, others in parts.items()
    }


@dataclass(frozen=True, slots=True)
class AttemptResult:
    """The result of one attempt."""

    code: str
    """The name of the status code; `"OK"` for a success."""
    error: BaseException | None = None
    """The exception of a failed attempt, for wait objects and predicates of users."""
    pushback_ns: int | None = None
    """How long the server asks to wait before the next attempt (gRFC A6, `grpc-retry-pushback-ms`).
    Negative: it asks for no further attempt. None: it does not ask."""
    committed: bool = False
    """Whether the attempt can't be repeated: the caller has received a message, or the buffer no
    longer has all requests."""
    refused: bool = False
    """Whether a server has refused the attempt before its handler, as its trailing metadata says
    (`REFUSED_KEY`)."""
    is_proven: bool = False
    """Whether it is proven that the server of this attempt says so. Then it was not executed."""
    has_other_server: bool = False
    """Of a refused attempt: whether a server to which the call was not sent is ready."""
    not_sent: bool = False
    """Whether the client has refused the attempt, without sending it (`rpcwheel.admission`)."""


class NextAttempt(NamedTuple):  # a frozen dataclass takes four times as long to make
    """Make another attempt."""

    number: int
    """2 for the second attempt."""
    at_ns: int
    """When to make it."""
    deadline_ns: int
    """When it must have ended; `durations.NEVER` for no limit."""


@dataclass(frozen=True, slots=True)
class Stop:
    """Make no further attempt; the caller gets the result of the last one."""

    reason: str


def checked_code(name: object) -> str:
    """Return the name of a status code that is an error; `name` may be a `grpc.StatusCode`.

    Raises:
        TypeError: `name` is neither a string nor a status code.
        ConfigurationError: There is no such code, or it is OK.
    """
    if isinstance(name, enum.Enum) and type(name).__name__ == "StatusCode":
        name = name.name
    if not isinstance(name, str):
        raise TypeError(f"it must name status codes, such as 'UNAVAILABLE', not {name!r}")
    if name in CODES:
        return name
    if name == "OK":
        raise ConfigurationError("it names the status code OK, which is not an error")
    near = difflib.get_close_matches(name.upper(), CODES, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(sorted(CODES))}"
    raise ConfigurationError(f"it names {name!r}, which is not a gRPC status code; {hint}")


def checked_codes(value: object) -> frozenset[str]:
    """Return the names of status codes that are errors: of one, or of a set, tuple or list.

    Raises:
        ConfigurationError, TypeError: As `checked_code`.
    """
    each = value if isinstance(value, (set, frozenset, tuple, list)) else (value,)
    return frozenset(map(checked_code, each))


def criticality_named(name: str) -> Criticality | None:
    """Return the criticality with this name, in any case and with `-` or `_`; None if none has."""
    return _BY_LABEL.get(name) or _BY_LABEL.get(name.lower().replace("-", "_"))


def checked_criticality(value: object) -> Criticality:
    """Return a criticality that a user gave: itself, or its name in any case, with `-` or `_`.

    Raises:
        TypeError: `value` is neither.
        ConfigurationError: There is no criticality with this name.
    """
    if isinstance(value, Criticality):
        return value
    if not isinstance(value, str):
        raise TypeError(f"it must be a Criticality or its name, such as 'sheddable', not {value!r}")
    level = criticality_named(value)
    if level is not None:
        return level
    near = difflib.get_close_matches(value.lower().replace("-", "_"), _BY_LABEL, n=1, cutoff=0.3)
    hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(_BY_LABEL)}"
    raise ConfigurationError(f"it is {short_repr(value)}, which is not a criticality; {hint}")
