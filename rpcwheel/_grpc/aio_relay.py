"""A call of `grpc.aio` whose status and messages come from other calls, its attempts.

The caller holds a `Relay` while the attempts of the call begin and end. The relay forwards to

* the running attempt, after `begin`,
* nothing, between two attempts, after `pause`,
* a call that has ended, after `finish`; this is the last attempt itself wherever possible.

A subclass decides in `_attempt_failed` what follows a failed attempt. `AwaitedRelay`, `ReadRelay`
and `WrittenRelay` add the methods that depend on the kind of call.

All code runs on the event loop, also if a stream is dropped on another thread: its tasks and the
callbacks of users belong to the loop. A relay has no task of its own, so a loop that is closed
leaves no task behind. The done-callback of an attempt reports its end. A caller that awaits or
reads waits for the attempt itself; between two attempts it waits in `_wait_for_change`.

A running attempt keeps the relay of a unary response alive, so the call runs to its end even if its
caller drops it, as in grpc.aio. It does not keep the relay of a response stream alive, and neither
does the relay itself, by a reference cycle: a stream that its caller drops is canceled at once.
(grpc.aio intends this too, but since 1.83 its channel keeps each call until it ends.) While a task
waits in `_wait_for_change`, `_AWAITED` keeps the relay, and so the task.
"""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Self

import grpc

from rpcwheel._concurrency.loop import call_on_loop, running_loop
from rpcwheel.events import CallbackFailed, emit
from rpcwheel.rpc import Kind

from .aio_finished import (
    CANCELLED,
    FINISHED,
    HALF_CLOSED,
    OK,
    FinishedCall,
    failed_call,
    finished_call,
)
from .calls import CANCELLED_HERE, ENDED_HERE

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Mapping

    Callback = Callable[[Any], None]

MADE_UP_DETAILS: Final = "Internal error from Core"
"""The details of the status INTERNAL that grpc.aio (1.60 to 1.85) sets when it can no longer write
a request. The server may only have ended the call early; then its own status arrives as well."""

STATUS_CHECK_DELAYS_S: Final = tuple(0.001 * 2**check for check in range(9))
"""Delays between checks whether the server's own status has arrived; 0.5 s in total."""

AIO_CALL: Final = "grpc.aio._call"
"""The module of gRPC's calls without interceptors."""

_VERSION: Final[str] = grpc.__version__  # type: ignore[attr-defined]  # not re-exported

CORE_ENDS_CALLS: Final = tuple(map(int, _VERSION.split(".")[:2])) >= (1, 84)
"""Whether a call ends that only gRPC's core has canceled; see `abandon_attempt`."""

AIO_INTERCEPTED: Final = "grpc.aio._interceptor"
"""The module of gRPC's calls with interceptors, and of the responses that these may return."""

MIXED: Final = "The iterator and read/write APIs may not be mixed on a single RPC."

ALREADY_READING: Final = "asynchronous generator is already running"
"""The text of the error of gRPC's iterator, a generator, if two tasks use it."""


# --- Functions on calls of grpc.aio ---


class WouldBlockError(Exception):
    """A coroutine would have to wait."""


def run_without_waiting(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine that need not wait, such as `code()` of a finished call.

    Raises:
        WouldBlockError: The coroutine would have to wait.
        BaseException: Whatever the coroutine raised.
    """
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value
    coroutine.close()
    raise WouldBlockError


def failure_of(call: Any) -> BaseException | None:
    """Return the exception that awaiting a finished call raises; None if it succeeded.

    Raises:
        WouldBlockError: The call has not ended.
        BaseException: The exception of an inner interceptor that raised instead of ending the call.
    """
    if isinstance(call, Relay) and call.final is not None:
        return failure_of(call.final)  # its error has the marks of `set_not_sent`
    if isinstance(call, FinishedCall):
        return call.failure()
    code = run_without_waiting(call.code())
    if code is OK:
        return None
    details = run_without_waiting(call.details())
    if code is CANCELLED and details in ENDED_HERE and _was_canceled_here(call):
        return asyncio.CancelledError()
    debug = getattr(call, "debug_error_string", None)  # not in the interface
    return grpc.aio.AioRpcError(
        code,
        run_without_waiting(call.initial_metadata()),
        run_without_waiting(call.trailing_metadata()),
        details,
        None if debug is None else run_without_waiting(debug()),
    )


def _was_canceled_here(call: Any) -> bool:
    """Whether the client has canceled a call; a server may pass on the details of another call."""
    task = getattr(call, "_interceptors_task", None)  # of a call with interceptors
    if isinstance(task, asyncio.Task) and not task.cancelled():
        if task.exception() is not None:
            # An exception does not say who canceled, so a status that an interceptor raises counts
            # as the server's.
            return False
        return isinstance(failure_of(task.result()), asyncio.CancelledError)
    inner = getattr(call, "_call", None)  # of a stream whose interceptor returned an iterator
    if isinstance(inner, grpc.aio.Call):
        return isinstance(failure_of(inner), asyncio.CancelledError)
    core_call = getattr(call, "_cython_call", None)
    return core_call is None or bool(core_call.is_locally_cancelled())


def has_ended(call: Any) -> bool:
    """Whether a call has ended, also if one of its interceptors raised.

    Before grpcio 1.83 `done()` raises the exception of the interceptor.
    """
    try:
        return bool(call.done())
    except Exception:  # noqa: BLE001 - `await call` raises it
        return True


def is_ok(call: Any) -> bool:
    """Whether a finished call has succeeded, in a tenth of the time of `code()`.

    False if that is not known, such as of a call with interceptors.
    """
    core_call = getattr(call, "_cython_call", None)
    if core_call is None:  # `isinstance` takes longer
        return isinstance(call, Relay) and is_ok(call.final)
    return bool(core_call.is_ok())


def cancel_attempt(call: Any) -> bool:
    """Cancel an attempt and wake a task that writes to it; False if the attempt has ended.

    A task that writes the first request to a call of grpc.aio (1.60 to 1.85) waits forever if the
    call is canceled before its metadata is sent.
    """
    canceled = bool(call.cancel())
    sent = getattr(call, "_metadata_sent", None)
    if isinstance(sent, asyncio.Event):
        sent.set()
    return canceled


def let_status_arrive(call: Any) -> None:
    """Have a call keep its status if the end of its requests can no longer be sent.

    grpc.aio (1.60 to 1.85) cancels a call if it has ended, such as by its deadline, while the end
    of the requests of an iterator is sent: `await call` raises `CancelledError` although nobody has
    canceled it, and the status is lost.
    """
    if type(call).__module__ == AIO_CALL and getattr(call, "_async_request_poller", None):
        call._done_writing = partial(_end_requests, weakref.ref(call))  # noqa: SLF001


async def _end_requests(reference: Callable[[], Any]) -> None:
    call = reference()  # lives: this is a part of its task
    with contextlib.suppress(grpc.aio.InternalError):  # the status arrives
        await type(call)._done_writing(call)  # noqa: SLF001


def abandon_attempt(call: Any) -> None:
    """Cancel an attempt whose result is not needed.

    `cancel` of a unary call of grpc.aio also cancels its task, which waits for gRPC's core. Then
    about 1 KB is never freed (grpcio 1.69 to 1.85, https://github.com/grpc/grpc/issues/43360).
    Without that, the core ends the task: as CANCELLED, or as OK if the response has just arrived.
    The task still calls the serializer if the attempt is canceled before its first step.
    Calls of other types, and calls whose interceptors still run, are canceled by `cancel`, and so
    are all calls before grpcio 1.84, where the task often does not end.
    """
    lowest = call
    # `type`, because a call that wraps another may forward all of its attributes but `cancel`.
    while issubclass(type(lowest), Relay) or type(lowest).__module__ == AIO_INTERCEPTED:
        lowest = lowest._attempt if isinstance(lowest, Relay) else _intercepted(lowest)  # noqa: SLF001
    is_ended_by_core = CORE_ENDS_CALLS and type(lowest).__module__ == AIO_CALL
    cancel = getattr(lowest, "_cancel", None) if is_ended_by_core else None
    if cancel is None:
        call.cancel()
    else:
        cancel(CANCELLED_HERE)


def _intercepted(call: Any) -> Any:
    """Return the call that the interceptors of a call have returned; None if there is none."""
    task = getattr(call, "_interceptors_task", None)  # a response has none
    if task is None or not task.done() or task.cancelled() or task.exception() is not None:
        return None
    return task.result()


def has_made_up_status(call: Any) -> bool:
    """Whether the status of a finished call is the one of `MADE_UP_DETAILS`.

    If the server's own status arrives later, grpc.aio (1.85.1) replaces the status, but does not
    call the done-callbacks again.
    """
    return bool(run_without_waiting(call.details()) == MADE_UP_DETAILS)


def cancel_count() -> int:
    """Return how often the running task was canceled; 0 outside of tasks."""
    task = asyncio.current_task()
    return 0 if task is None else task.cancelling()


class Signal:
    """Wakes all tasks that wait for it each time `notify` is called. For one event loop."""

    def __init__(self) -> None:
        self._waiters: list[asyncio.Future[None]] = []

    @property
    def has_waiters(self) -> bool:
        """Whether a task waits."""
        return bool(self._waiters)

    async def wait(self) -> None:
        """Wait for the next `notify`."""
        waiter = self.waiter()
        try:
            await waiter
        finally:
            self.forget(waiter)

    def waiter(self) -> asyncio.Future[None]:
        """Return a future that the next `notify` completes; pass it to `forget` afterwards."""
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        return waiter

    def forget(self, waiter: asyncio.Future[None]) -> None:
        """Drop a future of `waiter`."""
        if waiter in self._waiters:
            self._waiters.remove(waiter)

    def notify(self) -> None:
        """Wake the tasks that wait now."""
        if self._waiters:
            waiters, self._waiters = self._waiters, []
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_result(None)


# --- The call ---

_AWAITED: Final[set[Relay]] = set()
"""Relays for whose change a task waits. Asyncio has only weak references to tasks, so a task that
has no other reference would be collected together with its relay. A task on a loop that was closed
without canceling it is kept, as by gRPC's own calls."""


class Relay(grpc.aio.Call):
    """The part that is common to the four kinds of call."""

    kind: Any
    """The `Kind` of the call."""
    method: Any
    """The full name of the method, for events."""

    # Class attributes are the initial values: a call that succeeds sets few of them.
    _attempt: Any = None  # the running one
    _final: Any = None  # the call that has the status, after the end
    _source: Any = None  # the call that messages are read from, after the end
    _uncertain: Any = None  # an attempt whose status may be replaced by the server's own
    _checks = 0  # number of checks whether that has happened
    _number = 0  # number of the running or last attempt
    _signal: Signal | None = None
    _callbacks: list[Callback] | None = None
    _channel = None  # before grpcio 1.83 `close` of a channel reads it
    is_relay = True  # for `aio_counted`, which is faster with this than with `isinstance`
    _cython_call = _interceptors_task = None  # of gRPC's calls; likewise

    _cancels_when_dropped = False
    """Whether the call is canceled when its caller drops it."""

    received: bool = False
    """Whether the caller has received a message or initial metadata of an attempt."""

    # --- For subclasses to override ---

    def _attempt_failed(self, call: Any, error: BaseException) -> None:
        """Handle the failure of an attempt: finish now or later, or begin another. Must not raise.

        Args:
            call: The attempt.
            error: The exception that awaiting it raises. `WouldBlockError` of a call of another
                type that has not ended although its `done()` is true.
        """
        raise NotImplementedError

    def _release(self) -> None:
        """Free resources: the call has ended, or was dropped."""

    def _limit_silence(self, call: object) -> Any:
        """Limit the wait for a message that begins now.

        Returns:
            An object with `cancel()`, which ends the limit; None without a limit.
        """
        return None

    def time_remaining(self) -> float | None:
        """Return the seconds until the deadline of the whole call; None without a deadline."""
        raise NotImplementedError

    # --- For subclasses to call ---

    def begin(self, call: Any) -> None:
        """Forward to an attempt from now on."""
        self._attempt = call
        self._number += 1
        if self.kind.streams_requests:
            let_status_arrive(call)
        if has_ended(call):
            self._on_done(call)
        else:
            call.add_done_callback(self._end_callback())
        if self._signal is not None:
            self._signal.notify()

    def _end_callback(self) -> Callback:
        """Return a callback for the end of the running attempt; see the module docstring."""
        if self._cancels_when_dropped:
            return partial(_report_weakly, weakref.ref(self), self._number)
        return partial(_report, [self], self._number)

    def pause(self) -> None:
        """Forward to no attempt until the next `begin` or `finish`."""
        self._attempt = None

    def finish(self, call: Any, source: Any = None) -> None:
        """End with the status of a finished call. Only the first `finish` has an effect.

        Args:
            call: The finished call.
            source: The call that the remaining messages are read from, if it is another one.
        """
        if self._final is not None:
            return
        self._final = call
        self._source = source or call
        self._attempt = None
        self._release()
        if self._signal is not None:
            self._signal.notify()
        callbacks, self._callbacks = self._callbacks, None
        for callback in callbacks or ():
            _call_back(callback, self)

    def finish_failed(self, call: Any, error: BaseException) -> None:
        """End with the failure of an attempt.

        A call with a stream of requests ends with a copy of the status: if a request can't be
        written, grpc.aio (1.85) replaces the status of the attempt, even by `MADE_UP_DETAILS`. So
        does a call whose error has notes, as grpc.aio makes another error for its caller.

        Args:
            call: The attempt.
            error: What awaiting it raises.
        """
        if not has_ended(call):
            self.finish(failed_call(self.kind, error))
        elif not self.kind.streams_requests and not hasattr(error, "__notes__"):
            self.finish(call)
        elif isinstance(error, grpc.RpcError):
            self.finish(failed_call(self.kind, error), source=call)
        elif isinstance(error, asyncio.CancelledError):
            self.finish(finished_call(self.kind, CANCELLED, CANCELLED_HERE), source=call)
        else:
            self.finish(call)

    def end(self, call: FinishedCall) -> None:
        """End with the status of a finished call and cancel the running attempt.

        Has no effect if the call has ended, or its attempt has succeeded.
        """
        running = self._attempt
        if self._final is None:
            self.finish(call)
            if running is not None:
                cancel_attempt(running)

    @property
    def final(self) -> Any:
        """The call that has the status; None before the end."""
        return self._final

    def is_current(self, call: object) -> bool:
        """Whether this is the running attempt; with None: whether no attempt runs."""
        return call is self._attempt

    def _was_superseded(self, call: object, cancels: int) -> bool:
        """Whether a `CancelledError` of an attempt means only that the relay canceled the attempt.

        Args:
            call: The attempt.
            cancels: `cancel_count()` before the wait for the attempt. If the count has grown, the
                task of the caller was canceled.
        """
        if call is self._final or call is self._source or call is self._attempt:
            return False
        return cancel_count() <= cancels

    def attempt_ended(self, number: int) -> bool:
        """Process the end of an attempt; False if its status may still change.

        Attempts have numbers because grpc.aio (1.85) passes another call to the done-callbacks if
        an inner interceptor is a generator.
        """
        if number != self._number or self._attempt is None:
            return True
        return self._on_done(self._attempt)

    def _on_done(self, call: Any) -> bool:
        """Process the end of the running attempt; False if its status may still change."""
        error: BaseException | None = None
        try:
            if not is_ok(call) and run_without_waiting(call.code()) is not OK:
                if self._waits_for_status(call):
                    return False
                error = failure_of(call)
        except BaseException as raised:  # noqa: BLE001 - of an inner interceptor, for the caller
            error = raised
        if error is None:
            self.finish(call)
        else:
            self._attempt_failed(call, error)
        return True

    def _waits_for_status(self, call: Any) -> bool:
        """Whether to wait for the server's own status in place of the one that gRPC set.

        Schedules another check if so: grpc.aio (1.85.1) calls done-callbacks for the first status
        only.
        """
        if not self.kind.streams_requests or not has_made_up_status(call):
            return False
        if self._uncertain is not call:
            self._uncertain, self._checks = call, 0
        if self._checks == len(STATUS_CHECK_DELAYS_S):
            return False
        delay_s, check_again = STATUS_CHECK_DELAYS_S[self._checks], self._end_callback()
        asyncio.get_running_loop().call_later(delay_s, check_again, None)
        self._checks += 1
        return True

    async def _wait_for_change(self) -> None:
        """Wait for the next attempt or the end of the call."""
        if self._signal is None:
            self._signal = Signal()
        _AWAITED.add(self)
        try:
            await self._signal.wait()
        finally:
            if not self._signal.has_waiters:
                _AWAITED.discard(self)

    def _attempt_raised(self, call: Any, error: BaseException) -> None:
        """Handle an exception of an interceptor's attempt that has not reported its end."""
        if call is not None and call is self._attempt:
            if not isinstance(error, grpc.RpcError):
                if isinstance(error, asyncio.CancelledError):
                    call.cancel()
                self.finish(failed_call(self.kind, error))
                call.cancel()  # after `finish`, because it reports CANCELLED at once
            elif not has_ended(call):
                self._attempt_failed(call, error)

    # --- For the caller ---

    def cancelled(self) -> bool:
        return self._final is not None and bool(self._final.cancelled())

    def done(self) -> bool:
        return self._final is not None

    def cancel(self) -> bool:
        call = self._attempt
        if self._final is not None:
            return False
        if call is not None and not has_ended(call):
            return cancel_attempt(call)  # its done-callback finishes this call
        self.finish(finished_call(self.kind, CANCELLED, CANCELLED_HERE))
        return True

    def add_done_callback(self, callback: Callback) -> None:
        """Call `callback(call)` on the loop when the call has ended; at once if it has ended.

        An exception of the callback is reported as the event `CallbackFailed`. (A call of grpc.aio
        1.85 raises it in `await call`.)
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
                await self._wait_for_change()
                continue
            metadata = await call.initial_metadata()
            if call is self._attempt and not has_ended(call):
                self.received = self.received or bool(metadata)
                return metadata
            if call is self._attempt:
                await self._wait_for_change()  # for the decision about a retry
        return await self._final.initial_metadata()

    async def trailing_metadata(self) -> Any:
        return await (await self._wait_for_end()).trailing_metadata()

    async def code(self) -> grpc.StatusCode:
        code: grpc.StatusCode = await (await self._wait_for_end()).code()
        return code

    async def details(self) -> Any:
        return await (await self._wait_for_end()).details()

    async def debug_error_string(self) -> Any:
        debug = getattr(await self._wait_for_end(), "debug_error_string", None)
        return None if debug is None else await debug()

    async def wait_for_connection(self) -> None:
        while True:
            call = self._final or self._attempt
            if call is None:
                await self._wait_for_change()
                continue
            cancels = cancel_count()
            try:
                await call.wait_for_connection()
            except asyncio.CancelledError:
                if not self._was_superseded(call, cancels):
                    raise
            except grpc.RpcError:
                if call is self._final:
                    raise
                if call is self._attempt:
                    await self._wait_for_change()
            else:
                return

    async def _wait_for_end(self) -> Any:
        while self._final is None:
            await self._wait_for_change()
        return self._final


def _call_back(callback: Callback, call: Relay) -> None:
    try:
        callback(call)
    except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - reported as an event
        name = getattr(callback, "__qualname__", None) or repr(callback)
        emit(CallbackFailed(call.method, name, error))


def _report(relays: list[Relay], number: int, _: object) -> None:
    """Report the end of an attempt, once; attempts keep their callbacks, so `relays` is emptied."""
    if relays and relays[0].attempt_ended(number):
        relays.clear()


def _report_weakly(relay: weakref.ref[Relay], number: int, _: object) -> None:
    alive = relay()
    if alive is not None:
        alive.attempt_ended(number)


# --- The kinds of call ---


class AwaitedRelay(Relay):
    """A call with one response."""

    def __await__(self) -> Generator[Any, None, Any]:
        try:
            while True:
                call = self._final or self._attempt
                if call is None:
                    yield from self._wait_for_change().__await__()
                    continue
                task = asyncio.current_task()
                cancels = 0 if task is None else task.cancelling()  # `cancel_count`
                del task  # it keeps the error if it is canceled, and the error this frame
                try:
                    response = yield from call.__await__()
                except asyncio.CancelledError:
                    if not (self._was_superseded(call, cancels) or self._has_status(call, cancels)):
                        raise
                    yield from self._until_decided(call)
                except Exception as error:
                    self._has_raised(call, error)
                    yield from self._until_decided(call)
                    if call is self._final:
                        raise
                else:
                    self.finish(call)
                    if call is self._final:
                        return response
        except asyncio.CancelledError as error:
            self._has_raised(self._attempt, error)
            self.cancel()
            raise

    def _has_raised(self, call: Any, error: BaseException) -> None:
        if call is not None and call is self._attempt and has_ended(call):
            self._on_done(call)
        self._attempt_raised(call, error)

    def _has_status(self, call: object, cancels: int) -> bool:
        """Whether an attempt has a status although awaiting it raised `CancelledError`.

        grpc.aio (1.85) cancels the task that awaits a call if a request can no longer be written,
        even if the call has a status. Arguments as of `_was_superseded`.
        """
        if call is self._final or cancel_count() > cancels:
            return False
        return bool(self.kind.streams_requests) and has_ended(call)

    def _until_decided(self, call: Any) -> Generator[Any, None, None]:
        """Wait for the decision that follows the end of an attempt."""
        while call is self._attempt:
            yield from self._wait_for_change().__await__()


class ReadRelay(Relay):
    """A call with a stream of responses."""

    _cancels_when_dropped = True
    _messages: Any = None  # the iterator of the attempt that was read last
    _messages_of: Any = None  # that attempt
    _is_iterated = False  # the caller has called `__aiter__`
    _uses_read = False  # the caller has called `read`
    _is_reading = False  # a task waits for the next message of an iterator
    _at_end = False  # the caller has reached the end, or got the failure
    _loop: asyncio.AbstractEventLoop | None = None  # of the running attempt

    def begin(self, call: Any) -> None:
        """Forward to an attempt from now on."""
        self._loop = asyncio.get_running_loop()
        super().begin(call)

    def __del__(self) -> None:
        if self._loop is None or self._final is not None:  # it has not begun, or has ended
            return
        if running_loop() is self._loop:
            self._cancel_dropped()
        elif not (self._loop.is_running() and call_on_loop(self._loop, self._cancel_dropped)):
            self._cancel_attempt()
            with contextlib.suppress(RuntimeError):  # its loop is closed
                self._release()

    def _cancel_dropped(self) -> None:
        self._cancel_attempt()
        self.finish(finished_call(self.kind, CANCELLED, CANCELLED_HERE))

    def _cancel_attempt(self) -> None:
        if self._attempt is not None:
            with contextlib.suppress(Exception):  # its loop is closed, or of another library
                self._attempt.cancel()  # reports its end, if this is no cyclic garbage collection

    def __aiter__(self) -> AsyncIterator[Any]:
        if self._uses_read:
            raise grpc.aio.UsageError(MIXED)
        self._is_iterated = True
        return _Messages(self)

    def end_iteration(self) -> None:
        """Give an iterator no more messages.

        Raises:
            RuntimeError: Another task waits for a message.
        """
        if self._is_reading:
            raise RuntimeError(f"aclose(): {ALREADY_READING}")
        self._at_end = True

    async def read(self) -> Any:
        if self._at_end:
            failure = None if self._final is None else failure_of(self._final)
            if failure is not None:
                raise failure
            return grpc.aio.EOF
        if self._is_iterated and self._final is None:
            raise grpc.aio.UsageError(MIXED)
        self._uses_read = True
        return await self._next()

    async def read_iterated(self) -> Any:
        """Return the next message for an iterator.

        Raises:
            StopAsyncIteration: The caller has reached the end, or got the failure.
            RuntimeError: Another task waits for a message.
            BaseException: The failure of the call.
        """
        if self._at_end:
            raise StopAsyncIteration
        if self._is_reading:
            raise RuntimeError(f"anext(): {ALREADY_READING}")
        self._is_reading = True
        try:
            message = await self._next()
        finally:
            self._is_reading = False
        if self._at_end:
            raise StopAsyncIteration
        return message

    async def _next(self) -> Any:
        """Return the next message, or EOF; raises the failure of the call."""
        try:
            while True:
                call = self._source or self._attempt
                if call is None:
                    await self._wait_for_change()
                    continue
                try:
                    message = await self._receive(call)
                except Exception as error:  # noqa: BLE001 - raised if nothing follows
                    await self._read_failed(call, error)
                    error.__traceback__ = None  # it has the frames of this call
                    continue
                if call is self._source or call is self._attempt:
                    self._at_end = message is grpc.aio.EOF
                    self.received = self.received or not self._at_end
                    return message
        except asyncio.CancelledError:
            self._at_end = True
            self.cancel()
            raise
        except Exception:
            self._at_end = True
            raise

    async def _read_failed(self, call: Any, error: Exception) -> None:
        """Wait for the decision that follows the failure of an attempt; raise it if it is the end.

        If a scheduled retry is abandoned, this attempt becomes the end, and its iterator has
        nothing more to raise.
        """
        self._attempt_raised(call, error)
        while call is self._attempt or (self._attempt is None and self._source is None):
            await self._wait_for_change()
        if call is self._source:
            own = self._final.failure() if isinstance(self._final, FinishedCall) else None
            failure = error if own is None else own
            if failure is not error:  # then it becomes the context of `failure`
                error.__traceback__ = None  # it has the frames of this call and of its caller
            try:
                raise failure from failure.__cause__  # None would delete its cause
            finally:
                del error, own, failure  # else a cycle: the error, its traceback, and this frame

    async def _receive(self, call: Any) -> Any:
        if call is not self._messages_of:
            self._messages_of, self._messages = call, call.__aiter__()
        limit, cancels = self._limit_silence(call), cancel_count()
        try:
            return await self._messages.__anext__()
        except StopAsyncIteration:
            return grpc.aio.EOF
        except asyncio.CancelledError:
            if not self._was_superseded(call, cancels):
                raise
            return None
        finally:
            if limit is not None:
                limit.cancel()


class _Messages:
    """The messages of a call, for `async for`.

    An iterator keeps its call alive, and not the reverse. A generator that the call keeps would be
    in a reference cycle with it, and a call that its caller leaves early would run until Python's
    collector finds the cycle.
    """

    def __init__(self, call: ReadRelay) -> None:
        self._call = call

    def __aiter__(self) -> Self:
        return self

    def __anext__(self) -> Coroutine[Any, Any, Any]:
        return self._call.read_iterated()

    async def aclose(self) -> None:
        """End the iteration, for `contextlib.aclosing`. Does not cancel the call, as in gRPC."""
        self._call.end_iteration()


class WrittenRelay(Relay):
    """A call with a stream of requests, which the caller may write to the running attempt."""

    _half_closed = False  # `done_writing` was called before the first attempt

    @property
    def _done_writing_flag(self) -> bool:
        """Read by grpc.aio (1.85) from any call that an interceptor returns."""
        call = self._final or self._attempt
        return self._half_closed or bool(getattr(call, "_done_writing_flag", False))

    async def write(self, request: object) -> None:
        if self._half_closed and self._final is None:
            raise asyncio.InvalidStateError(HALF_CLOSED)
        await self._forward("write", request)

    async def done_writing(self) -> None:
        """End the stream of requests. Idempotent. If it is canceled, so is the call."""
        self._half_closed = self._half_closed or (self._final or self._attempt) is None
        try:
            await self._forward("done_writing")
        except asyncio.CancelledError:
            self.cancel()
            raise

    async def _forward(self, name: str, *args: object) -> None:
        """Call a method of the running attempt, or of the next one if that is superseded."""
        while True:
            call, cancels = self._final or self._attempt, cancel_count()
            if call is None:
                await self._wait_for_change()
                if name == "write" and self._final is not None:
                    self._raise_end()  # as if it had waited for the connection of gRPC's own call
                continue
            try:
                await getattr(call, name)(*args)
            except (Exception, asyncio.CancelledError):
                if not self._was_superseded(call, cancels):
                    raise
                self._raise_end()
            else:
                return

    def _raise_end(self) -> None:
        """Raise the error that grpc.aio raises if the call ends during a write."""
        if self._final is not None:
            failure = failure_of(self._final)
            raise (
                failure
                if isinstance(failure, grpc.RpcError)
                else asyncio.InvalidStateError(FINISHED)
            )


RELAYS: Final[Mapping[Kind, tuple[type, ...]]] = {
    Kind.UNARY_UNARY: (AwaitedRelay, grpc.aio.UnaryUnaryCall),
    Kind.UNARY_STREAM: (ReadRelay, grpc.aio.UnaryStreamCall),
    Kind.STREAM_UNARY: (WrittenRelay, AwaitedRelay, grpc.aio.StreamUnaryCall),
    Kind.STREAM_STREAM: (WrittenRelay, ReadRelay, grpc.aio.StreamStreamCall),
}
"""For `classes_by_kind`: the classes of relays with gRPC's abstract classes."""
