"""What is kept of a call that failback delivers later, when its caller has gone. For both twins."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, Final

from rpcwheel.durations import NEVER, to_seconds

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rpcwheel.failback.policy import FailbackPolicy

    from .core import CallRules

__all__ = ["KEPT_BYTES", "kept_metadata", "kept_request", "resend_timeout"]

KEPT_BYTES: Final = 1 << 20
"""How much of a request stream is kept for failback, where no retry policy says it."""

RESEND_S: Final = 60.0
"""The deadline of one delivery, where neither the caller nor the policy gave one."""


def resend_timeout(own: float | None, rules: CallRules) -> float:
    """Seconds that one delivery may take: what the caller gave, else what the rules say."""
    if own is not None:
        return own
    return RESEND_S if rules.timeout_ns == NEVER else to_seconds(rules.timeout_ns)


def kept_metadata(
    given: Iterable[tuple[str, str | bytes]] | None, policy: FailbackPolicy
) -> tuple[tuple[str, str | bytes], ...]:
    """The metadata that is sent again: what the policy keeps."""
    return tuple((key, value) for key, value in given or () if policy.keeps(key))


def kept_request(request: Any) -> Any:  # noqa: ANN401 - the user's
    """A request as it is now. Failback itself keeps those of protobuf as bytes."""
    if isinstance(request, bytes) or hasattr(request, "SerializeToString"):
        return request
    try:
        return copy.deepcopy(request)
    except Exception:  # noqa: BLE001 - what can't be copied is the caller's to leave unchanged
        return request
