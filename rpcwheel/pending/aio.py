"""Pending calls for coroutines, with the same names as in `sync.py`.

The future is an `asyncio.Future` of the loop on which the call was opened. The transport may run on
another thread: a call that ends there ends soon on its loop.
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
    """The future of a pending call. Created by `PendingCalls.open`, and ended by its table.

    An `asyncio.Future`: callbacks run on its loop, and it is not thread-safe. If a task is canceled
    while it awaits the future, the call is canceled.
    """

    def __init__(self, calls: PendingTable[Any, Any], key: Hashable) -> None:
        """Create a future. Called by `PendingCalls.open`; an event loop must be running."""
        super().__init__(loop=asyncio.get_running_loop())
        self._calls = calls
        self._key = key

    def cancel(self, msg: Any | None = None) -> bool:
        """Cancel the call: removes it and its timeout at once. The server does not learn of it.

        Returns:
            Whether this call canceled it; False, and nothing changes, if it has ended, perhaps a
            moment ago on another thread.
        """
        return self._calls.withdraw(self._key, self) and super().cancel(msg)


class PendingCalls(PendingTable[CallFuture[V], V]):
    """The pending calls of a transport, by key (Dubbo `DefaultFuture`).

    For type checkers: `PendingCalls[bytes]` is one whose responses are bytes.

    `open` must be called on an event loop, everything else may be called on any thread.

    Example::

        calls = PendingCalls()

        async def call(request: bytes) -> bytes:
            future = calls.open(key := next(ids), timeout=2.0, connection=writer)
            writer.write(frame(key, request))
            await writer.drain()
            calls.sent(key)
            return await future

        async def read() -> None:                 # in a task of the transport
            async for key, response in frames(reader):
                calls.received(key, response)
            calls.lost(writer, ConnectionError("the server closed the connection"))
    """

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def _new_future(self, key: Hashable) -> CallFuture[V]:
        return CallFuture(self, key)

    def _end(
        self,
        future: CallFuture[V],
        value: object,
        error: BaseException | None,
        *,
        may_run_callbacks: bool,
    ) -> None:
        del may_run_callbacks  # callbacks always run on the future's loop
        loop = future.get_loop()
        if running_loop() is loop:
            _end_on_loop(future, value, error)
        else:
            call_on_loop(loop, _end_on_loop, future, value, error)


def _end_on_loop(future: CallFuture[Any], value: object, error: BaseException | None) -> None:
    if future.done():  # the user has ended it, which only the table should do
        return
    if error is None:
        future.set_result(value)
    elif isinstance(error, StopIteration):  # asyncio refuses it
        wrapped = RuntimeError("the call failed with StopIteration")
        wrapped.__cause__ = error
        future.set_exception(wrapped)
    else:
        future.set_exception(error)
