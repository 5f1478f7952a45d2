"""The buffer of a request stream, from which the whole stream can be sent again.

The buffer stores copies of messages, because a user's generator may yield the same object several
times with other contents. If it exceeds its limit, or a message can't be copied, it drops all
messages and stays empty. It has no lock: one sender at a time adds messages.
"""

from __future__ import annotations

import copy
import sys
from typing import Any, Final

OVERHEAD: Final = 64
"""Bytes that are added to the size of each message, so that empty messages count too."""


class ReplayBuffer:
    """The messages of one request stream, up to a number of bytes."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._bytes = 0
        self.messages: list[Any] = []
        """Copies of all messages so far; empty after an overflow."""
        self.whole = True
        """Whether `messages` has all messages so far."""
        self.complete = False
        """Whether the stream has ended."""
        self.error: BaseException | None = None
        """What the user's iterator raised."""

    @property
    def replayable(self) -> bool:
        """Whether a new attempt can send all requests that were read."""
        return self.whole and self.error is None

    @property
    def has_all(self) -> bool:
        """Whether all requests of the stream were read and are here."""
        return self.complete and self.replayable

    @property
    def is_over(self) -> bool:
        """Whether all requests were read, or can't be sent again."""
        return self.complete or not self.replayable

    def add(self, message: Any) -> None:
        """Store a copy of a message that is about to be sent. Never raises."""
        if not self.whole:
            return
        try:
            self._bytes += size_of(message) + OVERHEAD
            if self._bytes <= self._limit:
                self.messages.append(copy.deepcopy(message))
                return
        except Exception:  # noqa: BLE001, S110 - then the stream can't be sent again
            pass
        self.drop()

    def drop(self) -> None:
        """Forget the messages; the stream can't be sent again."""
        self.whole = False
        self.messages = []


def size_of(message: Any) -> int:
    """Return the size of a message in bytes: serialized for protobuf messages, else in memory."""
    if isinstance(message, (bytes, bytearray, memoryview)):
        return len(message)
    size = getattr(message, "ByteSize", None)
    return size() if callable(size) else sys.getsizeof(message)
