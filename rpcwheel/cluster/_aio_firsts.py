"""What the caller of a call sends, as long as the call may still go to another member.

grpc.aio takes the first request of an iterator before it has a connection, and asks for the second
only when the first was written (1.60 to 1.85). So a call that found no connection has taken at most
one, which is kept here for the next try; once the second is asked for, there is no going back.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterable
from typing import TYPE_CHECKING, Any, Final, Self

import grpc

from rpcwheel._grpc.aio_relay import Signal

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

__all__ = ["AsyncFirsts", "Firsts", "as_now", "firsts_of", "sealed"]

UNREAD: Final = object()

LOG: Final = logging.getLogger("grpc._common")
"""Where grpc logs what a serializer raises."""


def sealed(request: Any, serializer: Callable[[Any], bytes]) -> bytes | None:
    """One request as it is sent, be it more than once: its caller may change it afterwards.

    What can't be serialized is None, and is logged, as grpc.aio (1.60 to 1.85) does before it ends
    the call.
    """
    try:
        return serializer(request)
    except Exception:
        LOG.exception("Exception serializing message!")
        return None


def as_now(metadata: Any) -> Any:
    """A copy of what its caller may change afterwards, of the same type where that tells more."""
    return (
        grpc.aio.Metadata(*metadata) if isinstance(metadata, grpc.aio.Metadata) else tuple(metadata)
    )


class Firsts:
    """The requests of a plain iterator."""

    def __init__(self, given: Any) -> None:
        self._source: Iterator[Any] = iter(given)
        self._first: Any = UNREAD
        self.whole = True
        """Whether a try may begin with them: nothing but the first was taken."""

    def feed(self) -> Iterator[Any]:
        """What the next try sends."""
        if self._first is UNREAD:
            self._first = next(self._source, UNREAD)
        if self._first is not UNREAD:
            yield self._first
            self.whole = False
            self._first = None  # it is kept no longer than needed
            yield from self._source

    def close(self) -> None:
        """Nothing: nobody waits for a plain iterator."""


class AsyncFirsts:
    """The requests of an asynchronous iterator.

    A try that has failed may still wait for the first one. The next waits for it to come there, as
    an asynchronous generator can't be asked by two.
    """

    def __init__(self, given: AsyncIterable[Any]) -> None:
        self._source: AsyncIterator[Any] = aiter(given)
        self._first: Any = UNREAD
        self._error: BaseException | None = None
        self._reader: asyncio.Task[Any] | None = None
        self._came = Signal()
        self.whole = True
        """Whether a try may begin with them: nothing but the first was taken."""

    @property
    def _is_coming(self) -> bool:
        return self._first is UNREAD and self._error is None

    def feed(self) -> _Feed:
        """What the next try sends."""
        return _Feed(self)

    async def first(self) -> Any:
        """The first request; raises what the iterator has raised, `StopAsyncIteration` too."""
        if self._reader is None:
            self._reader = asyncio.current_task()
            try:
                self._first = await anext(self._source)
            except BaseException as error:
                self._error = error
                raise
            finally:
                self._came.give()
        while self._is_coming:
            await self._came.wait()
        if self._error is not None:
            raise self._error
        return self._first

    async def further(self) -> Any:
        """The next one, once the first was written."""
        self.whole = False
        self._first = None  # it is kept no longer than needed
        return await anext(self._source)

    def close(self) -> None:
        """The call has ended: who reads the first for a try that has failed need not go on."""
        if self._is_coming and self._reader is not None:
            self._reader.cancel()


class _Feed:
    """What one try sends. An asynchronous iterator."""

    def __init__(self, firsts: AsyncFirsts) -> None:
        self._firsts = firsts
        self._began = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        if self._began:
            return await self._firsts.further()
        self._began = True
        return await self._firsts.first()


def firsts_of(given: Any) -> Firsts | AsyncFirsts:
    """Begin with a caller's iterator, without taking anything."""
    return AsyncFirsts(given) if isinstance(given, AsyncIterable) else Firsts(given)
