"""`KitPolicy`, the settings of a kit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final

from rpcwheel.call.policy import CallPolicy
from rpcwheel.heartbeat.policy import HeartbeatPolicy
from rpcwheel.idle.policy import IdlePolicy
from rpcwheel.policy import or_short
from rpcwheel.registry.policy import RegistryPolicy

if TYPE_CHECKING:
    from datetime import timedelta
    from typing import Unpack

    from rpcwheel.call.policy import CallSettings

    class KitSettings(CallSettings, total=False):
        """What `KitPolicy(...)` accepts, which is more than the fields hold."""

        heartbeat: float | timedelta | HeartbeatPolicy | None
        idle: float | timedelta | IdlePolicy | None
        registry: float | timedelta | RegistryPolicy | None


__all__ = ["PREFIX", "KitPolicy"]

PREFIX: Final = "RPCWHEEL_"
"""How the names of the variables begin that `Kit.from_env` reads."""


class KitPolicy(CallPolicy):
    """A `CallPolicy`, and settings for connections, servers and registries.

    Example::

        KitPolicy(timeout=2.0, heartbeat=10.0, idle=IdlePolicy(idle_timeout=180.0, max_age=3600.0))
    """

    heartbeat: Annotated[HeartbeatPolicy | None, or_short(HeartbeatPolicy)] = None
    """A `HeartbeatPolicy`, or its `interval` as seconds or a `timedelta`: send heartbeats on the
    channels that the kit makes or intercepts, when they are silent. The dead connection of a
    `ReconnectingChannel` is replaced; that of any other channel is only reported."""

    idle: Annotated[IdlePolicy | None, or_short(IdlePolicy)] = None
    """An `IdlePolicy`, or its `idle_timeout` as seconds or a `timedelta`: close idle connections of
    the kit's servers."""

    registry: Annotated[RegistryPolicy | None, or_short(RegistryPolicy)] = None
    """A `RegistryPolicy`, or its `lease_ttl` as seconds or a `timedelta`, for the registries that
    the kit opens. None: `RegistryPolicy()`."""

    if TYPE_CHECKING:

        def __init__(self, **settings: Unpack[KitSettings]) -> None: ...
