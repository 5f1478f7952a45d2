"""Methods and messages. Messages are bytes, so the figures contain no serializer's time."""

from __future__ import annotations

from typing import Final

SERVICE: Final = "bench.Shop"
PAYLOAD: Final = b"x" * 100
"""Every message, except the request of a response stream, which is the number of responses."""


def path(method: str) -> str:
    """A method's full name."""
    return f"/{SERVICE}/{method}"


UNARY_UNARY, UNARY_STREAM = path("UnaryUnary"), path("UnaryStream")
STREAM_UNARY, STREAM_STREAM = path("StreamUnary"), path("StreamStream")
