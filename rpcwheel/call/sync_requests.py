"""The request stream of a call of `grpc` that may be sent by several attempts.

gRPC reads the requests of each attempt on a thread of its own. When an attempt has ended, that
thread may still wait in the user's iterator for the next message while a new attempt has begun. So
these threads get their messages from a `RequestStream`: it reads the iterator once, for whichever
attempt is current, and keeps what it read in a `ReplayBuffer`. Only the current attempt sends.
"""

from __future__ import annotations

import threading
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from rpcwheel._concurrency.executor import EXECUTOR

from .config import GATHER_S
from .replay import ReplayBuffer

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["RequestStream"]


class RequestStream:
    """The requests of one call. Thread-safe."""

    def __init__(self, requests: Iterator[Any], limit_bytes: int) -> None:
        self._requests = requests
        self._recording = ReplayBuffer(limit_bytes)
        self._changed = threading.Condition()
        self._current: _AttemptRequests | None = None
        self._reading = False
        self._error: BaseException | None = None

    @property
    def replayable(self) -> bool:
        """Whether a new attempt could send all that was sent before."""
        return self._recording.whole and self._error is None

    @property
    def known(self) -> bool:
        """Whether all requests were read, and kept."""
        return self._recording.complete and self.replayable

    def for_attempt(self) -> Iterator[Any]:
        """The requests for a new attempt, from the first on. Those of older attempts end."""
        with self._changed:
            self._current = requests = _AttemptRequests(self, self._recording.messages)
            self._changed.notify_all()
        return requests

    def close(self) -> None:
        """End the requests of all attempts: the call has ended."""
        with self._changed:
            self._current = None
            self._changed.notify_all()

    def gather(self, key: object, limit_s: float | None = None) -> list[Any] | None:
        """Read to the end and give all messages; None if that isn't possible, or takes too long.

        Args:
            key: The key of the job that reads, for the executor.
            limit_s: What is left of the call's deadline, 0 if there is no time to wait; None if it
                has no deadline.
        """
        recording = self._recording
        limit_s = GATHER_S if limit_s is None else min(GATHER_S, limit_s)
        if not recording.complete and self.replayable and limit_s > 0:
            EXECUTOR.submit(("requests", key), partial(self._drain, self.for_attempt()))
            with self._changed:
                self._changed.wait_for(lambda: recording.complete or not self.replayable, limit_s)
            self.close()
        return recording.messages if self.known else None

    def _drain(self, requests: Iterator[Any]) -> None:
        for _ in requests:
            if not self.replayable:
                return

    def next_for(self, attempt: _AttemptRequests) -> Any:
        """The next message for an attempt; blocks until there is one."""
        while True:
            with self._changed:
                self._changed.wait_for(partial(self._may_go_on, attempt))
                if self._current is not attempt:
                    raise StopIteration
                if attempt.unsent:
                    return attempt.unsent.popleft()
                if self._error is not None:
                    raise self._error
                if self._recording.complete:
                    raise StopIteration
                self._reading = True
            self._read()

    def _may_go_on(self, attempt: _AttemptRequests) -> bool:
        return self._current is not attempt or bool(attempt.unsent) or not self._reading

    def _read(self) -> None:
        """Read one message, without the lock: the user's iterator may block for ever."""
        message = error = None
        complete = False
        try:
            message = next(self._requests)
        except StopIteration:
            complete = True
        except BaseException as raised:  # noqa: BLE001 - raised by the current attempt
            error = raised
        with self._changed:
            self._reading = False
            self._error = error
            self._recording.complete = complete
            if not complete and error is None:
                self._recording.add(message)
                if self._current is not None:
                    self._current.unsent.append(message)
            self._changed.notify_all()


class _AttemptRequests:
    """The requests of one attempt, as an iterator."""

    def __init__(self, stream: RequestStream, recorded: list[Any]) -> None:
        self._stream = stream
        self.unsent = deque(recorded)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        return self._stream.next_for(self)
