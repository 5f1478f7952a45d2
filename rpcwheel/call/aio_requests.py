"""A request stream of `grpc.aio` that is read once and may be sent by several attempts.

Each attempt has its own iterator, which returns the messages of the buffer and then new ones. Only
the newest iterator reads new messages, so an earlier attempt that still waits does not consume any.
A task reads the user's asynchronous iterator, one message at a time when an attempt needs one: if
the attempt itself called the user's `__anext__`, canceling the attempt would lose a message or end
a generator. A plain iterator is read directly on the loop, as grpc.aio does.
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


class RequestStream:
    """The requests of one call, from an iterator of the user."""

    def __init__(self, requests: Any, limit_bytes: int) -> None:
        """Make the stream from a plain or asynchronous iterator; reads nothing yet."""
        self.buffer = ReplayBuffer(limit_bytes)
        self._plain: Iterator[Any] | None = None
        self._async: AsyncIterable[Any] | None = None
        if isinstance(requests, AsyncIterable):
            self._async = requests
        else:
            self._plain = iter(requests)
        self._replay: _Replay | None = None
        self._reader: asyncio.Task[None] | None = None
        self._wanted = Signal()

    def replay(self) -> _Replay:
        """Return the iterator of a new attempt. Those of earlier attempts end."""
        if self._replay is not None:
            self._replay.end()
        self._replay = _Replay(self)
        return self._replay

    async def read_rest(self) -> None:
        """Read the rest into the buffer; stops if the buffer overflows."""
        async for _ in self.replay():
            if not self.buffer.whole:
                return
            await asyncio.sleep(0)  # a plain iterator is read without waiting

    def close(self) -> None:
        """Stop reading: the call has ended."""
        if self._reader is not None:
            self._reader.cancel()
        if self._replay is not None:
            self._replay.end()
            self._replay = None  # it has this object
        self.buffer.drop()  # grpc.aio may keep the call until the garbage collector runs

    # --- For the iterators of attempts ---

    def has_ended(self) -> bool:
        """Whether the caller's iterator has ended.

        Raises:
            BaseException: Whatever it raised.
        """
        if self.buffer.error is not None:
            raise self.buffer.error
        return self.buffer.complete

    def read_one(self) -> None:
        """Read one more message for the newest attempt: now, or in the task that reads."""
        if self._plain is not None:
            self._read_plain(self._plain)
        elif self._async is not None and self._reader is None:
            self._reader = asyncio.get_running_loop().create_task(self._read_all(self._async))
        else:
            self._wanted.notify()

    def _add(self, message: object) -> None:
        self.buffer.add(message)
        if self._replay is not None:
            self._replay.add(message)

    def _end(self, error: BaseException | None) -> None:
        self.buffer.error = error
        self.buffer.complete = error is None
        if self._replay is not None:
            self._replay.wake()

    def _read_plain(self, plain: Iterator[Any]) -> None:
        try:
            message = next(plain)
        except StopIteration:
            self._end(None)
        except Exception as error:  # noqa: BLE001 - raised again in `has_ended`
            self._end(error)
        else:
            self._add(message)

    async def _read_all(self, source: AsyncIterable[Any]) -> None:
        try:
            async for message in source:
                self._add(message)
                await self._wanted.wait()
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - raised in `has_ended`
            self._end(error)
        else:
            self._end(None)


class _Replay:
    """The requests of one attempt; an asynchronous iterator."""

    def __init__(self, requests: RequestStream) -> None:
        self._requests = requests
        self._ready: deque[Any] = deque(requests.buffer.messages)
        self._is_newest = True
        self._changed = Signal()

    def add(self, message: object) -> None:
        self._ready.append(message)
        self._changed.notify()

    def wake(self) -> None:
        self._changed.notify()

    def end(self) -> None:
        """End: there is a newer attempt, or the call has ended."""
        self._is_newest = False
        self._ready.clear()
        self._changed.notify()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        while self._is_newest:
            if self._ready:
                return self._ready.popleft()
            if self._requests.has_ended():
                break
            self._requests.read_one()
            if not self._ready and not self._requests.has_ended():
                await self._changed.wait()
        raise StopAsyncIteration
