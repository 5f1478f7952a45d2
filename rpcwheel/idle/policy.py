"""`IdlePolicy`, the settings of an idle detector."""

from __future__ import annotations

from typing import Annotated, ClassVar, Final, Literal, Self

from pydantic import BeforeValidator, StrictBool, WithJsonSchema, model_validator

from rpcwheel.durations import Duration, to_ns
from rpcwheel.errors import ConfigurationError
from rpcwheel.methods import PATTERN_SCHEMA, MethodPattern
from rpcwheel.policy import Delay, Policy, Seconds

__all__ = ["HEALTH_METHODS", "IdlePolicy"]

HEALTH_METHODS: Final = "/grpc.health.v1.Health/*"


def _as_tuple(patterns: object) -> object:
    return (patterns,) if isinstance(patterns, str) else patterns


Patterns = Annotated[
    tuple[MethodPattern, ...],
    BeforeValidator(_as_tuple),
    WithJsonSchema({"anyOf": [PATTERN_SCHEMA, {"type": "array", "items": PATTERN_SCHEMA}]}),
]


class IdlePolicy(Policy):
    """When a server closes a connection that is not used, and what it does then.

    The limits are independent; the first that a connection exceeds counts. A call in flight keeps
    its connection open. So does an open stream, unless `close_streams` is set.
    """

    short: ClassVar[str | None] = "idle_timeout"

    idle_timeout: Seconds | None = 180.0
    """Seconds without a message read or written. A stream that only reads, or only writes, is not
    idle (in Dubbo it is). The default is Dubbo's. None: no limit."""

    read_idle: Seconds | None = None
    """Seconds without a message read, whatever is written. None: no limit."""

    write_idle: Seconds | None = None
    """Seconds without a message written, whatever is read. None: no limit."""

    request_timeout: Seconds | None = 60.0
    """Seconds that the request of a unary or response-streaming call may take to arrive, counted
    from when the server waits for it, and up to two check intervals more. Then the call ends with
    DEADLINE_EXCEEDED, whatever `action` is. Its connection and other calls are not affected.
    Without a limit, a client that sends the headers of a call and no request keeps the connection
    open and occupies a thread of a threaded server forever. Calls with a request stream have no
    such limit. A threaded server needs `ConnectionTable` as the first interceptor. None: no
    limit."""

    max_age: Seconds | None = None
    """Seconds that a connection may be open, and up to a tenth more, so that clients which
    connected together do not reconnect together (gRPC does the same). Then it is closed as soon as
    no call is in flight. gRPC's `max_connection_age` (`server_options(connection_age=...)`) asks
    the client with GOAWAY to leave first. None: no limit."""

    max_age_grace: Delay = 30.0
    """Seconds that calls on a connection which is too old may still take. Then they end with
    UNAVAILABLE, and the connection is closed."""

    check_interval: Seconds | None = None
    """Seconds between two checks of all connections, and so how late a limit may be noticed. None:
    a third of the shortest of the limits above, as in Dubbo."""

    close_streams: StrictBool = False
    """Whether a stream that is open but silent is idle. It then ends with UNAVAILABLE and the
    reason before its connection is closed."""

    count_heartbeats: StrictBool = False
    """Whether heartbeats keep a connection open."""

    heartbeats: Patterns = (HEALTH_METHODS,)
    """Methods whose calls are heartbeats: full names, or patterns with `*`. Calls with the metadata
    `rpcwheel-heartbeat` always are."""

    action: Literal["shutdown", "report"] = "shutdown"
    """`"shutdown"` shuts down the TCP connection, with TLS too. A client that calls in the same
    moment may get UNAVAILABLE. `"report"` emits `ConnectionIdle`, and closes nothing."""

    @model_validator(mode="after")
    def _check_interval_is_shortest(self) -> Self:
        for name in ("idle_timeout", "read_idle", "write_idle", "max_age"):
            limit: Duration | None = getattr(self, name)
            interval = self.check_interval
            if interval is not None and limit is not None and to_ns(interval) > to_ns(limit):
                raise ConfigurationError(
                    f"check_interval ({interval}) is longer than {name} ({limit}), which would be "
                    "noticed far too late; give less, or leave it out"
                )
        return self
