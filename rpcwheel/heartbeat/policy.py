"""The settings of heartbeats."""

from __future__ import annotations

from typing import ClassVar, Self

from pydantic import StrictBool, model_validator

from rpcwheel.durations import to_ns
from rpcwheel.errors import ConfigurationError
from rpcwheel.policy import Delay, Policy, Seconds


class HeartbeatPolicy(Policy):
    """Settings for heartbeats: when a silent connection gets one, and when it is dead.

    The defaults are Dubbo's: a heartbeat after a minute of silence, dead after three minutes
    (`heartbeat`, `heartbeat.timeout`).
    """

    short: ClassVar[str | None] = "interval"

    interval: Seconds | None = 60.0
    """A heartbeat is sent if nothing was received, or nothing was sent, for more than this many
    seconds. None: no heartbeats. (In Dubbo 3, 0 means one each second; here 0 is refused.)"""

    timeout: Seconds | None = None
    """A connection is dead if nothing was received for more than this many seconds and at least two
    heartbeats in a row were missed. None: three times the interval. It must be at least twice the
    interval, because otherwise one lost answer would be enough. A heartbeat tests whether the
    server works: if all threads of a server are busy for longer than this, its connections are
    dead too, so give it spare threads."""

    drain_timeout: Delay | None = 0.0
    """How many seconds calls in flight on a dead connection may continue. 0: they end immediately
    with UNAVAILABLE, as with Dubbo and with gRPC's keepalive. None: no limit. Calls that have not
    been sent yet (`wait_for_ready` while gRPC can't connect, or connects for the first time)
    continue to wait for a connection."""

    reconnect: StrictBool = True
    """Whether a dead connection is replaced. False: it is only reported."""

    @model_validator(mode="after")
    def _check_timeout(self) -> Self:
        if self.interval is None or self.timeout is None:
            return self
        if to_ns(self.timeout) < 2 * to_ns(self.interval):
            raise ConfigurationError(
                f"timeout ({self.timeout}) is less than twice interval ({self.interval}), so one "
                "lost heartbeat would end a connection; increase it, or leave it out for three "
                "times the interval"
            )
        return self
