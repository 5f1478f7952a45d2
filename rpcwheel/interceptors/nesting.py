"""Warns if a channel gets policies with several attempts and has such policies already."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from rpcwheel._grpc.connectivity import unwrapped_channels
from rpcwheel._grpc.interceptors import interceptors_of

if TYPE_CHECKING:
    from rpcwheel.call.policy import CallPolicy


def attempts_of(policy: CallPolicy) -> int:
    """Return how many attempts the policies allow for one call; 1 if no method is idempotent."""
    settings = (policy, *policy.methods.values())
    if not any(setting.idempotent for setting in settings):
        return 1
    policies = (part for setting in settings for part in (setting.retry, setting.hedging))
    return max((part.max_attempts for part in policies if part is not None), default=1)


def warn_if_nested(channel: Any, attempts: int, *, stacklevel: int) -> None:
    """Warn if a channel that gets policies with retries has some already.

    It is not known if interceptors of `grpc` are added to the result, nor what the connections of
    a balanced channel have.

    Args:
        channel: The channel that gets the policies.
        attempts: How many attempts they allow for one call.
        stacklevel: As in `warnings.warn`; 2 is the caller of this function.
    """
    below = _attempts_below(channel) if attempts > 1 else 1
    if below > 1:
        warnings.warn(
            f"this channel already has policies that allow a call {below} attempts; with these, a "
            f"call may make {below} x {attempts} = {below * attempts}. Apply policies to a channel "
            "once, or set retry and hedging in only one of them",
            RuntimeWarning,
            stacklevel=stacklevel + 1,
        )


def _attempts_below(channel: Any) -> int:
    """Return the largest `max_attempts` of the policies that a channel has."""
    attempts = 1
    for inner in unwrapped_channels(channel):
        for layer in (inner, *interceptors_of(inner)):
            attempts = max(attempts, getattr(layer, "policy_attempts", 1))
        active = getattr(getattr(inner, "connections", None), "active", None)
        wrapped = (getattr(active, "channel", None),)  # of a `ReconnectingChannel`
        if isinstance(inner, tuple):  # of a `BroadcastChannel`
            wrapped = inner
        attempts = max((attempts, *map(_attempts_below, wrapped)))
    return attempts
