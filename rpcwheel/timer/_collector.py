"""What the compiled front door asks of the cycle collector; the pure one has nothing to ask."""

from __future__ import annotations

__all__ = ["untrack"]

COMPILED = False


def untrack(timeout: object) -> None:
    """Take a timeout out of the cycle collector's sight; compiled code only."""
