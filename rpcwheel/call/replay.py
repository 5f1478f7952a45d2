"""The buffer of a request stream, from which the whole stream can be sent again.

The buffer stores copies of messages, because a user's generator may yield the same object several
times with other contents. If it exceeds its limit, or a message can't be copied, it drops all
messages and stays empty. It has no lock: one sender at a time adds messages.
"""

from __future__ import annotations

import copy
import sys
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable

OVERHEAD: Final = 64
"""Bytes that are added to the size of each message, so that empty messages count too."""

_NOT_COPIED: Final = object()


class ReplayBuffer:
    """The messages of one request stream, up to a number of bytes."""

    __slots__ = ("_bytes", "_limit", "_serialize", "complete", "messages", "whole")

    def __init__(self, limit_bytes: int, serialize: Callable[[Any], bytes] | None = None) -> None:
        """Make an empty buffer.

        Args:
            limit_bytes: Its limit. 0: no message is copied.
            serialize: The serializer of the messages; None if it is not known.
        """
        self._limit = limit_bytes
        self._serialize = serialize
        self._bytes = 0
        self.messages: list[Any] = []
        """Copies of all messages so far; empty after an overflow."""
        self.whole = True
        """Whether `messages` has all messages so far."""
        self.complete = False
        """Whether the stream has ended."""

    def copied(self, message: Any) -> Any:
        """Return what `add` stores of a message that is about to be sent. Never raises.

        Runs code of the user, such as the serializer: do not hold a lock.
        """
        if not self.whole or not self._limit:
            return _NOT_COPIED
        try:
            self._bytes += size_of(message, self._serialize) + OVERHEAD
            if self._bytes <= self._limit:
                return copy.deepcopy(message)
        except Exception:  # noqa: BLE001, S110 - then the stream can't be sent again
            pass
        return _NOT_COPIED

    def add(self, copied: Any) -> None:
        """Store the result of `copied`."""
        if copied is _NOT_COPIED:
            self.drop()
        elif self.whole:
            self.messages.append(copied)

    def drop(self) -> None:
        """Forget the messages; the stream can't be sent again."""
        self.whole = False
        self.messages = []


def size_of(message: Any, serialize: Callable[[Any], bytes] | None) -> int:
    """Return the size of a message in bytes, serialized.

    If the serializer is not known, as in an interceptor of grpc, messages that are neither bytes
    nor protobuf messages count as their own object, without what it refers to.
    """
    if isinstance(message, (bytes, bytearray, memoryview)):
        return len(message)
    size = getattr(message, "ByteSize", None)
    if callable(size):
        return size()  # type: ignore[no-any-return]
    return sys.getsizeof(message) if serialize is None else len(serialize(message))
