"""The four kinds of a call that is answered by other calls; see `aio_relay`."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any, Final

import grpc

from rpcwheel.rpc import Kind

from .aio_calls import FINISHED, Ended, failure_of, has_ended
from .aio_relay import Relay, cancels_of_task

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Generator

    from .aio_relay import Conductor

__all__ = ["relay_of"]

MIXED: Final = "The iterator and read/write APIs may not be mixed on a single RPC."
HALF_CLOSED: Final = 'RPC is half closed after calling "done_writing".'


class _Awaited(Relay):
    """One response."""

    _tells_once = False
    """Whether a try that has ended has its status for good, so that to await it is enough."""

    def __await__(self) -> Generator[Any, None, Any]:
        try:
            while True:
                call = self._final or self._try
                if call is None:
                    yield from self._change().__await__()
                    continue
                self._awaited = self._tells_once
                cancels = cancels_of_task()
                try:
                    response = yield from call.__await__()
                except asyncio.CancelledError:
                    if not (self.was_given_up(call, cancels) or self._has_status(call, cancels)):
                        raise
                    yield from self._until_decided(call)
                except Exception as error:
                    self._ended(call, error)
                    yield from self._until_decided(call)
                    if call is self._final:
                        raise
                else:
                    if self._answers(call):
                        return response
        except asyncio.CancelledError as error:
            self._ended(self._try, error)
            self.cancel()
            raise

    def _has_status(self, call: object, cancels: int) -> bool:
        """Whether a `CancelledError` that came out of this try is not how the try has ended.

        grpc.aio (1.85) cancels whoever awaits a call when a request can't be written any more, also
        if the call has a status by then. Arguments as of `was_given_up`.
        """
        if call is self._final or cancels_of_task() > cancels:
            return False
        return self._conductor.kind.streams_requests and has_ended(call)

    def _answers(self, call: object) -> bool:
        """End with a try that has its response, unless there is another end."""
        self._awaited = False
        if self._final is None:
            self.finish(call)
        return call is self._final

    def _until_decided(self, call: Any) -> Generator[Any, None, None]:
        """Wait until it is decided what follows a try that has ended."""
        while call is self._try:
            yield from self._change().__await__()

    def _ended(self, call: Any, error: BaseException) -> None:
        """Do what was left to us when the try ended."""
        self._awaited = False
        if call is not None and call is self._try and has_ended(call):
            self._on_done(call)
        self._broke(call, error)


class _Read(Relay):
    """Any number of responses."""

    _ends_forgotten = True

    def __init__(self, conductor: Conductor) -> None:
        super().__init__(conductor)
        self._unread: Any = None
        self._unread_of: Any = None
        self._iterator: AsyncIterator[Any] | None = None
        self._reads = False
        self._over = False

    def __del__(self) -> None:
        if getattr(self, "_try", None) is not None:
            with contextlib.suppress(RuntimeError):  # its loop is closed
                self._try.cancel()
            self._conductor.finished()

    def __aiter__(self) -> AsyncIterator[Any]:
        if self._reads:
            raise grpc.aio.UsageError(MIXED)
        if self._iterator is None:
            self._iterator = self._iterate()
        return self._iterator

    async def read(self) -> Any:
        if self._over:
            failure = None if self._final is None else failure_of(self._final)
            if failure is not None:
                raise failure
            return grpc.aio.EOF
        if self._iterator is not None and self._final is None:
            raise grpc.aio.UsageError(MIXED)
        self._reads = True
        return await self._next()

    async def _iterate(self) -> AsyncIterator[Any]:
        while (message := await self._next()) is not grpc.aio.EOF:
            yield message

    async def _next(self) -> Any:
        """The next message, or EOF; raises how the call has failed."""
        try:
            while True:
                call = self._source or self._try
                if call is None:
                    await self._change()
                    continue
                try:
                    message = await self._receive(call)
                except Exception as error:  # noqa: BLE001 - raised if nothing follows
                    self._broke(call, error)
                    # It is being decided what follows. A retry that was decided may yet be given
                    # up: then the iterator of this attempt would only say that it is at its end.
                    while call is self._try or (self._try is None and self._source is None):
                        await self._change()
                    if call is self._source:
                        raise self._failure_of(error) from None
                    continue
                if call is self._source or call is self._try:
                    self._over = message is grpc.aio.EOF
                    self.handed = self.handed or not self._over
                    return message
        except asyncio.CancelledError:
            self._over = True
            self.cancel()
            raise
        except Exception:
            self._over = True
            raise

    def _failure_of(self, error: Exception) -> BaseException:
        """What the end says, where it is another than what the try has raised."""
        own = self._final.error if isinstance(self._final, Ended) else None
        return error if own is None else own

    async def _receive(self, call: Any) -> Any:
        if call is not self._unread_of:
            self._unread_of, self._unread = call, call.__aiter__()
        listening, cancels = self._conductor.listen(self, call), cancels_of_task()
        try:
            return await self._unread.__anext__()
        except StopAsyncIteration:
            return grpc.aio.EOF
        except asyncio.CancelledError:
            if not self.was_given_up(call, cancels):
                raise
            return None
        finally:
            if listening is not None:
                listening.cancel()


class _Written(Relay):
    """Requests that the caller may write."""

    moves = False
    """Whether another try may follow though no requests are kept: as none was taken by the one
    before, whoever was about to write does so with the next."""

    @property
    def _done_writing_flag(self) -> bool:
        """What grpc.aio (1.85) asks of whatever an interceptor returns."""
        requests = self._conductor.requests
        if requests is not None:
            return requests.complete
        return bool(getattr(self._final or self._try, "_done_writing_flag", False))

    async def write(self, request: object) -> None:
        requests = self._conductor.requests
        if requests is None:
            await self._of_the_try("write", request)
            return
        if requests.iterates:
            raise grpc.aio.UsageError(MIXED)
        if self._final is not None:
            raise asyncio.InvalidStateError(FINISHED)
        if requests.complete:
            raise asyncio.InvalidStateError(HALF_CLOSED)
        try:
            await requests.write(request, self)
        except asyncio.CancelledError:
            self.cancel()
            raise
        self._raise_end()

    async def _of_the_try(self, name: str, *args: object) -> None:
        """Have the try itself do it: the one that runs, or the one that takes its place."""
        while True:
            call, cancels = self._final or self._try, cancels_of_task()
            if call is None:
                await self._change()
                continue
            try:
                await getattr(call, name)(*args)
            except (Exception, asyncio.CancelledError) as error:
                if self.moves and isinstance(error, Exception):
                    await self._decided(call, name)
                if not self.was_given_up(call, cancels):
                    raise
                self._raise_end()
            else:
                self.handed = self.handed or self.moves  # a try has taken it
                return

    async def _decided(self, call: Any, name: str) -> None:
        """Wait until it is decided what follows, if this try has ended."""
        if has_ended(call) or name == "done_writing":  # which fails for no other reason
            while call is self._try:
                await self._change()

    def _raise_end(self) -> None:
        """Say that the call ended while a request was to be written, as grpc.aio does."""
        if self._final is None:
            return
        failure = failure_of(self._final)
        if isinstance(failure, grpc.RpcError):
            raise failure
        raise asyncio.InvalidStateError(FINISHED)

    async def done_writing(self) -> None:
        """Tell the server that there are no more requests. Idempotent."""
        requests = self._conductor.requests
        if requests is None:
            await self._of_the_try("done_writing")
            return
        if requests.iterates:
            raise grpc.aio.UsageError(MIXED)
        requests.done_writing()


class _UnaryUnary(_Awaited, grpc.aio.UnaryUnaryCall[Any, Any]):
    _tells_once = True


class _UnaryStream(_Read, grpc.aio.UnaryStreamCall[Any, Any]):
    pass


class _StreamUnary(_Written, _Awaited, grpc.aio.StreamUnaryCall[Any, Any]):
    pass


class _StreamStream(_Written, _Read, grpc.aio.StreamStreamCall[Any, Any]):
    pass


_RELAYS: Final[dict[Kind, type[Relay]]] = {
    Kind.UNARY_UNARY: _UnaryUnary,
    Kind.UNARY_STREAM: _UnaryStream,
    Kind.STREAM_UNARY: _StreamUnary,
    Kind.STREAM_STREAM: _StreamStream,
}


def relay_of(kind: Kind) -> type[Relay]:
    """What the caller of a call holds; made with its conductor."""
    return _RELAYS[kind]
