"""What a server of grpc.aio knows of itself and does not show.

Proved on grpcio 1.85; `tests/legacy/_grpc/test_aio_serving.py` tells if that changes.
"""

from __future__ import annotations

from typing import Any

__all__ = ["is_running"]


def is_running(server: Any) -> bool | None:  # noqa: ANN401 - grpc.aio's, or one around it
    """Whether it has started and not stopped; None if that can't be known."""
    ask = getattr(getattr(server, "_server", None), "is_running", None)
    return None if ask is None else bool(ask())
