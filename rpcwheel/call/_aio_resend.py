"""The delivery of a parked call on an event loop."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

import grpc

from rpcwheel._grpc.aio_relay import BLURRED, STATUS_LOOKS_S, blurred, failure_of
from rpcwheel._grpc.details import with_attempt

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from rpcwheel._grpc.details import Metadata
    from rpcwheel.rpc import Kind

__all__ = ["Resend"]


class Resend:
    """Makes a parked call again, in a plain try. Called by failback with the call's requests."""

    __slots__ = ("_kind", "_metadata", "_number", "_start", "_timeout", "label")

    def __init__(
        self,
        method: str,
        kind: Kind,
        start: Callable[[Any, float, Metadata], Awaitable[Any]],
        *,
        timeout: float,
        metadata: Metadata,
        attempts: int,
    ) -> None:
        """Keep what a try is made with.

        Args:
            method: In full.
            kind: Of the call.
            start: Gives a call for the request (or a list of them), the timeout and the metadata.
            timeout: Seconds for each try.
            metadata: Of the caller, as far as it is sent again.
            attempts: How many tries there were.
        """
        self.label = method
        """What failback calls it in events."""
        self._kind = kind
        self._start = start
        self._timeout = timeout
        self._metadata = metadata
        self._number = attempts

    async def __call__(self, *requests: Any) -> Any:
        """Make a try, and wait for its end; raises how it failed."""
        self._number += 1
        request = list(requests) if self._kind.streams_requests else requests[0]
        metadata = with_attempt(self._metadata, self._number)
        call = await self._start(request, self._timeout, metadata)
        if not self._kind.streams_requests:
            return await self._read(call)
        said = _Statuses(call)
        try:
            return await self._read(call)
        except grpc.aio.AioRpcError as error:
            raise (await said.own() if error.details() == BLURRED else None) or error from None

    async def _read(self, call: Any) -> Any:
        if not self._kind.streams_responses:
            return await call
        async for _ in call:
            pass
        return None


class _Statuses:
    """What a try says of its end, which may be first a status made up, then the server's own."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self._own: grpc.aio.AioRpcError | None = None
        call.add_done_callback(self._note)

    def _note(self, call: Any) -> None:
        with contextlib.suppress(Exception):  # a foreign call's; what is raised is told by `_read`
            failure = failure_of(call)
            if isinstance(failure, grpc.aio.AioRpcError) and not blurred(call):
                self._own = self._own or failure

    async def own(self) -> grpc.aio.AioRpcError | None:
        """The server's, if it comes in time."""
        for delay_s in STATUS_LOOKS_S:
            self._note(self._call)
            if self._own is not None:
                break
            await asyncio.sleep(delay_s)
        return self._own
