"""The buffer of a request stream, from which it can be sent again whole or not at all.

Pure, and without a lock: one sender at a time adds. Messages are kept as copies, because a user's
generator may yield the same message object again and again with other contents. A buffer that grew
beyond its limit, or got a message that can't be copied, drops all messages and stays empty.
"""

from __future__ import annotations

import copy
import sys
from typing import Any, Final

__all__ = ["ReplayBuffer"]


OVERHEAD: Final = 64
"""Bytes that each message counts beside its own: without them a buffer of empty messages would grow
without limit."""


class ReplayBuffer:
    """The messages of one request stream, from the first on, up to a number of bytes.

    Each counts with `OVERHEAD`.
    """

    __slots__ = ("_bytes", "_limit", "complete", "messages", "whole")

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._bytes = 0
        self.messages: list[Any] = []
        """All that was sent so far; empty once it was too much."""
        self.whole = True
        """Whether `messages` is all of it: nothing was dropped."""
        self.complete = False
        """Whether the stream has ended: nothing comes after `messages`."""

    def add(self, message: Any) -> None:
        """Keep a copy of a message that is about to be sent. Never raises."""
        if not self.whole:
            return
        try:
            self._bytes += size_of(message) + OVERHEAD
            if self._bytes <= self._limit:
                self.messages.append(copy.deepcopy(message))
                return
        except Exception:  # noqa: BLE001, S110 - the stream goes on; it just can't be sent again
            pass
        self.whole = False
        self.messages = []


def size_of(message: Any) -> int:
    """Bytes on the wire of a protobuf message, of bytes; in memory of anything else."""
    if isinstance(message, (bytes, bytearray, memoryview)):
        return len(message)
    size = getattr(message, "ByteSize", None)
    return size() if callable(size) else sys.getsizeof(message)
