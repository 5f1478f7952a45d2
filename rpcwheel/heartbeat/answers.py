"""Who reads the answers to heartbeats that were sent together: one worker, while they come at once.

What is sent in one go is read in a row, by which time most has been answered. Where no answer comes
for `STALL_S`, more workers read, and soon there is one for each: none is late for long because of
another's server. gRPC's futures would have a thread each from the beginning.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING, Final, Protocol, TypeAlias

from rpcwheel._concurrency.executor import EXECUTOR, reset_after_fork

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from rpcwheel._concurrency.executor import SerialExecutor

    Ended: TypeAlias = Callable[[str, "bytes | None"], object]

__all__ = ["STALL_S", "Answers"]

STALL_S: Final = 0.02
"""How long nothing may come before more workers read."""


class Unread(Protocol):
    """A call that has begun."""

    def read(self) -> tuple[str, bytes | None]:
        """Wait for its end; gives its status and the response."""


class Answers:
    """Answers that are to come. Thread-safe; empty in a forked child."""

    def __init__(self, books: SerialExecutor) -> None:
        """`books` is where heartbeats are sent: what is due is sent first, then it is read."""
        self._books = books
        self.reset()
        reset_after_fork(self)

    def reset(self) -> None:
        """Forget all."""
        self._awaited: deque[tuple[Unread, Ended]] = deque()

    def expect(self, call: Unread, ended: Ended) -> None:
        """Have the call read, and then `ended(code, response)` called on that worker."""
        self._awaited.append((call, ended))
        self._books.submit(self._collect)

    def _collect(self) -> None:
        """Have read what was sent so far. On the books' worker, which waits no longer than that."""
        batch = _Batch(self._awaited.popleft() for _ in range(len(self._awaited)))
        several = len(batch.left)
        if not several:  # one before has taken them all
            return
        EXECUTOR.submit(batch, batch.read)
        if several > 1 and not batch.taken.wait(STALL_S):
            EXECUTOR.submit(object(), batch.hurry)


class _Batch:
    """What was sent together."""

    def __init__(self, calls: Iterable[tuple[Unread, Ended]]) -> None:
        self.left = deque(calls)
        """What nobody reads yet."""
        self.taken = threading.Event()
        """Whether all are read, or the last one is being read."""

    def read(self) -> None:
        """On a worker: one after the other, of those that no other worker reads."""
        while True:
            try:
                call, ended = self.left.popleft()
            except IndexError:  # another was faster
                return
            if not self.left:
                self.taken.set()
            try:
                ended(*call.read())
            except BaseException:
                EXECUTOR.submit(object(), self.read)  # the others; the pool tells of the error
                raise

    def hurry(self) -> None:
        """On a worker: whenever nothing comes, have as many workers more read as do already."""
        readers, before = 1, 0
        while left := len(self.left):
            if left == before:
                for _ in range(min(readers, left)):
                    EXECUTOR.submit(object(), self.read)
                readers *= 2
            before = left
            self.taken.wait(STALL_S)
