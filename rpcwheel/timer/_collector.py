"""What compiled timeouts and slots ask of the cycle collector; pure ones ask nothing.

Timeouts are out of its sight: a million of them would cost each of its runs 100 ms and more. That
is safe because every end of a timeout, or of its timer, cuts what it holds. Slots stay in sight.
"""

from __future__ import annotations

__all__ = ["COMPILED", "track", "untrack"]

COMPILED = False


def track(slot: object) -> None:
    """Put a slot into the cycle collector's sight; in compiled code only."""


def untrack(timeout: object) -> None:
    """Take a timeout out of it; in compiled code only."""
