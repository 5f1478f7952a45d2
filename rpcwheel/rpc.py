"""Types that several packages share: the kind of a call, the result of an attempt, what follows it.

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

from rpcwheel.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "CODES",
    "CODES_SCHEMA",
    "DEADLINE",
    "STATUS_CODES",
    "TRIED",
    "AttemptResult",
    "Kind",
    "NextAttempt",
    "Stop",
    "checked_code",
    "classes_by_kind",
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
"""The subchannels that the attempts of a hedged call were sent to; None for other calls.

`rpcwheel.call` sets it for each attempt. `rpcwheel.balancer` prefers a subchannel that is not in
the list, and appends the one that it picks."""


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


def checked_code(name: object, *, subject: str) -> str:
    """Return the name of a status code that is an error.

    Args:
        name: A name, or a `grpc.StatusCode`.
        subject: The subject of the error message: the name of the setting.

    Raises:
        TypeError: `name` is neither a string nor a status code.
        ConfigurationError: There is no such code, or it is OK.
    """
    if isinstance(name, enum.Enum) and type(name).__name__ == "StatusCode":
        name = name.name
    if not isinstance(name, str):
        raise TypeError(f"{subject} must name status codes, such as 'UNAVAILABLE', not {name!r}")
    if name in CODES:
        return name
    if name == "OK":
        raise ConfigurationError(f"{subject} names the status code OK, which is not an error")
    near = difflib.get_close_matches(name.upper(), CODES, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(sorted(CODES))}"
    raise ConfigurationError(f"{subject} names {name!r}, which is not a gRPC status code; {hint}")
