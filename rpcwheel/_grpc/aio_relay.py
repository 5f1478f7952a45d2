"""A call of `grpc.aio` that is answered by other calls, one after the other.

A `Relay` is what the caller holds while the tries of its call come and go below. It shows the try
that runs (`begin`), none between two of them (`pause`), and in the end the call that answers
(`finish`), which is the last try itself wherever possible. What follows a failed try is decided by
its `Conductor`.

All of it is on the loop. A try that ends tells so by its done-callback; nothing waits in a task of
its own, so a loop that is closed leaves none behind. Whoever awaits or reads does so on the try
itself, and on `_change` where there is none.

The conductor must not refer to the relay while a try runs: a response stream that its caller has
forgotten is cancelled then. (grpc.aio 1.85 means to do the same, but each of its calls is in a
cycle of references that Python's collector does not see.) A call with one response runs to its
end, forgotten or not, as in grpc.aio.
"""

from __future__ import annotations

import asyncio
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol

import grpc

from rpcwheel.observe import CallbackFailed, emit

from .aio_calls import (
    CANCELLED,
    CANCELLED_HERE,
    OK,
    blurred,
    ended,
    ended_by,
    give_up,
    has_ended,
    immediately,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from rpcwheel.rpc import Kind

    from .aio_calls import Ended

    Callback = Callable[[Any], None]

__all__ = ["Conductor", "Relay", "Signal", "call_back", "cancels_of_task", "tell_weakly"]

STATUS_LOOKS_S: Final = tuple(0.001 * 2**look for look in range(9))
"""Delays in seconds between checks whether the server's own status has arrived; 0.5 s in all."""


class Writing(Protocol):
    """Where the caller's requests go if they may have to be sent again."""

    @property
    def iterates(self) -> bool:
        """Whether they come from an iterator that the caller gave."""

    @property
    def complete(self) -> bool:
        """Whether there are no more to come."""

    async def write(self, message: object, relay: Relay) -> None:
        """Send it with the try that runs, or with the next."""

    def done_writing(self) -> None:
        """There are no more."""


class Conductor(Protocol):
    """Who decides about the tries of one call, and makes them."""

    @property
    def kind(self) -> Kind:
        """Which of the four."""

    @property
    def method(self) -> str:
        """In full, for events."""

    @property
    def requests(self) -> Writing | None:
        """Where they are written to; None: to the try itself."""

    def failed(self, relay: Relay, call: Any, error: BaseException | None) -> None:
        """Act on a try that has not succeeded: finish the relay, now or later, or go on.

        `error` is what it raised, or None: ask the call. Must not raise.
        """

    def finished(self) -> None:
        """Let go of all: the relay has its end."""

    def time_remaining(self) -> float | None:
        """Seconds until the deadline of the whole call."""

    def listen(self, relay: Relay, call: object) -> Any:
        """Begin to wait for a message; what is returned has `cancel()`, or is None."""


class Signal:
    """Wakes all who wait, each time it is given. On one loop."""

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
        """What is done when it is given next, be it before anybody waits; then `forget` it."""
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        return waiter

    def forget(self, waiter: asyncio.Future[None]) -> None:
        """Let go of a waiter."""
        if waiter in self._waiters:
            self._waiters.remove(waiter)

    def give(self) -> None:
        """Wake all who wait now."""
        if self._waiters:
            waiters, self._waiters = self._waiters, []
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_result(None)


class Relay(grpc.aio.Call):
    """What all four kinds share."""

    # Defaults of the class: a call that goes well sets few of them.
    _try: Any = None
    _final: Any = None
    _source: Any = None  # of messages, once there is an end
    _blurred: Any = None  # a try whose own status may be still to come
    _looks = 0  # checks so far whether it has come
    _number = 0  # of the try that runs, or ran last
    _awaited = False  # whether somebody awaits the try, and so will learn how it ends
    _signal: Signal | None = None
    _callbacks: list[tuple[Callback, Any]] | None = None
    _channel = None  # before grpcio 1.83 no channel can be closed while a call has no such name

    _ends_forgotten = False
    """Whether the call is cancelled when its caller has forgotten it."""

    handed = False
    """Whether the caller has something of a try in hand: a message, or initial metadata."""

    def __init__(self, conductor: Conductor) -> None:
        self._conductor = conductor

    # --- For the conductor ---

    def begin(self, call: Any) -> None:
        """Show the try that runs from now on."""
        self._try = call
        self._number += 1
        if has_ended(call):
            self._on_done(call)
        else:
            call.add_done_callback(
                partial(tell_weakly, weakref.ref(self), self._number)
                if self._ends_forgotten
                else partial(_tell, [self], self._number)
            )
        if self._signal is not None:
            self._signal.give()

    def pause(self) -> None:
        """Show that there is no try now, and that another will follow."""
        self._try = None

    def finish(self, call: Any, source: Any = None) -> None:
        """End, with what this finished call says; only the first end counts.

        Args:
            call: Says the status.
            source: What messages are read from to the end, if it is another: the try itself.
        """
        if self._final is not None:
            return
        self._final = call
        self._source = source or call
        self._try = None
        self._conductor.finished()
        if self._signal is not None:
            self._signal.give()
        callbacks, self._callbacks = self._callbacks, None
        for callback, face in callbacks or ():
            call_back(callback, face or self, self._conductor.method)

    def end(self, call: Ended) -> None:
        """End with what this call says, and give up the try that runs; not if it has ended."""
        running = self._try
        self._settle(running)
        if self._final is None:
            self.finish(call)
            if running is not None:
                give_up(running)

    def _settle(self, call: Any) -> None:
        """Act on the end of a try that was left to whoever awaits it."""
        if call is not None and self._awaited and has_ended(call):
            self._awaited = False
            self._on_done(call)

    def was_given_up(self, call: object, cancels: int) -> bool:
        """Whether a `CancelledError` that came out of this try is nobody's but ours.

        Args:
            call: The try.
            cancels: What `cancels_of_task()` said before it was waited for. If it says more now,
                it is the caller's own.
        """
        if call is self._final or call is self._source or call is self._try:
            return False
        return cancels_of_task() <= cancels

    def shows(self, call: object) -> bool:
        """Whether this try is the one that runs."""
        return call is self._try

    def tell(self, number: int) -> bool:
        """Take note that this try has ended; False if there is more to come from it.

        By its number: what grpc.aio (1.85) makes of another interceptor's generator has the
        callbacks called with the call below it.
        """
        if self._awaited or number != self._number or self._try is None:
            return True  # it comes out of the `await`; or it was superseded
        return self._on_done(self._try)

    def _on_done(self, call: Any) -> bool:
        """Act on the end of the try that runs; False if there is more to come from it."""
        try:
            succeeded = immediately(call.code()) is OK
            if not succeeded and self._waits_for_status(call):
                return False
        except BaseException as error:  # noqa: BLE001 - an interceptor's below; the caller gets it
            self._conductor.failed(self, call, error)
            return True
        if succeeded:
            self.finish(call)
        else:
            self._conductor.failed(self, call, None)
        return True

    def _waits_for_status(self, call: Any) -> bool:
        """Whether to wait for the server's own status, because gRPC made the first one up.

        grpc.aio calls the done-callbacks for the first status only (1.85.1), so this schedules
        another check.
        """
        if not self._conductor.kind.streams_requests or not blurred(call):
            return False
        if self._blurred is not call:
            self._blurred, self._looks = call, 0
        if self._looks == len(STATUS_LOOKS_S):
            return False
        look_again = partial(tell_weakly, weakref.ref(self), self._number)
        asyncio.get_running_loop().call_later(STATUS_LOOKS_S[self._looks], look_again)
        self._looks += 1
        return True

    # --- For the caller ---

    def cancelled(self) -> bool:
        return self._final is not None and bool(self._final.cancelled())

    def done(self) -> bool:
        return self._final is not None

    def time_remaining(self) -> float | None:
        return self._conductor.time_remaining()

    def cancel(self) -> bool:
        call = self._try
        self._settle(call)
        if self._final is not None:
            return False
        if call is not None and not has_ended(call):
            return give_up(call)  # its done-callback finishes us
        self.finish(ended(self._conductor.kind, CANCELLED, CANCELLED_HERE))
        return True

    def add_done_callback(self, callback: Callback, face: object = None) -> None:
        """Have `callback(call)` called on the loop when the call has ended, at once if it has.

        If it raises, that is an event `CallbackFailed` and nothing else. (A call of grpc.aio 1.85
        raises it in `await call`.) `face` is what its caller has, if not this.
        """
        if self._final is not None:
            call_back(callback, face or self, self._conductor.method)
        elif self._callbacks is None:
            self._callbacks = [(callback, face)]
        else:
            self._callbacks.append((callback, face))

    async def initial_metadata(self) -> Any:
        while self._final is None:
            call = self._try
            if call is None:
                await self._change()
                continue
            metadata = await call.initial_metadata()
            if call is self._try and not has_ended(call):
                self.handed = self.handed or bool(metadata)
                return metadata
            if call is self._try:
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
        say = getattr(await self._end(), "debug_error_string", None)
        return None if say is None else await say()

    async def wait_for_connection(self) -> None:
        while True:
            call = self._final or self._try
            if call is None:
                await self._change()
                continue
            cancels = cancels_of_task()
            try:
                await call.wait_for_connection()
            except asyncio.CancelledError:
                if not self.was_given_up(call, cancels):
                    raise
            except grpc.RpcError:
                if call is self._final:
                    raise
                if call is self._try:
                    await self._change()
            else:
                return

    async def _end(self) -> Any:
        while self._final is None:
            await self._change()
        return self._final

    async def _change(self) -> None:
        """Wait for the next try, or the end."""
        if self._signal is None:
            self._signal = Signal()
        await self._signal.wait()

    def _broke(self, call: object, error: BaseException) -> None:
        """Act on what came out of a try that has not told that it ended (a foreign one's)."""
        if call is not None and call is self._try:
            known = isinstance(error, grpc.RpcError)
            if not known:
                call.cancel()  # type: ignore[attr-defined]
                self.finish(ended_by(self._conductor.kind, error))
            elif not has_ended(call):
                self._conductor.failed(self, call, error)


def call_back(callback: Callback, call: object, method: str) -> None:
    """Tell a user's callback that a call has ended; what that raises is told as an event."""
    try:
        callback(call)
    except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - a hook can't hurt
        name = getattr(callback, "__qualname__", None) or repr(callback)
        emit(CallbackFailed(method, name, error))


def cancels_of_task() -> int:
    """How often the running task was cancelled; one that cleans up after it runs on."""
    task = asyncio.current_task()
    return 0 if task is None else task.cancelling()


def _tell(relays: list[Relay], number: int, _: object) -> None:
    """Tell a relay that its try has ended, then let go of it: calls keep their callbacks."""
    if relays and relays[0].tell(number):
        relays.clear()


def tell_weakly(relay: weakref.ref[Relay], number: int, _: object = None) -> None:
    """Tell a relay that its try has ended, if anybody still has it."""
    alive = relay()
    if alive is not None:
        alive.tell(number)
