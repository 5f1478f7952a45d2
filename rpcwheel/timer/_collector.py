"""What compiled timeouts and slots ask of the cycle collector; pure ones ask nothing.

A compiled timeout is hidden from the collector while it waits in a queue: a million of them would
cost each collection 100 ms and more. It stays hidden when it has run or was cancelled, because it
has dropped its task by then. A timeout that leaves the queue with its task is shown to the
collector again (`Timeout._keep_task`): `stop()`, `aclose()` and the end of a dropped timer take it
out, or an executor gets it. Slots are always shown.

So one thing is never collected in the compiled form: a timer that is forgotten without `stop()`
while a waiting task of the user's refers to the timer itself. (`Timeout`, `PeriodicTask` and
`RetryTask` refer to it weakly.)
"""

from __future__ import annotations

__all__ = ["COMPILED", "track", "untrack"]

COMPILED = False


def track(timeout: object) -> None:
    """Show a slot or a timeout to the cycle collector; in compiled code only."""


def untrack(timeout: object) -> None:
    """Hide a timeout from the cycle collector; in compiled code only."""
