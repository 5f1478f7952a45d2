"""`RatePolicy`, how many calls start in each second, and the bucket that decides it. No I/O."""

from __future__ import annotations

import math
from bisect import bisect_right, insort
from functools import partial
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import BeforeValidator, Field, StrictInt, WithJsonSchema

from rpcwheel.errors import ConfigurationError
from rpcwheel.policy import Delay, OrShort, Policy, checked, shown

LOWEST_RATE: Final = 1e-6
HIGHEST_RATE: Final = 1e6
"""Calls per second. Above, an interval of whole nanoseconds would be too inexact."""

RATE_SCHEMA: Final[dict[str, object]] = {
    "type": "number",
    "minimum": LOWEST_RATE,
    "maximum": HIGHEST_RATE,
}


def _rate(value: object, *, or_policy: bool = False) -> Any:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if is_number and LOWEST_RATE <= value <= HIGHEST_RATE:  # type: ignore[operator]
        return float(value)  # type: ignore[arg-type]
    kinds = "a number of calls per second" + (" or a RatePolicy" if or_policy else "")
    error = ConfigurationError if is_number else TypeError
    hint = f"; give {LOWEST_RATE:f} to {HIGHEST_RATE:,.0f}" if is_number else ""
    raise error(f"it must be {kinds}, not {shown(value)}{hint}")


class RatePolicy(Policy):
    """How many calls start in each second: a token bucket.

    The bucket is full at the start, and each call takes a token. A call that finds none waits for
    the next one, or is refused if that takes longer than `max_wait`.
    """

    short: ClassVar[str | None] = "rate"

    rate: Annotated[
        float, BeforeValidator(partial(checked, _rate)), WithJsonSchema(RATE_SCHEMA)
    ] = Field(description="give a number of calls per second")
    """Calls per second: the tokens that are added to the bucket, evenly spread over time."""

    burst: Annotated[StrictInt, Field(ge=1)] | None = None
    """The size of the bucket: how many calls may start at the same time after a pause. None: those
    of one second, at least one."""

    max_wait: Delay = 0.0
    """Maximum seconds that a call of a client waits for a token. 0: it is refused at once, as all
    calls of a server are."""

    per: Literal["method", "target"] = "method"
    """Which calls of a client share a bucket: `"method"`, those of each method of a target;
    `"target"`, those of all methods of a target that have this policy."""


Rate = Annotated[
    RatePolicy | None, OrShort(RatePolicy, partial(_rate, or_policy=True), (RATE_SCHEMA,))
]
"""A `RatePolicy`, or its `rate`."""


class TokenBucket:
    """A token bucket without a timer: what it holds is computed when it is used.

    It is the generic cell rate algorithm (ITU-T I.371): instead of a number of tokens, which would
    be a fraction, it stores the time at which it will be full. The caller holds a lock. Times are
    integer nanoseconds on one clock that never goes back.
    """

    def __init__(self, rate: float, burst: int | None = None) -> None:
        """Make a bucket that is full.

        Args:
            rate: Tokens that are added per second, as in a `RatePolicy`.
            burst: The highest number of tokens; None for those of one second, at least one.
        """
        if burst is None:
            burst = max(1, math.ceil(rate))
        self._interval_ns = round(1e9 / rate)
        self._span_ns = (burst - 1) * self._interval_ns
        self.full_ns = 0
        """When it will be full; a reserved token counts as taken."""
        self.returned_ns: list[int] = []
        """Tokens that were returned before others that are reserved, as `full_ns` after each was
        taken. Sorted. Those in the past are dropped: the bucket would be full."""

    def wait_ns(self, now_ns: int) -> int:
        """Return how long it takes until there is a token: 0 if there is one."""
        wait_ns = self.full_ns - self._span_ns - now_ns
        return max(0, wait_ns)

    def take(self, now_ns: int, max_wait_ns: int = 0) -> int | None:
        """Take a token, or reserve the next one that is free.

        Args:
            now_ns: The time now.
            max_wait_ns: How long the caller would wait for it.

        Returns:
            How long to wait before the token may be used: 0 for now. None: that would be longer
            than `max_wait_ns`, and no token was taken.
        """
        full_ns = self.full_ns
        wait_ns = full_ns - self._span_ns - now_ns
        if wait_ns > max_wait_ns:
            return None
        self.full_ns = max(now_ns, full_ns) + self._interval_ns
        returned_ns = self.returned_ns
        if returned_ns and returned_ns[0] <= now_ns:
            del returned_ns[: bisect_right(returned_ns, now_ns)]
        return max(0, wait_ns)

    def give_back(self, full_ns: int) -> None:
        """Return a token that was not used, when all that were taken after it are returned too.

        Callers keep the times that they have reserved. So a token before them would be used by a
        later caller, together with the last of them (golang.org/x/time/rate, `CancelAt`).

        Args:
            full_ns: The attribute, as it was when the token was taken.
        """
        insort(self.returned_ns, full_ns)
        while self.returned_ns and self.returned_ns[-1] == self.full_ns:
            self.returned_ns.pop()
            self.full_ns -= self._interval_ns
