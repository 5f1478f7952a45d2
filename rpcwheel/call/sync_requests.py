"""A request stream of `grpc` that is read once and may be sent by several attempts.

gRPC reads the requests of each attempt on its own thread. After the end of an attempt that thread
may still wait in the user's iterator, while a new attempt has begun. So gRPC's threads get the
messages from a `RequestStream`. It reads the iterator once, stores the messages in a
`ReplayBuffer`, and gives them to the current attempt only.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from contextvars import copy_context
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from .failed_calls import read_timeout_s
from .replay import ReplayBuffer

if TYPE_CHECKING:
    from collections.abc import Iterator


class RequestStream:
    """The requests of one call. Thread-safe."""

    def __init__(self, requests: Iterator[Any], limit_bytes: int) -> None:
        self._requests = requests
        self.buffer = ReplayBuffer(limit_bytes)
        self._lock = threading.RLock()  # entered itself: see the module `executor`
        self._changed = threading.Condition(self._lock)
        self._current: _AttemptRequests | None = None
        self._reading = False

    def for_attempt(self) -> Iterator[Any]:
        """Return an iterator over all requests for a new attempt. Those of earlier attempts end."""
        with self._lock:
            self._current = requests = _AttemptRequests(self, self.buffer.messages)
            self._changed.notify_all()
        return requests

    def close(self) -> None:
        """End the iterators of all attempts and free the messages: the call has ended."""
        with self._lock:
            self.buffer.drop()
            self._end_attempts()

    def _end_attempts(self) -> None:
        with self._lock:
            self._current = None
            self._changed.notify_all()

    def read_rest(self, left_s: float | None = None) -> list[Any] | None:
        """Read the rest and return all messages; None if they are not all read in time.

        Waits at most `read_timeout_s`. Reads on a thread of its own in a copy of the running
        context, as gRPC does, because the user's iterator may block forever.

        Args:
            left_s: The time until the deadline of the call; None without a deadline.
        """
        buffer = self.buffer
        if not buffer.is_over:
            drain = partial(copy_context().run, _drain, self.for_attempt())
            with contextlib.suppress(RuntimeError):  # no thread can be started
                threading.Thread(target=drain, name="rpcwheel-requests", daemon=True).start()
                with self._lock:
                    self._changed.wait_for(lambda: buffer.is_over, read_timeout_s(left_s))
            self._end_attempts()  # the thread then reads no further message
        return buffer.messages if buffer.has_all else None

    def next_for(self, attempt: _AttemptRequests) -> Any:
        """Return the next message for an attempt; blocks until there is one."""
        while True:
            with self._lock:
                self._changed.wait_for(partial(self._may_continue, attempt))
                if self._current is not attempt:
                    raise StopIteration
                if attempt.unsent:
                    return attempt.unsent.popleft()
                if self.buffer.error is not None:
                    raise self.buffer.error
                if self.buffer.complete:
                    raise StopIteration
                self._reading = True
            self._read()

    def _may_continue(self, attempt: _AttemptRequests) -> bool:
        return self._current is not attempt or bool(attempt.unsent) or not self._reading

    def _read(self) -> None:
        """Read one message, without the lock: the user's iterator may block forever."""
        message = error = None
        complete = False
        try:
            message = next(self._requests)
        except StopIteration:
            complete = True
        except BaseException as raised:  # noqa: BLE001 - raised by the current attempt
            error = raised
        with self._lock:
            self._reading = False
            self.buffer.error = error
            self.buffer.complete = complete
            if not complete and error is None:
                self.buffer.add(message)
                if self._current is not None:
                    self._current.unsent.append(message)
            self._changed.notify_all()


class _AttemptRequests:
    """The requests of one attempt; an iterator."""

    def __init__(self, stream: RequestStream, recorded: list[Any]) -> None:
        self._stream = stream
        self.unsent = deque(recorded)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        return self._stream.next_for(self)


def _drain(requests: Iterator[Any]) -> None:
    """Read requests to their end, without a reference to any of them."""
    with contextlib.suppress(BaseException):  # of the user's iterator
        deque(requests, maxlen=0)
