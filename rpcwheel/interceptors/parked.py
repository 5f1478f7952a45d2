"""What is kept of a call that failback delivers later, when its caller has gone. For both twins."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, Final

from rpcwheel.durations import NEVER, to_ns, to_seconds

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rpcwheel.durations import Duration
    from rpcwheel.failback.policy import FailbackPolicy

    from .core import CallRules

__all__ = ["GATHER_S", "copy_of", "kept_metadata", "kept_request", "resend_timeout"]

GATHER_S: Final = 1.0
"""How long to wait for the rest of a request stream that is to be kept for later."""

RESEND_S: Final = 60.0
"""The deadline of one delivery, where neither the caller nor the policy gave one."""


def resend_timeout(own: Duration | None, rules: CallRules) -> float:
    """Seconds that one delivery may take: what the caller gave, else what the rules say.

    What the caller gave may have been no limit, or none that leaves any time.
    """
    for limit_ns in (NEVER if own is None else to_ns(own), rules.timeout_ns):
        if 0 < limit_ns < NEVER:
            return to_seconds(limit_ns)
    return RESEND_S


def kept_metadata(
    given: Iterable[tuple[str, str | bytes]] | None, policy: FailbackPolicy
) -> tuple[tuple[str, str | bytes], ...]:
    """The metadata that is sent again: what the policy keeps."""
    return tuple((key, value) for key, value in given or () if policy.keeps(key))


def kept_request(request: Any) -> Any:  # noqa: ANN401 - the user's
    """A request as it is now. Failback itself keeps those of protobuf as bytes."""
    return request if hasattr(request, "SerializeToString") else copy_of(request)


def copy_of(request: Any) -> Any:  # noqa: ANN401 - the user's
    """A request as it is now, whatever its caller does with it from now on."""
    try:
        return copy.deepcopy(request)
    except Exception:  # noqa: BLE001 - what can't be copied is the caller's to leave unchanged
        return request
