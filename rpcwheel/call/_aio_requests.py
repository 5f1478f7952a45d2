"""A request stream that is read once and may be sent several times, on an event loop.

Each try gets a feed of its own: first what was recorded, then what comes. Only the newest feed
asks for more and gets it, so an older try that still waits takes nothing away. An asynchronous
iterator is read by a task of its own, when a feed asks for more: cancelling a try must not cancel
the user's `__anext__`, which would lose a message or end a generator for good. A plain iterator is
read as grpc.aio reads it, on the loop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterable
from typing import TYPE_CHECKING, Any, Self

from rpcwheel._grpc.aio_relay import Signal

from .replay import Recording

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rpcwheel._grpc.aio_relay import Relay

__all__ = ["Requests"]


class Requests:
    """The requests of one call."""

    def __init__(self, given: Any, limit_bytes: int) -> None:
        """Begin, without reading anything.

        Args:
            given: The caller's iterator, of either sort; None if it will `write`.
            limit_bytes: How much is kept.
        """
        self.recording = Recording(limit_bytes)
        self.iterates = given is not None
        self._plain: Iterator[Any] | None = None
        self._async: AsyncIterable[Any] | None = None
        if isinstance(given, AsyncIterable):
            self._async = given
        elif given is not None:
            self._plain = iter(given)
        self._feed: _Feed | None = None
        self._pump: asyncio.Task[None] | None = None
        self._wanted = Signal()
        self._moved = Signal()  # a message was taken, or the call has ended
        self._error: BaseException | None = None

    @property
    def complete(self) -> bool:
        """Whether there are no more to come."""
        return self.recording.complete

    @property
    def known(self) -> bool:
        """Whether all of them were read, and kept."""
        return self.recording.complete and self.recording.whole

    @property
    def is_plain(self) -> bool:
        """Whether all of it can be read without waiting."""
        return self._plain is not None

    def feed(self) -> _Feed:
        """What the next try sends; older feeds end."""
        if self._feed is not None:
            self._feed.retire()
        self._feed = _Feed(self)
        return self._feed

    async def drain(self) -> None:
        """Read and record the rest; stops when it has become too much."""
        async for _ in self.feed():
            if not self.recording.whole:
                return

    def drain_plain(self) -> None:
        """The same, of a plain iterator."""
        self.feed()
        while self._error is None and self.recording.whole and not self.complete:
            self._read_plain()

    def close(self) -> None:
        """Read no more: the call has ended."""
        if self._pump is not None:
            self._pump.cancel()
        if self._feed is not None:
            self._feed.retire()
        self._moved.give()

    # --- For a caller that writes ---

    async def write(self, message: object, relay: Relay) -> None:
        """Send a message with the try that runs, or with the next; waits until it is taken."""
        self._arrived(message)
        while not relay.done() and (self._feed is None or self._feed.behind):
            await self._moved.wait()

    def done_writing(self) -> None:
        """There are no more."""
        self._end(None)

    # --- Between the source and the feed ---

    def _arrived(self, message: object) -> None:
        self.recording.add(message)
        if self._feed is not None:
            self._feed.give(message)

    def _end(self, error: BaseException | None) -> None:
        self._error = error
        self.recording.complete = error is None
        if self._feed is not None:
            self._feed.wake()

    def taken(self) -> None:
        """A feed has handed a message on."""
        self._moved.give()

    def check(self) -> bool:
        """Whether the source has ended.

        Raises:
            BaseException: What it ended with, if the user's iterator raised.
        """
        if self._error is not None:
            raise self._error
        return self.complete

    def want(self) -> None:
        """Get one more message for the newest feed: now, or soon."""
        if self._plain is not None:
            self._read_plain()
        elif self._async is not None and self._pump is None:
            self._pump = asyncio.get_running_loop().create_task(self._read_all(self._async))
        else:
            self._wanted.give()

    def _read_plain(self) -> None:
        assert self._plain is not None  # noqa: S101 - for mypy
        try:
            message = next(self._plain)
        except StopIteration:
            self._end(None)
        except Exception as error:  # noqa: BLE001 - raised again where grpc reads
            self._end(error)
        else:
            self._arrived(message)

    async def _read_all(self, source: AsyncIterable[Any]) -> None:
        try:
            async for message in source:
                self._arrived(message)
                await self._wanted.wait()
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - raised where grpc reads
            self._end(error)  # if it was we who cancelled, nobody listens
        else:
            self._end(None)


class _Feed:
    """What one try sends. An asynchronous iterator."""

    def __init__(self, requests: Requests) -> None:
        self._requests = requests
        self._ready: deque[Any] = deque(requests.recording.messages)
        self._live = True
        self._came = Signal()

    @property
    def behind(self) -> bool:
        """Whether there are messages that the try has not taken yet."""
        return self._live and bool(self._ready)

    def give(self, message: object) -> None:
        self._ready.append(message)
        self._came.give()

    def wake(self) -> None:
        self._came.give()

    def retire(self) -> None:
        """End: the try is over, or the whole call."""
        self._live = False
        self._ready.clear()
        self._came.give()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        while self._live:
            if self._ready:
                message = self._ready.popleft()
                self._requests.taken()
                return message
            if self._requests.check():
                break
            self._requests.want()
            if not self._ready and not self._requests.check():
                await self._came.wait()
        raise StopAsyncIteration
