"""What the compiled form of the timer does in C; here in Python, for the pure form.

The sources of the compiled form import this module, and their `.pxd` files replace it by
`_c_native.pxd`, which has the same names.

**The garbage collector.** A compiled timeout is not tracked by the collector while it is in a
queue: a million of them would make each collection take 100 ms and more. After it ran or was
cancelled it stays untracked, as it has released its task. A timeout that leaves the queue with its
task is tracked again (`Timeout._keep_task`): `stop()`, `aclose()`, the finalizer of a timer and an
executor need that.

Consequence: in the compiled form, a timer that is not stopped is never collected if a pending task
of the user's refers to it. (`Timeout`, `PeriodicTask` and `RetryTask` refer to it weakly.)
"""

from __future__ import annotations

import math
from bisect import bisect_left

COMPILED = False


def track(timeout: object) -> None:
    """Let the garbage collector track a timeout; in compiled code only."""


def untrack(timeout: object) -> None:
    """Stop tracking a timeout; in compiled code only."""


def integers(count: int) -> list[int]:
    """Return an array of 64-bit integers, all 0. In compiled code it must be freed."""
    return [0] * count


def bitmap(slots: int) -> list[int]:
    """Return an array of 64-bit words with at least a bit for each slot, all 0."""
    return [0] * (slots // 64 + 1)


def free(array: list[int]) -> None:
    """Free an array; in compiled code only."""


def prefetch(timeout: object) -> None:
    """Begin to load a timeout into the processor's cache; in compiled code only."""


def lowest_bit(bits: int) -> int:
    """Return the position of the lowest bit that is set; `bits` is not 0."""
    return (bits & -bits).bit_length() - 1


floor = math.floor

bucket = bisect_left
"""The first index whose bound is not below the value. The last bound is the largest integer."""
