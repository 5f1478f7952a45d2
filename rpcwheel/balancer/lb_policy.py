"""The values of `lb_policy=`: a picker, or the name of one."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Final

from rpcwheel.errors import ConfigurationError

from .pickers import LeastRequest, Picker, RoundRobin, WeightedRandom, WeightedRoundRobin
from .ring_hash import RingHash

if TYPE_CHECKING:
    from collections.abc import Callable

PICKERS: Final[dict[str, Callable[[], Picker]]] = {
    "round_robin": RoundRobin,
    "weighted_round_robin": WeightedRoundRobin,
    "weighted_random": WeightedRandom,
    "least_request": LeastRequest,
}
FORMS: Final = (*PICKERS, "ring_hash:HEADER")
"""All forms of a name, for error messages."""


def checked_lb_policy(lb_policy: str | Picker) -> Picker:
    """Return the picker that `lb_policy` stands for.

    Args:
        lb_policy: A picker, which is returned, or a name: one of `PICKERS`, or `"ring_hash:HEADER"`
            with the name of a metadata header. Each use of a name makes a new picker.

    Raises:
        TypeError: It is neither a name nor a picker.
        ConfigurationError: There is no policy of this name.
    """
    if isinstance(lb_policy, Picker):
        return lb_policy
    if not isinstance(lb_policy, str):
        raise TypeError(f"lb_policy must be a name or a Picker, not {lb_policy!r}")
    if lb_policy in PICKERS:
        return PICKERS[lb_policy]()
    name, _, header = lb_policy.partition(":")
    if name == "ring_hash" and header:
        return RingHash(header)
    raise ConfigurationError(f"lb_policy: there is no {lb_policy!r}; {_hint(name, header)}")


def _hint(name: str, header: str) -> str:
    """Return what the user may have meant: names of other libraries, and misspelled ones."""
    match name.lower().replace("-", "_"):
        case "ring_hash" | "consistent_hash":
            meant = f"ring_hash:{header or 'HEADER'}"
            return f"did you mean {meant!r}? Or RingHash(key) with a function of your own"
        case "least_active":
            return "did you mean 'least_request'?"
        case written:
            close = difflib.get_close_matches(written, PICKERS, n=1)
            return f"did you mean {close[0]!r}?" if close else f"there are {', '.join(FORMS)}"
