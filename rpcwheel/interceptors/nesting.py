"""Warns if a channel gets policies with several attempts for methods that have some already.

Settings apply to methods by pattern. The methods that two policies have in common are looked at by
samples: each pattern of the two, and what two of their patterns have in common.
"""

from __future__ import annotations

import warnings
from itertools import combinations, islice
from typing import TYPE_CHECKING, Any, Final

from rpcwheel._grpc.connectivity import nested_channels
from rpcwheel._grpc.interceptors import interceptors_of
from rpcwheel.methods import overlap

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rpcwheel.call.policy import CallPolicy, MethodPolicy

ALL: Final = "/*/*"
MAX_PAIRS: Final = 10_000
"""How many pairs of patterns are compared, which takes 0.2 s. A further pair is only noticed if one
contains the other."""


def warn_if_nested(channel: Any, policy: CallPolicy, *, stacklevel: int) -> None:
    """Warn if a channel that gets policies with retries has some already for the same methods.

    Does not see interceptors of `grpc` that are added to the result later, nor policies on the
    connections of a balanced channel. `stacklevel` is as in `warnings.warn`; 2 is the caller of
    this function.
    """
    nested = [
        (below, attempts, method)
        for inner in _policies_of(channel)
        for method in _samples(inner, policy)
        if (below := _attempts(inner.policy_for(method))) > 1
        and (attempts := _attempts(policy.policy_for(method))) > 1
    ]
    if nested:
        below, attempts, method = max(nested, key=lambda each: each[0] * each[1])
        call = "a call" if method == ALL else f"a call of {method}"
        warnings.warn(
            f"this channel already has policies that allow {call} {below} attempts; with these, "
            f"it may make {below} x {attempts} = {below * attempts}. Apply policies to a channel "
            "once, or set retry and hedging in only one of them",
            RuntimeWarning,
            stacklevel=stacklevel + 1,
        )


def _attempts(policy: MethodPolicy) -> int:
    """Return how many attempts the settings of a method allow for one call."""
    if not policy.idempotent:
        return 1
    several = (policy.retry, policy.hedging)
    return max((part.max_attempts for part in several if part is not None), default=1)


def _samples(*policies: CallPolicy) -> Iterator[str]:
    """Yield methods, and patterns, for which policies may have different settings."""
    patterns = dict.fromkeys([ALL, *(name for policy in policies for name in policy.methods)])
    patterns.pop("*", None)  # the same as `ALL`
    yield from patterns
    pairs = combinations([pattern for pattern in patterns if "*" in pattern], 2)
    for first, second in islice(pairs, MAX_PAIRS):
        common = overlap(first, second)
        if common is not None and common not in patterns:
            yield common


def _policies_of(channel: Any) -> Iterator[CallPolicy]:
    """Yield the policies that a channel has."""
    for inner in nested_channels(channel):
        for layer in (inner, *interceptors_of(inner)):
            policy = getattr(layer, "call_policy", None)
            if policy is not None:
                yield policy
        active = getattr(getattr(inner, "transports", None), "active", None)
        wrapped = (getattr(active, "channel", None),)  # of a `ReconnectingChannel`
        if isinstance(inner, tuple):  # of a `BroadcastChannel`
            wrapped = inner
        for each in wrapped:
            yield from _policies_of(each)
