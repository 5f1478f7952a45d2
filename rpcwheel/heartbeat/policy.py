"""What a user may set for heartbeats, and what each setting means."""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from typing import Annotated, ClassVar, Self

from pydantic import BeforeValidator, StrictBool, model_validator

from rpcwheel.durations import NEVER, to_ns
from rpcwheel.errors import ConfigurationError
from rpcwheel.policy import Policy, Seconds, checked

__all__ = ["HeartbeatPolicy"]


def _drain_timeout(value: object) -> object:
    if value is None:
        return value
    ns = checked(partial(to_ns, what="it"), value)
    if ns < 0 or ns == NEVER:
        raise ConfigurationError(
            "it must be a finite time of zero or more; None lets calls take as long as they take"
        )
    return value


class HeartbeatPolicy(Policy):
    """When a silent connection is asked whether it lives, and when it is given up.

    The defaults are Dubbo's: a heartbeat after a minute of silence, dead after three
    (`heartbeat`, `heartbeat.timeout`).
    """

    short: ClassVar[str | None] = "interval"

    interval: Seconds | None = 60.0
    """A heartbeat is sent when nothing was read, or nothing written, for more than so many seconds.
    None: no heartbeats at all. (In Dubbo 3, 0 means one each second; here it is refused.)"""

    timeout: Seconds | None = None
    """A connection on which nothing was read for more than so many seconds, and at least two
    heartbeats were not answered, is dead. None: three times the interval. Less than twice the
    interval is refused: one lost answer would do. What is asked is whether the server works: one
    whose threads are all taken for longer than this is dead too, so give it threads to spare."""

    drain_timeout: Annotated[float | timedelta | None, BeforeValidator(_drain_timeout)] = 0.0
    """Seconds that calls in flight on a dead connection may go on. 0: they are ended at once, with
    UNAVAILABLE, as Dubbo and gRPC's own keepalive end them. None: they may take as long as they
    take. Calls that only wait for a connection (`wait_for_ready`,
    while gRPC can't connect, or connects for the first time) were not sent, and are not ended."""

    reconnect: StrictBool = True
    """Whether a dead connection is replaced; otherwise it is only reported."""

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        if self.interval is None or self.timeout is None:
            return self
        if to_ns(self.timeout) < 2 * to_ns(self.interval):
            raise ConfigurationError(
                f"timeout ({self.timeout}) is less than twice interval ({self.interval}), so that "
                "one lost heartbeat would end a connection; give more, or leave it out for three "
                "times the interval"
            )
        return self
