"""Compiled timeouts and Python's garbage collector. In the pure form these functions do nothing.

A compiled timeout is not tracked by the collector while it is in a queue: a million of them would
make each collection take 100 ms and more. After it ran or was cancelled it stays untracked, as it
has released its task. A timeout that leaves the queue with its task is tracked again
(`Timeout._keep_task`): `stop()`, `aclose()`, the finalizer of a timer and an executor need that.
Slots are always tracked.

Consequence: in the compiled form, a timer that is not stopped is never collected if a pending task
of the user's refers to it. (`Timeout`, `PeriodicTask` and `RetryTask` refer to it weakly.)
"""

from __future__ import annotations

COMPILED = False


def track(timeout: object) -> None:
    """Let the garbage collector track a slot or a timeout; in compiled code only."""


def untrack(timeout: object) -> None:
    """Stop tracking a timeout; in compiled code only."""
