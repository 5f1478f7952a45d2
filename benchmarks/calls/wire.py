"""What goes over the wire: bytes, so that no serializer's time is in the figures."""

from __future__ import annotations

from typing import Final

SERVICE: Final = "bench.Shop"
PAYLOAD: Final = b"x" * 100
"""Of each message, but for the request of a response stream: that tells how many are wanted."""


def path(method: str) -> str:
    """A method's full name."""
    return f"/{SERVICE}/{method}"


UNARY_UNARY, UNARY_STREAM = path("UnaryUnary"), path("UnaryStream")
STREAM_UNARY, STREAM_STREAM = path("StreamUnary"), path("StreamStream")
