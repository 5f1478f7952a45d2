"""`IdlePolicy`, the settings of an idle detector."""

from __future__ import annotations

from typing import Annotated, ClassVar, Final, Literal, Self

from pydantic import BeforeValidator, StrictBool, WithJsonSchema, model_validator

from rpcwheel.durations import Duration, to_ns
from rpcwheel.errors import ConfigurationError
from rpcwheel.methods import PATTERN_SCHEMA, MethodPattern
from rpcwheel.policy import Delay, Policy, Seconds

HEALTH_METHODS: Final = "/grpc.health.v1.Health/*"


def _as_tuple(patterns: object) -> object:
    return (patterns,) if isinstance(patterns, str) else patterns


Patterns = Annotated[
    tuple[MethodPattern, ...],
    BeforeValidator(_as_tuple),
    WithJsonSchema({"anyOf": [PATTERN_SCHEMA, {"type": "array", "items": PATTERN_SCHEMA}]}),
]


class IdlePolicy(Policy):
    """Limits after which a server reports or closes a connection, and how it closes it.

    The limits are independent; the first that a connection exceeds counts. A call in flight keeps
    its connection open. So does an open stream, unless `close_streams` is set.
    """

    short: ClassVar[str | None] = "idle_timeout"

    idle_timeout: Seconds | None = 180.0
    """Maximum seconds in which no message is received or sent. A stream that only reads, or only
    writes, is not idle (in Dubbo it is). The default is Dubbo's. None: no limit."""

    read_idle: Seconds | None = None
    """Maximum seconds in which no message is received, even if messages are sent. None: no
    limit."""

    write_idle: Seconds | None = None
    """Maximum seconds in which no message is sent, even if messages are received. None: no
    limit."""

    request_timeout: Seconds | None = 60.0
    """Maximum seconds until the request of a unary or response-streaming call has arrived. The time
    starts when the server waits for the request. Otherwise the call ends with DEADLINE_EXCEEDED, up
    to two check intervals late, whatever `action` is. Its connection and other calls are not
    affected. Without a limit, a client that sends the headers of a call and no request keeps the
    connection open and occupies a thread of a threaded server forever. Calls with a request stream
    have no such limit. A threaded server needs `ConnectionTable` as the first interceptor. None: no
    limit."""

    max_age: Seconds | None = None
    """Maximum age of a connection in seconds. A random share of up to 10 % is added, so that
    clients which connected together do not reconnect together (gRPC does the same). An older
    connection is closed as soon as it has no call in flight. gRPC's `max_connection_age`
    (`server_options(connection_age=...)`) asks the client with GOAWAY to leave first. None: no
    limit."""

    max_age_grace: Delay = 30.0
    """How many seconds calls may continue on a connection that has reached `max_age`. After that
    they end with UNAVAILABLE, and the connection is closed."""

    check_interval: Seconds | None = None
    """Seconds between two checks of all connections. A limit is noticed up to this much late. None:
    a third of the shortest of `idle_timeout`, `read_idle`, `write_idle`, `request_timeout` and
    `max_age`, as in Dubbo."""

    close_streams: StrictBool = False
    """Whether an open stream without messages counts as idle. If so, it ends with UNAVAILABLE and
    the reason before its connection is closed."""

    count_heartbeats: StrictBool = False
    """Whether heartbeats count as use."""

    heartbeats: Patterns = (HEALTH_METHODS,)
    """Methods whose calls are heartbeats: full names, or patterns with `*`. Calls with the metadata
    `rpcwheel-heartbeat` always are."""

    action: Literal["shutdown", "report"] = "shutdown"
    """`"shutdown"`: close the TCP connection, with TLS too. If a client starts a call at the same
    time, the call may fail with UNAVAILABLE. `"report"`: only emit `ConnectionIdle`."""

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
