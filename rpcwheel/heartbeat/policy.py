"""The settings of heartbeats."""

from __future__ import annotations

from typing import ClassVar, Self

from pydantic import StrictBool, model_validator

from rpcwheel.durations import to_ns
from rpcwheel.errors import ConfigurationError
from rpcwheel.policy import Delay, Policy, Seconds

__all__ = ["HeartbeatPolicy"]


class HeartbeatPolicy(Policy):
    """When a silent connection gets a heartbeat, and when it is dead.

    The defaults are Dubbo's: a heartbeat after a minute of silence, dead after three minutes
    (`heartbeat`, `heartbeat.timeout`).
    """

    short: ClassVar[str | None] = "interval"

    interval: Seconds | None = 60.0
    """Seconds. A heartbeat is sent if nothing was read, or nothing was written, for longer. None:
    no heartbeats. (In Dubbo 3, 0 means one each second; here 0 is refused.)"""

    timeout: Seconds | None = None
    """Seconds. A connection is dead if nothing was read for longer, and at least two heartbeats in
    a row were missed. None: three times the interval. Less than twice the interval is refused,
    because one lost answer would be enough. A heartbeat tests whether the server works: a server
    whose threads are all busy for longer than this is dead too, so give it spare threads."""

    drain_timeout: Delay | None = 0.0
    """Seconds for which calls in flight on a dead connection may continue. 0: they end at once with
    UNAVAILABLE, as with Dubbo and with gRPC's keepalive. None: no limit. Calls that only wait for a
    connection (`wait_for_ready` while gRPC can't connect, or connects for the first time) were not
    sent, and continue."""

    reconnect: StrictBool = True
    """Whether a dead connection is replaced. If not, it is only reported."""

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
