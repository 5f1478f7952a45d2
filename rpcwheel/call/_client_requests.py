"""The requests of a streaming call: the user's iterator is read once, sent by one try at a time.

gRPC gives each try a thread that reads its requests. When a try has ended, its thread may still be
in the user's iterator, waiting for the next message, while a new try has begun. So the threads get
their messages from a `Feed`: it reads the iterator for whichever try is live, records what it read
and has the live try alone send it. Nothing is lost, and nothing sent twice by one try.
"""

from __future__ import annotations

import threading
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Self

from rpcwheel._concurrency.executor import EXECUTOR

from .replay import ReplayBuffer

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Feed"]

GATHER_S: Final = 1.0
"""How long to wait for the rest of a request stream that is to be kept for later."""


class Feed:
    """Where the tries of one call get their requests."""

    def __init__(self, requests: Iterator[Any], limit_bytes: int) -> None:
        self._requests = requests
        self._recording = ReplayBuffer(limit_bytes)
        self._changed = threading.Condition()
        self._live: _Sender | None = None
        self._reading = False
        self._error: BaseException | None = None

    @property
    def replayable(self) -> bool:
        """Whether a new try could send all that went before."""
        return self._recording.whole and self._error is None

    @property
    def known(self) -> bool:
        """Whether all requests were read, and kept."""
        return self._recording.complete and self.replayable

    def sender(self) -> Iterator[Any]:
        """The requests for a new try, from the first on. The try before gets nothing more."""
        with self._changed:
            self._live = sender = _Sender(self)
            self._changed.notify_all()
        return sender

    def close(self) -> None:
        """Give nobody anything more: the call has ended."""
        with self._changed:
            self._live = None
            self._changed.notify_all()

    def gather(self, key: object, limit_s: float | None = None) -> list[Any] | None:
        """Read to the end and give all messages; None if that isn't possible, or takes too long.

        Args:
            key: Whose work the reading is, for the pool of workers.
            limit_s: What is left of the call's deadline, 0 if nothing may be waited for; None if it
                has none.
        """
        recording = self._recording
        limit_s = GATHER_S if limit_s is None else min(GATHER_S, limit_s)
        if not recording.complete and self.replayable and limit_s > 0:
            EXECUTOR.submit(("requests", key), partial(self._drain, self.sender()))
            with self._changed:
                self._changed.wait_for(lambda: recording.complete or not self.replayable, limit_s)
            self.close()
        return recording.messages if self.known else None

    def _drain(self, sender: Iterator[Any]) -> None:
        for _ in sender:
            if not self.replayable:
                return

    def next_for(self, sender: _Sender) -> Any:
        """The next message for a try; blocks until there is one."""
        while True:
            with self._changed:
                self._changed.wait_for(partial(self._may_go_on, sender))
                if self._live is not sender:
                    raise StopIteration
                if sender.waiting:
                    return sender.waiting.popleft()
                if self._error is not None:
                    raise self._error
                if self._recording.complete:
                    raise StopIteration
                self._reading = True
            self._read()

    def _may_go_on(self, sender: _Sender) -> bool:
        return self._live is not sender or bool(sender.waiting) or not self._reading

    def _read(self) -> None:
        """Read one message, without the lock: it may take for ever."""
        message = error = None
        complete = False
        try:
            message = next(self._requests)
        except StopIteration:
            complete = True
        except BaseException as raised:  # noqa: BLE001 - for the live try to raise
            error = raised
        with self._changed:
            self._reading = False
            self._error = error
            self._recording.complete = complete
            if not complete and error is None:
                self._recording.add(message)
                if self._live is not None:
                    self._live.waiting.append(message)
            self._changed.notify_all()

    def recorded(self) -> list[Any]:
        """All that was read so far."""
        return self._recording.messages


class _Sender:
    """The requests of one try, as an iterator."""

    def __init__(self, feed: Feed) -> None:
        self._feed = feed
        self.waiting = deque(feed.recorded())
        """What it has not sent yet."""

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        return self._feed.next_for(self)
