"""What both twins are given, checked and completed; and what they tell of all members together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, TypeAlias

import grpc

from rpcwheel.transport.arguments import checked_options

from .policy import ClusterPolicy

if TYPE_CHECKING:
    from collections.abc import Iterable

    Options: TypeAlias = list[tuple[str, Any]]
    State: TypeAlias = grpc.ChannelConnectivity

__all__ = [
    "checked_on_member",
    "checked_policy",
    "credentials_for",
    "member_options",
    "whole_state",
]

RECONNECTS: Final = ("grpc.max_reconnect_backoff_ms", 3_000)
"""Or gRPC would look for a server that is away for long only every two minutes. Calls fail until it
does: when a whole site was away, for so long after it is back."""

ORDER: Final = (
    grpc.ChannelConnectivity.READY,
    grpc.ChannelConnectivity.CONNECTING,
    grpc.ChannelConnectivity.IDLE,
    grpc.ChannelConnectivity.TRANSIENT_FAILURE,
)


def checked_policy(policy: object) -> ClusterPolicy:
    """Give it back, or the defaults for None.

    Raises:
        TypeError: It is no policy.
    """
    if policy is None:
        return ClusterPolicy()
    if not isinstance(policy, ClusterPolicy):
        raise TypeError(f"policy must be a ClusterPolicy or None, not {policy!r}")
    return policy


def checked_on_member(on_member: Any) -> Any:
    """Give it back.

    Raises:
        TypeError: It can't be called.
    """
    if on_member is not None and not callable(on_member):
        raise TypeError(f"on_member must be callable as on_member(member), not {on_member!r}")
    return on_member


def member_options(options: object) -> Options:
    """Those of each member's channel.

    Raises:
        TypeError: They are no pairs.
    """
    checked = checked_options(options)
    given = {name for name, _ in checked}
    return checked if RECONNECTS[0] in given else [*checked, RECONNECTS]


def credentials_for(
    protocol: str, credentials: grpc.ChannelCredentials | None
) -> grpc.ChannelCredentials | None:
    """Those for an instance: what was given, else grpc's own defaults where it wants TLS."""
    wants_tls = credentials is None and protocol == "grpcs"
    made: grpc.ChannelCredentials | None = grpc.ssl_channel_credentials() if wants_tls else None
    return made or credentials


def whole_state(states: Iterable[State]) -> State:
    """The state of a whole by those of its members: the best one, as gRPC's round robin has it."""
    seen = set(states)
    for state in ORDER:
        if state in seen:
            return state
    return grpc.ChannelConnectivity.TRANSIENT_FAILURE
