"""What a kit may be set to: the policies of calls, of connections, and of registries."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final

from rpcwheel.call.policy import CallPolicy
from rpcwheel.heartbeat.policy import HeartbeatPolicy
from rpcwheel.idle.policy import IdlePolicy
from rpcwheel.policy import or_short
from rpcwheel.registry.policy import RegistryPolicy

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import timedelta

    from rpcwheel.call.policy import (
        DeadlinePolicy,
        DefaultResponsePolicy,
        HedgingPolicy,
        MethodPolicy,
        RetryPolicy,
    )
    from rpcwheel.failback.policy import FailbackPolicy

__all__ = ["PREFIX", "KitPolicy"]

PREFIX: Final = "RPCWHEEL_"
"""How the names of the variables begin that `Kit.from_env` reads."""


class KitPolicy(CallPolicy):
    """A `CallPolicy`, and what holds for the connections that the calls go through.

    Example::

        KitPolicy(timeout=2.0, heartbeat=10.0, idle=IdlePolicy(idle_timeout=180.0, max_age=3600.0))
    """

    heartbeat: Annotated[HeartbeatPolicy | None, or_short(HeartbeatPolicy)] = None
    """A number of seconds, a `timedelta`, or a `HeartbeatPolicy`: channels that the kit makes or
    intercepts are probed when they are silent for so long. When dead, they are replaced if they are
    `ReconnectingChannel`s, and reported if not."""

    idle: Annotated[IdlePolicy | None, or_short(IdlePolicy)] = None
    """A number of seconds, a `timedelta`, or an `IdlePolicy`: connections of the kit's servers that
    do nothing for so long are closed."""

    registry: Annotated[RegistryPolicy | None, or_short(RegistryPolicy)] = None
    """A number of seconds (the lease), a `timedelta`, or a `RegistryPolicy`: for registries that
    the kit opens, of channels by name and of servers that it publishes. None: the defaults."""

    if TYPE_CHECKING:  # what may be given is more than what is kept

        def __init__(
            self,
            *,
            timeout: float | timedelta | DeadlinePolicy | None = None,
            retry: RetryPolicy | None = None,
            hedging: float | timedelta | HedgingPolicy | None = None,
            default_response: DefaultResponsePolicy | None = None,
            failback: FailbackPolicy | None = None,
            idempotent: bool = False,
            wait_for_ready: bool | None = None,
            methods: Mapping[str, MethodPolicy] = ...,
            heartbeat: float | timedelta | HeartbeatPolicy | None = None,
            idle: float | timedelta | IdlePolicy | None = None,
            registry: float | timedelta | RegistryPolicy | None = None,
        ) -> None: ...
