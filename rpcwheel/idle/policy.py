"""What a user may set for the idle connections of a server."""

from __future__ import annotations

from datetime import timedelta
from typing import Annotated, ClassVar, Final, Literal, Self

from pydantic import BeforeValidator, StrictBool, model_validator

from rpcwheel.durations import NEVER, Duration, to_ns
from rpcwheel.errors import ConfigurationError
from rpcwheel.methods import MethodPattern
from rpcwheel.policy import Policy, Seconds, checked

__all__ = ["HEALTH", "IDLE_TIMEOUT_S", "IdlePolicy"]

IDLE_TIMEOUT_S: Final = 180.0
"""Dubbo's: three times its heartbeat."""

HEALTH: Final = "/grpc.health.v1.Health/*"
"""What clients ask to see whether a server lives."""


def _several(patterns: object) -> object:
    return (patterns,) if isinstance(patterns, str) else patterns


def _span(value: object) -> object:
    """Seconds that may be none, but not infinite nor less."""
    if isinstance(value, (int, float, timedelta)) and not isinstance(value, bool):
        span_ns = checked(lambda given: to_ns(given, what="it"), value)
        if span_ns < 0 or span_ns == NEVER:
            raise ConfigurationError(f"it must be a finite time of zero or more, not {value!r}")
    return value


Patterns = Annotated[tuple[MethodPattern, ...], BeforeValidator(_several)]
Span = Annotated[float | timedelta, BeforeValidator(_span)]


class IdlePolicy(Policy):
    """When a server closes a connection that does nothing any more, and how.

    Four limits, each by itself; whichever is reached first. A call in flight is never idle; an open
    stream is not either, unless `close_streams` says that its messages are what counts. A fifth,
    `request_timeout`, ends calls whose request does not arrive.
    """

    short: ClassVar[str | None] = "idle_timeout"

    idle_timeout: Seconds | None = IDLE_TIMEOUT_S
    """Neither read nor written for so long, in seconds. A stream that only reads, or only writes,
    is not idle (Dubbo closes it). None: no such limit."""

    read_idle: Seconds | None = None
    """No message read for so long, whatever is written. None: no such limit."""

    write_idle: Seconds | None = None
    """No message written for so long, whatever is read. None: no such limit."""

    request_timeout: Seconds | None = 60.0
    """How long the request of a unary or response-streaming call may take to arrive, in seconds:
    from when the server waits for it, and up to a third more. Then the call ends with
    DEADLINE_EXCEEDED, whatever `close` is; its connection and other calls are not affected. Without
    a limit, a client that sends the headers of a call and no request keeps the connection open and
    occupies a thread of a threaded server for ever. Calls with a request stream have no such limit.
    A threaded server needs `ConnectionTable` as the first interceptor. None: no limit."""

    max_age: Seconds | None = None
    """Open for so long, and up to a tenth more, so that clients which came together do not come
    back together (gRPC does the same). In plaintext the client is then asked to leave, whatever
    `close` says; under TLS that can't be, and it is closed as soon as no call is open: gRPC's own
    `server_options(connection_age=...)` is gentler there. None: any age."""

    max_age_grace: Span = 30.0
    """How long the calls of a connection that was found to be too old may still take, in seconds.
    Then they are ended with UNAVAILABLE, and the connection with them."""

    check: Seconds | None = None
    """Between two looks, in seconds, and thus how late a limit may be noticed. None: a third of the
    shortest of these four limits, as Dubbo does."""

    close_streams: StrictBool = False
    """Whether a stream that is open but silent is idle. It is then ended with UNAVAILABLE and the
    reason, and after it the connection. Know your streams before you set it."""

    count_heartbeats: StrictBool = False
    """Whether heartbeats keep a connection open."""

    heartbeats: Patterns = (HEALTH,)
    """Which methods are heartbeats: full names, or with `*`. Calls with the metadata
    `rpcwheel-heartbeat` are in any case."""

    close: Literal["shutdown", "goaway", "report"] = "shutdown"
    """`"shutdown"` ends the TCP connection, which works under TLS too; a client that was just about
    to call may see UNAVAILABLE. `"goaway"` asks the client to leave, as gRPC itself would, and no
    call fails; plaintext only, all else is shut down. `"report"` tells, and closes nothing."""

    goaway_grace: Seconds = 5.0
    """A client that was asked to leave and has not after so long is shut down, in seconds."""

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        for name in ("idle_timeout", "read_idle", "write_idle", "max_age"):
            limit: Duration | None = getattr(self, name)
            if self.check is not None and limit is not None and to_ns(self.check) > to_ns(limit):
                raise ConfigurationError(
                    f"check ({self.check}) is longer than {name} ({limit}), which would be noticed "
                    "far too late; give less, or leave it out"
                )
        return self
