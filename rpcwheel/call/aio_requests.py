"""A request stream that is read once and may be sent several times, on an event loop.

Each attempt gets an iterator of its own: first what the buffer has, then what follows. Only the
newest iterator asks for more and gets it, so an older attempt that still waits takes no message
away. An asynchronous iterator of the user's is read by a task of its own, when an attempt asks for
more: canceling an attempt must not cancel the user's `__anext__`, which would lose a message or end
a generator for good. A plain iterator is read as grpc.aio reads it, on the loop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterable
from typing import TYPE_CHECKING, Any, Self

from rpcwheel._grpc.aio_relay import Signal

from .replay import ReplayBuffer

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["RequestStream"]


class RequestStream:
    """The requests of one call."""

    def __init__(self, given: Any, limit_bytes: int) -> None:
        """Begin, without reading anything.

        Args:
            given: The caller's iterator, of either sort.
            limit_bytes: How much is kept.
        """
        self.buffer = ReplayBuffer(limit_bytes)
        self._plain: Iterator[Any] | None = None
        self._async: AsyncIterable[Any] | None = None
        if isinstance(given, AsyncIterable):
            self._async = given
        else:
            self._plain = iter(given)
        self._replay: _Replay | None = None
        self._reader: asyncio.Task[None] | None = None
        self._wanted = Signal()
        self._error: BaseException | None = None

    @property
    def is_plain(self) -> bool:
        """Whether all of it can be read without waiting."""
        return self._plain is not None

    @property
    def is_known(self) -> bool:
        """Whether all requests were read, and kept."""
        return self.buffer.complete and self.buffer.whole

    @property
    def is_over(self) -> bool:
        """Whether reading on is of no use: all was read, or too much to keep."""
        return self.buffer.complete or not self.buffer.whole

    def replay(self) -> _Replay:
        """What the next attempt sends; older ones end."""
        if self._replay is not None:
            self._replay.retire()
        self._replay = _Replay(self)
        return self._replay

    async def read_rest(self) -> None:
        """Read and keep the rest; stops when it has become too much."""
        async for _ in self.replay():
            if not self.buffer.whole:
                return

    def read_plain_rest(self) -> None:
        """The same, of a plain iterator."""
        self.replay()
        while self._error is None and not self.is_over:
            self._read_plain()

    def close(self) -> None:
        """Read no more: the call has ended."""
        if self._reader is not None:
            self._reader.cancel()
        if self._replay is not None:
            self._replay.retire()

    # --- Between the caller's iterator and an attempt's ---

    def check(self) -> bool:
        """Whether the caller's iterator has ended.

        Raises:
            BaseException: What it raised.
        """
        if self._error is not None:
            raise self._error
        return self.buffer.complete

    def want(self) -> None:
        """Get one more message for the newest attempt: now, or soon."""
        if self._plain is not None:
            self._read_plain()
        elif self._async is not None and self._reader is None:
            self._reader = asyncio.get_running_loop().create_task(self._read_all(self._async))
        else:
            self._wanted.notify()

    def _add(self, message: object) -> None:
        self.buffer.add(message)
        if self._replay is not None:
            self._replay.give(message)

    def _end(self, error: BaseException | None) -> None:
        self._error = error
        self.buffer.complete = error is None
        if self._replay is not None:
            self._replay.wake()

    def _read_plain(self) -> None:
        assert self._plain is not None  # noqa: S101 - for mypy
        try:
            message = next(self._plain)
        except StopIteration:
            self._end(None)
        except Exception as error:  # noqa: BLE001 - raised again where grpc reads
            self._end(error)
        else:
            self._add(message)

    async def _read_all(self, source: AsyncIterable[Any]) -> None:
        try:
            async for message in source:
                self._add(message)
                await self._wanted.wait()
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - raised where grpc reads
            self._end(error)  # if `close` has canceled it, nothing waits
        else:
            self._end(None)


class _Replay:
    """What one attempt sends. An asynchronous iterator."""

    def __init__(self, requests: RequestStream) -> None:
        self._requests = requests
        self._ready: deque[Any] = deque(requests.buffer.messages)
        self._live = True
        self._came = Signal()

    def give(self, message: object) -> None:
        self._ready.append(message)
        self._came.notify()

    def wake(self) -> None:
        self._came.notify()

    def retire(self) -> None:
        """End: the attempt is over, or the whole call."""
        self._live = False
        self._ready.clear()
        self._came.notify()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        while self._live:
            if self._ready:
                return self._ready.popleft()
            if self._requests.check():
                break
            self._requests.want()
            if not self._ready and not self._requests.check():
                await self._came.wait()
        raise StopAsyncIteration
