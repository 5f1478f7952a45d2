"""Terms of an RPC: the kind of a method, how an attempt ended, what follows, the current deadline.

A plan decides about the attempts of one call: it is asked before the first attempt and after each
failed one, and answers `NextAttempt` or `Stop` (the caller gets the last result). Plans are pure:
no clock, no I/O, no grpc. `rpcwheel.call` carries them out for the four kinds of method, in both
worlds.

Times are integer nanoseconds on the clock of the timer in use; `DEADLINE` alone is always on
`time.monotonic_ns()`. Status codes are named (`"UNAVAILABLE"`), so that nothing here needs grpc.
"""

from __future__ import annotations

import difflib
import enum
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Final, NamedTuple

from rpcwheel.errors import ConfigurationError

__all__ = [
    "CODES",
    "CODES_SCHEMA",
    "DEADLINE",
    "TRIED",
    "AttemptResult",
    "Kind",
    "NextAttempt",
    "Stop",
    "checked_code",
]

CODES: Final = frozenset(
    {
        "ABORTED",
        "ALREADY_EXISTS",
        "CANCELLED",
        "DATA_LOSS",
        "DEADLINE_EXCEEDED",
        "FAILED_PRECONDITION",
        "INTERNAL",
        "INVALID_ARGUMENT",
        "NOT_FOUND",
        "OUT_OF_RANGE",
        "PERMISSION_DENIED",
        "RESOURCE_EXHAUSTED",
        "UNAUTHENTICATED",
        "UNAVAILABLE",
        "UNIMPLEMENTED",
        "UNKNOWN",
    }
)
"""gRPC's status codes that are errors."""

CODES_SCHEMA: Final = {
    "anyOf": [
        {"enum": sorted(CODES)},
        {"type": "array", "items": {"enum": sorted(CODES)}, "minItems": 1},
    ]
}
"""The JSON schema of a setting that names status codes: one, or a list."""

DEADLINE: Final[ContextVar[int | None]] = ContextVar("rpcwheel_deadline", default=None)
"""When the call that is being served ends, by `time.monotonic_ns()`; None without a deadline.

`call` sets and reads it; `failback` clears it for what it delivers after the caller has gone."""


TRIED: Final[ContextVar[list[object] | None]] = ContextVar("rpcwheel_tried", default=None)
"""The subchannels that the attempts of a hedged call were sent to; None for any other call.

`call` sets it for each attempt. `balancer` prefers a subchannel that is not in the list, and adds
the one that it picks."""


class Kind(enum.Enum):
    """The four kinds of call; the value tells which sides stream: `(requests, responses)`."""

    UNARY_UNARY = (False, False)
    UNARY_STREAM = (False, True)
    STREAM_UNARY = (True, False)
    STREAM_STREAM = (True, True)

    def __init__(self, *_: object) -> None:
        self.streams_requests: bool = self.value[0]
        """Whether the client sends any number of messages."""
        self.streams_responses: bool = self.value[1]
        """Whether the server sends any number of messages."""


@dataclass(frozen=True, slots=True)
class AttemptResult:
    """How one attempt ended."""

    code: str
    """The status code's name; `"OK"` for a success."""
    error: BaseException | None = None
    """What the caller would get, for strategies that look at it."""
    pushback_ns: int | None = None
    """What the server asked for: wait so long; negative is "do not try again"; None is nothing
    (gRFC A6, `grpc-retry-pushback-ms`)."""
    committed: bool = False
    """Whether the attempt can't be repeated: a response message was handed out, or the request
    stream is no longer known from its beginning."""


class NextAttempt(NamedTuple):  # a frozen dataclass takes four times as long to make
    """Make another attempt."""

    number: int
    """2 for the second attempt."""
    at_ns: int
    """Not before."""
    deadline_ns: int
    """It must have ended by then; `durations.NEVER` for no limit."""


@dataclass(frozen=True, slots=True)
class Stop:
    """Make no further attempt; the caller gets the last result."""

    reason: str


def checked_code(name: object, *, what: str) -> str:
    """Give the name of a status code that is an error.

    Args:
        name: A name, or a `grpc.StatusCode`.
        what: The setting's name, for the message.

    Raises:
        TypeError: Neither a string nor a status code.
        ConfigurationError: No such code, or OK.
    """
    if isinstance(name, enum.Enum) and type(name).__name__ == "StatusCode":
        name = name.name
    if not isinstance(name, str):
        raise TypeError(f"{what} must name status codes, such as 'UNAVAILABLE', not {name!r}")
    if name in CODES:
        return name
    if name == "OK":
        raise ConfigurationError(f"{what} names the status code OK, which is no failure")
    near = difflib.get_close_matches(name.upper(), CODES, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(sorted(CODES))}"
    raise ConfigurationError(f"{what} names {name!r}, which is no gRPC status code; {hint}")
