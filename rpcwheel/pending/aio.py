"""Pending calls for coroutines: the twin of `sync.py`, with the same names.

The future is an `asyncio.Future` of the loop on which the call was opened. The transport may be
anywhere: what ends a call on another thread ends it soon on that loop.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Self, TypeVar

from rpcwheel._concurrency.loop import call_on_loop, running_loop

from .table import PendingTable, V

if TYPE_CHECKING:
    from collections.abc import Hashable

__all__ = ["CallFuture", "PendingCalls"]

T = TypeVar("T")


class CallFuture(asyncio.Future[T]):
    """The answer to a pending call, to await. Made by `PendingCalls.open`, ended by its table.

    An `asyncio.Future` in every respect: callbacks run on its loop, and it is not thread-safe. A
    task that is cancelled while it awaits the call cancels the call.
    """

    def __init__(self, calls: PendingTable[Any, Any], key: Hashable, number: int) -> None:
        """For `PendingCalls.open`; a loop must be running."""
        super().__init__(loop=asyncio.get_running_loop())
        self._calls = calls
        self._key = key
        self._number = number

    def cancel(self, msg: Any | None = None) -> bool:
        """Give the call up: its entry and its timeout are gone at once. The peer is not told.

        Returns:
            Whether this has cancelled it; False if it had ended, or another thread has just ended
            it. Then nothing changes.
        """
        return self._calls.withdraw(self._key, self._number) and super().cancel(msg)


class PendingCalls(PendingTable[CallFuture[V], V]):
    """The calls of a transport that wait for their answers, by key (Dubbo `DefaultFuture`).

    `PendingCalls[bytes]` says for type checkers what the answers are.

    `open` must be called on a loop, everything else may be called from any thread.

    Example::

        calls = PendingCalls()

        async def call(request: bytes) -> bytes:
            future = calls.open(key := next(ids), timeout=2.0, connection=writer)
            writer.write(frame(key, request))
            await writer.drain()
            calls.sent(key)
            return await future

        async def read() -> None:                 # in a task of the transport's
            async for key, answer in frames(reader):
                calls.received(key, answer)
            calls.lost(writer, ConnectionError("the server has gone"))
    """

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def _future(self, key: Hashable, number: int) -> CallFuture[V]:
        return CallFuture(self, key, number)

    def _end(
        self, future: CallFuture[V], value: object, error: BaseException | None, *, here: bool
    ) -> None:
        del here  # callbacks run on the future's loop, always
        loop = future.get_loop()
        if running_loop() is loop:
            _conclude(future, value, error)
        else:
            call_on_loop(loop, _conclude, future, value, error)


def _conclude(future: CallFuture[Any], value: object, error: BaseException | None) -> None:
    if future.done():  # the user has set it, against all custom
        return
    if error is None:
        future.set_result(value)
    elif isinstance(error, StopIteration):  # asyncio takes none: it would end the awaiting
        wrapped = RuntimeError("the call failed with StopIteration")
        wrapped.__cause__ = error
        future.set_exception(wrapped)
    else:
        future.set_exception(error)
