"""A call of `grpc.aio` whose status and messages come from other calls, its attempts.

The caller holds a `Relay` while the attempts of the call begin and end. The relay forwards to the
attempt that runs (`begin`), to none between two of them (`pause`), and at last to the finished call
that is its end (`finish`): the last attempt itself wherever possible. What follows a failed attempt
is decided by a subclass, in `_attempt_failed`.

Everything runs on the loop, and nothing waits in a task of its own, so a loop that is closed leaves
no task behind. The done-callback of an attempt reports its end. A caller that awaits or reads does
so on the attempt itself, and on `_change` while there is none.

Nothing may refer to the relay of a response stream while an attempt runs: a stream that its caller
has dropped is then canceled. (grpc.aio 1.85 intends the same, but each of its calls is in a cycle
of references that Python's collector does not see.) A call with one response runs to its end,
dropped or not, as in grpc.aio.

`AwaitedRelay`, `ReadRelay` and `WrittenRelay` add what the kinds of call differ in.
"""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import grpc

from rpcwheel.events import CallbackFailed, emit

from .aio_finished import (
    CANCELLED,
    CANCELLED_HERE,
    COLLECTED,
    FINISHED,
    OK,
    FinishedCall,
    failed_call,
    finished_call,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Generator

    Callback = Callable[[Any], None]

__all__ = [
    "BLURRED",
    "STATUS_LOOKS_S",
    "AwaitedRelay",
    "NotAtOnceError",
    "ReadRelay",
    "Relay",
    "Signal",
    "WrittenRelay",
    "blurred",
    "cancels_of_task",
    "failure_of",
    "give_up",
    "has_ended",
    "immediately",
]

BLURRED: Final = "Internal error from Core"
"""The details of the status INTERNAL that grpc.aio (1.60 to 1.85) makes up when a request can't be
written any more, though all that has happened may be that the server has ended the call early."""

STATUS_LOOKS_S: Final = tuple(0.001 * 2**look for look in range(9))
"""Delays in seconds between checks whether the server's own status has arrived; 0.5 s in all."""

MIXED: Final = "The iterator and read/write APIs may not be mixed on a single RPC."


# --- Reading the calls of others ---


class NotAtOnceError(Exception):
    """A coroutine had to wait."""


def immediately(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine that has nothing to wait for, such as `code()` of a finished call.

    Raises:
        NotAtOnceError: It had to wait.
        BaseException: What it raised.
    """
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value
    coroutine.close()
    raise NotAtOnceError


def failure_of(call: Any) -> BaseException | None:
    """What awaiting a finished call raises; None if it succeeded.

    Raises:
        NotAtOnceError: It has not ended.
        BaseException: What an interceptor below raised instead of ending the call.
    """
    if isinstance(call, FinishedCall):
        return call.error
    code = immediately(call.code())
    if code is OK:
        return None
    details = immediately(call.details())
    if code is CANCELLED and details in {CANCELLED_HERE, COLLECTED}:
        return asyncio.CancelledError()
    debug = getattr(call, "debug_error_string", None)  # no part of the interface, but all have it
    return grpc.aio.AioRpcError(
        code,
        immediately(call.initial_metadata()),
        immediately(call.trailing_metadata()),
        details,
        None if debug is None else immediately(debug()),
    )


def has_ended(call: Any) -> bool:
    """Whether a call has ended, if only because an interceptor of it raised.

    Before grpcio 1.83 its `done()` raises that too, if it is neither a status nor a cancellation;
    since then it is enough to ask that.
    """
    try:
        return bool(call.done())
    except Exception:  # noqa: BLE001 - `await call` raises it
        return True


def give_up(call: Any) -> bool:
    """Cancel an attempt so that a task that writes to it is woken; False if it had ended.

    A task that waits to write the first request to a call of grpc.aio (1.60 to 1.85) waits for ever
    if the call is canceled before its metadata is sent.
    """
    canceled = bool(call.cancel())
    sent = getattr(call, "_metadata_sent", None)
    if isinstance(sent, asyncio.Event):
        sent.set()
    return canceled


def blurred(call: Any) -> bool:
    """Whether a finished call may still get another status than the one that it has.

    The server's own status arrives an instant before or after the one that gRPC made up. If it
    arrives after, grpc.aio replaces the status but does not call the done-callbacks again (1.85.1).
    """
    return bool(immediately(call.details()) == BLURRED)


def cancels_of_task() -> int:
    """How often the running task was canceled; a task that cleans up after it runs on."""
    task = asyncio.current_task()
    return 0 if task is None else task.cancelling()


class Signal:
    """Wakes all tasks that wait for it, each time it is given. On one loop."""

    __slots__ = ("_waiters",)

    def __init__(self) -> None:
        self._waiters: list[asyncio.Future[None]] = []

    async def wait(self) -> None:
        """Wait until it is given next."""
        waiter = self.waiter()
        try:
            await waiter
        finally:
            self.forget(waiter)

    def waiter(self) -> asyncio.Future[None]:
        """A future that is done when the signal is given next; `forget` it afterwards."""
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        return waiter

    def forget(self, waiter: asyncio.Future[None]) -> None:
        """Drop a waiter."""
        if waiter in self._waiters:
            self._waiters.remove(waiter)

    def give(self) -> None:
        """Wake all that wait now."""
        if self._waiters:
            waiters, self._waiters = self._waiters, []
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_result(None)


# --- The call ---


class Relay(grpc.aio.Call):
    """What all four kinds share."""

    kind: Any
    """Which of the four, a `Kind`."""
    method: Any
    """The method's full name, for events."""

    # Defaults of the class: a call that succeeds sets few of them.
    _attempt: Any = None
    _final: Any = None
    _source: Any = None  # of messages, once there is an end
    _blurred: Any = None  # an attempt whose own status may be still to come
    _looks = 0  # checks so far whether it has come
    _number = 0  # of the attempt that runs, or ran last
    is_awaited = False
    """Whether a caller awaits the attempt that runs: its end comes out of that."""
    _signal: Signal | None = None
    _callbacks: list[Callback] | None = None
    _channel = None  # before grpcio 1.83 no channel can be closed while a call has no such name

    _ends_forgotten = False
    """Whether the call is canceled when its caller has dropped it."""

    handed = False
    """Whether the caller has got something of an attempt: a message, or initial metadata."""

    # --- For subclasses: what they decide ---

    def _attempt_failed(self, call: Any, error: BaseException | None) -> None:
        """Act on an attempt that has not succeeded: finish now or later, or begin another.

        `error` is what it raised, or None: ask the call. Must not raise.
        """
        raise NotImplementedError

    def _release(self) -> None:
        """Free what the call holds: it has ended, or was dropped."""

    def _listen(self, call: object) -> Any:
        """Begin to wait for a message; what is returned has `cancel()`, or is None."""
        return None

    def time_remaining(self) -> float | None:
        """Seconds until the deadline of the whole call."""
        raise NotImplementedError

    # --- For subclasses: what they do ---

    def begin(self, call: Any, *, is_new: bool = False) -> None:
        """Forward to this attempt from now on.

        Args:
            call: The attempt.
            is_new: Whether it was begun right now, and so can't have failed in an interceptor.
        """
        self._attempt = call
        self._number += 1
        if not is_new and has_ended(call):
            self._on_done(call)
        else:
            call.add_done_callback(
                partial(_report_weakly, weakref.ref(self), self._number)
                if self._ends_forgotten
                else partial(_report, [self], self._number)
            )
        if self._signal is not None:
            self._signal.give()

    def pause(self) -> None:
        """Forward to no attempt for now; another will follow."""
        self._attempt = None

    def finish(self, call: Any, source: Any = None) -> None:
        """End as this finished call has ended; only the first end counts.

        Args:
            call: Has the status.
            source: What messages are read from to the end, if it is another: the attempt itself.
        """
        if self._final is not None:
            return
        self._final = call
        self._source = source or call
        self._attempt = None
        self._release()
        if self._signal is not None:
            self._signal.give()
        callbacks, self._callbacks = self._callbacks, None
        for callback in callbacks or ():
            _call_back(callback, self)

    def end(self, call: FinishedCall) -> None:
        """End as this call has, and give up the attempt that runs; nothing if this has ended."""
        running = self._attempt
        self._settle(running)
        if self._final is None:
            self.finish(call)
            if running is not None:
                give_up(running)

    def _settle(self, call: Any) -> None:
        """Act on the end of an attempt that is awaited, before the `await` returns."""
        if self.is_awaited and call is not None and has_ended(call):
            self.is_awaited = False
            self._on_done(call)

    def shows(self, call: object) -> bool:
        """Whether this attempt is the one that runs."""
        return call is self._attempt

    def _was_given_up(self, call: object, cancels: int) -> bool:
        """Whether a `CancelledError` that came out of this attempt is only our own.

        Args:
            call: The attempt.
            cancels: What `cancels_of_task()` was before it was waited for. If it is more now, the
                task of the caller was canceled.
        """
        if call is self._final or call is self._source or call is self._attempt:
            return False
        return cancels_of_task() <= cancels

    def attempt_ended(self, number: int) -> bool:
        """Note that this attempt has ended; False if its status may still change.

        By its number: what grpc.aio (1.85) makes of another interceptor's generator has the
        callbacks called with the call below it.
        """
        if self.is_awaited or number != self._number or self._attempt is None:
            return True  # `AwaitedRelay` acts on it, or it was superseded
        return self._on_done(self._attempt)

    def _on_done(self, call: Any) -> bool:
        """Act on the end of the attempt that runs; False if its status may still change."""
        try:
            succeeded = immediately(call.code()) is OK
            if not succeeded and self._waits_for_status(call):
                return False
        except BaseException as error:  # noqa: BLE001 - an interceptor's below; the caller gets it
            self._attempt_failed(call, error)
            return True
        if succeeded:
            self.finish(call)
        else:
            self._attempt_failed(call, None)
        return True

    def _waits_for_status(self, call: Any) -> bool:
        """Whether to wait for the server's own status, because gRPC made the first one up.

        grpc.aio calls the done-callbacks for the first status only (1.85.1), so this schedules
        another check.
        """
        if not self.kind.streams_requests or not blurred(call):
            return False
        if self._blurred is not call:
            self._blurred, self._looks = call, 0
        if self._looks == len(STATUS_LOOKS_S):
            return False
        look_again = partial(_report_weakly, weakref.ref(self), self._number)
        asyncio.get_running_loop().call_later(STATUS_LOOKS_S[self._looks], look_again)
        self._looks += 1
        return True

    async def _change(self) -> None:
        """Wait for the next attempt, or the end."""
        if self._signal is None:
            self._signal = Signal()
        await self._signal.wait()

    def _broke(self, call: Any, error: BaseException) -> None:
        """Act on what came out of an attempt that has not reported an end (a foreign one's)."""
        if call is not None and call is self._attempt:
            if not isinstance(error, grpc.RpcError):
                call.cancel()
                self.finish(failed_call(self.kind, error))
            elif not has_ended(call):
                self._attempt_failed(call, error)

    # --- For the caller ---

    def cancelled(self) -> bool:
        return self._final is not None and bool(self._final.cancelled())

    def done(self) -> bool:
        return self._final is not None

    def cancel(self) -> bool:
        call = self._attempt
        self._settle(call)
        if self._final is not None:
            return False
        if call is not None and not has_ended(call):
            return give_up(call)  # its done-callback finishes us
        self.finish(finished_call(self.kind, CANCELLED, CANCELLED_HERE))
        return True

    def add_done_callback(self, callback: Callback) -> None:
        """Have `callback(call)` called on the loop when the call has ended, at once if it has.

        If it raises, that is an event `CallbackFailed` and nothing else. (A call of grpc.aio 1.85
        raises it in `await call`.)
        """
        if self._final is not None:
            _call_back(callback, self)
        elif self._callbacks is None:
            self._callbacks = [callback]
        else:
            self._callbacks.append(callback)

    async def initial_metadata(self) -> Any:
        while self._final is None:
            call = self._attempt
            if call is None:
                await self._change()
                continue
            metadata = await call.initial_metadata()
            if call is self._attempt and not has_ended(call):
                self.handed = self.handed or bool(metadata)
                return metadata
            if call is self._attempt:
                await self._change()  # it is being decided what follows
        return await self._final.initial_metadata()

    async def trailing_metadata(self) -> Any:
        return await (await self._end()).trailing_metadata()

    async def code(self) -> grpc.StatusCode:
        code: grpc.StatusCode = await (await self._end()).code()
        return code

    async def details(self) -> Any:
        return await (await self._end()).details()

    async def debug_error_string(self) -> Any:
        debug = getattr(await self._end(), "debug_error_string", None)
        return None if debug is None else await debug()

    async def wait_for_connection(self) -> None:
        while True:
            call = self._final or self._attempt
            if call is None:
                await self._change()
                continue
            cancels = cancels_of_task()
            try:
                await call.wait_for_connection()
            except asyncio.CancelledError:
                if not self._was_given_up(call, cancels):
                    raise
            except grpc.RpcError:
                if call is self._final:
                    raise
                if call is self._attempt:
                    await self._change()
            else:
                return

    async def _end(self) -> Any:
        while self._final is None:
            await self._change()
        return self._final


def _call_back(callback: Callback, call: Relay) -> None:
    try:
        callback(call)
    except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - reported as an event
        name = getattr(callback, "__qualname__", None) or repr(callback)
        emit(CallbackFailed(call.method, name, error))


def _report(relays: list[Relay], number: int, _: object) -> None:
    """Report the end of an attempt, then drop the relay: calls keep their callbacks."""
    if relays and (relays[0].is_awaited or relays[0].attempt_ended(number)):
        relays.clear()


def _report_weakly(relay: weakref.ref[Relay], number: int, _: object = None) -> None:
    alive = relay()
    if alive is not None:
        alive.attempt_ended(number)


# --- What the kinds differ in ---


class AwaitedRelay(Relay):
    """One response.

    If the only response of a unary call is awaited, its end comes out of the `await` and not from
    the done-callback: to ask a successful call for its code takes longer than the rest of a relay.
    """

    def __await__(self) -> Generator[Any, None, Any]:
        try:
            while True:
                call = self._final or self._attempt
                if call is None:
                    yield from self._change().__await__()
                    continue
                task = asyncio.current_task()
                cancels = 0 if task is None else task.cancelling()  # `cancels_of_task`
                self.is_awaited = not self.kind.streams_requests
                try:
                    response = yield from call.__await__()
                except asyncio.CancelledError:
                    if not (self._was_given_up(call, cancels) or self._has_status(call, cancels)):
                        raise
                    yield from self._until_decided(call)
                except Exception as error:
                    self._has_raised(call, error)
                    yield from self._until_decided(call)
                    if call is self._final:
                        raise
                else:
                    self.is_awaited = False
                    self.finish(call)
                    if call is self._final:
                        return response
        except asyncio.CancelledError as error:
            self._has_raised(self._attempt, error)
            self.cancel()
            raise

    def _has_raised(self, call: Any, error: BaseException) -> None:
        self.is_awaited = False
        if call is not None and call is self._attempt and has_ended(call):
            self._on_done(call)
        self._broke(call, error)

    def _has_status(self, call: object, cancels: int) -> bool:
        """Whether a `CancelledError` that came out of this attempt is not how the attempt ended.

        grpc.aio (1.85) cancels the task that awaits a call when a request can't be written any
        more, also if the call has a status by then. Arguments as of `_was_given_up`.
        """
        if call is self._final or cancels_of_task() > cancels:
            return False
        return bool(self.kind.streams_requests) and has_ended(call)

    def _until_decided(self, call: Any) -> Generator[Any, None, None]:
        """Wait until it is decided what follows an attempt that has ended."""
        while call is self._attempt:
            yield from self._change().__await__()


class ReadRelay(Relay):
    """Any number of responses."""

    _ends_forgotten = True
    _unread: Any = None
    _unread_of: Any = None
    _iterator: AsyncIterator[Any] | None = None
    _reads = False
    _over = False

    def __del__(self) -> None:
        if self._attempt is not None:
            with contextlib.suppress(RuntimeError):  # its loop is closed
                self._attempt.cancel()
            self._release()

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
                call = self._source or self._attempt
                if call is None:
                    await self._change()
                    continue
                try:
                    message = await self._receive(call)
                except Exception as error:  # noqa: BLE001 - raised if nothing follows
                    self._broke(call, error)
                    # It is being decided what follows. A retry that was decided may yet be given
                    # up: then the iterator of this attempt would only say that it is at its end.
                    while call is self._attempt or (self._attempt is None and self._source is None):
                        await self._change()
                    if call is self._source:
                        raise self._failure_of(error) from None
                    continue
                if call is self._source or call is self._attempt:
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
        """The error of the end, where it is another than what the attempt has raised."""
        own = self._final.error if isinstance(self._final, FinishedCall) else None
        return error if own is None else own

    async def _receive(self, call: Any) -> Any:
        if call is not self._unread_of:
            self._unread_of, self._unread = call, call.__aiter__()
        listening, cancels = self._listen(call), cancels_of_task()
        try:
            return await self._unread.__anext__()
        except StopAsyncIteration:
            return grpc.aio.EOF
        except asyncio.CancelledError:
            if not self._was_given_up(call, cancels):
                raise
            return None
        finally:
            if listening is not None:
                listening.cancel()


class WrittenRelay(Relay):
    """Requests that the caller may write, to the attempt that runs."""

    @property
    def _done_writing_flag(self) -> bool:
        """What grpc.aio (1.85) asks of whatever an interceptor returns."""
        return bool(getattr(self._final or self._attempt, "_done_writing_flag", False))

    async def write(self, request: object) -> None:
        await self._of_the_attempt("write", request)

    async def done_writing(self) -> None:
        """Tell the server that there are no more requests. Idempotent."""
        await self._of_the_attempt("done_writing")

    async def _of_the_attempt(self, name: str, *args: object) -> None:
        """Have the attempt do it: the one that runs, or the one that takes its place."""
        while True:
            call, cancels = self._final or self._attempt, cancels_of_task()
            if call is None:
                await self._change()
                continue
            try:
                await getattr(call, name)(*args)
            except (Exception, asyncio.CancelledError):
                if not self._was_given_up(call, cancels):
                    raise
                self._raise_end()
            else:
                return

    def _raise_end(self) -> None:
        """Raise that the call ended while a request was to be written, as grpc.aio does."""
        if self._final is not None:
            failure = failure_of(self._final)
            raise (
                failure
                if isinstance(failure, grpc.RpcError)
                else asyncio.InvalidStateError(FINISHED)
            )
