"""What a user may set for a channel of many members, and what each setting means."""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from typing import Annotated, ClassVar

from pydantic import BeforeValidator, StrictStr

from rpcwheel.durations import NEVER, to_ns
from rpcwheel.errors import ConfigurationError
from rpcwheel.policy import Policy, Seconds, Wait, checked

__all__ = ["ClusterPolicy"]


def _span(value: object) -> object:
    if value is None:
        return value
    ns = checked(partial(to_ns, what="it"), value)
    if ns < 0 or ns == NEVER:
        raise ConfigurationError(f"it must be a finite time of zero or more, not {value!r}")
    return value


class ClusterPolicy(Policy):
    """How a channel treats its members."""

    short: ClassVar[str | None] = "drain"

    wait: Annotated[float | timedelta, BeforeValidator(_span)] = 5.0
    """Seconds that a call waits, at most, until it is known for the first time which members there
    are; no longer than its own deadline. 0: it fails at once."""

    drain: Annotated[float | timedelta | None, BeforeValidator(_span)] = 30.0
    """Seconds that calls may go on on a member that was removed; then they are ended with
    UNAVAILABLE. None: as long as they take."""

    probe: Wait | None = None
    """How long to wait before a member that is down is asked whether it answers again. None: at
    random up to 0.5 s, then up to twice as much each time, at most 10 s."""

    probe_timeout: Seconds = 5.0
    """Seconds that such a question may take. It waits for the connection, so a member is back as
    soon as it is."""

    warmup: Seconds | None = None
    """Seconds in which the weight of an instance that has just begun to serve grows to its full
    value (Dubbo's `warmup`, there 600). None: it is full at once."""

    zone: StrictStr = ""
    """Members of this zone are called as long as any of them is up. "": all alike."""
