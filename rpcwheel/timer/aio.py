"""The timer on an event loop: one armed handle of the loop's for all its timeouts."""

from __future__ import annotations

import asyncio
import inspect
import math
import time
import warnings
import weakref
from typing import TYPE_CHECKING, Self

from rpcwheel._concurrency.loop import call_on_loop, running_loop
from rpcwheel.durations import NEVER
from rpcwheel.errors import TimerStopped
from rpcwheel.timer.core import BATCH, OnError, TimerCore

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from rpcwheel.timer._base import Timeout, TimerQueue

__all__ = ["AsyncWheelTimer"]


class AsyncWheelTimer(TimerCore):
    """A timer on the running loop, asyncio's or uvloop's; tasks run on the loop's thread.

    A task may be a coroutine function: it becomes an asyncio task when its time has come.
    `new_timeout` and `cancel` may be called from any thread; a thread that brings an earlier
    deadline wakes the loop.

    Args:
        queue: As for `WheelTimer`.
        max_pending: As for `WheelTimer`.
        on_error: Called on the loop as `on_error(timeout, error)`, for coroutines too; by default
            a log.

    Close it with `await timer.aclose()`, or use it in an `async with` statement.

    Raises:
        RuntimeError: No loop is running; make it inside a coroutine.
        TypeError, ConfigurationError: An argument makes no sense.
    """

    def __init__(
        self,
        queue: TimerQueue | None = None,
        *,
        max_pending: int | None = None,
        on_error: OnError | None = None,
    ) -> None:
        try:
            self._loop = asyncio.get_running_loop()
        except RuntimeError:
            raise RuntimeError(
                "AsyncWheelTimer must be made while its loop runs: inside a coroutine"
            ) from None
        super().__init__(queue, max_pending=max_pending, on_error=on_error)
        self._handle: asyncio.Handle | None = None
        self._serving = False
        self._tasks: set[asyncio.Task[object]] = set()
        # libuv rounds delays to milliseconds, half a one to nothing: the remainder of an early
        # wake-up would spin.
        self._whole_ms = not type(self._loop).__module__.startswith("asyncio.")
        self._enlist()

    @property
    def stopped(self) -> bool:
        """Whether `stop()` was called, or its loop is closed, so that nothing runs any more.

        On a closed loop a new timeout that is due before all others raises `TimerStopped`; one that
        is due later is taken as ever, as to ask the loop each time would double what a start costs.
        """
        return self._stopped or self._loop.is_closed()

    def stop(self) -> list[Timeout]:
        """Stop for good; coroutines that run go on. Idempotent.

        Returns:
            The timeouts not delivered, by deadline, all cancelled; they keep their tasks.

        Raises:
            RuntimeError: Called by a task of this timer (a coroutine may call it).
        """
        if running_loop() is self._loop:
            self._forbid_inside_task()
        self._stopped = True
        while self._serving and not self._running:
            time.sleep(0.0005)  # on another thread the loop is just taking something out
        undelivered = self._end()
        handle, self._handle = self._handle, None
        if handle is not None and not self._loop.is_closed():
            if running_loop() is self._loop:
                handle.cancel()
            else:
                call_on_loop(self._loop, handle.cancel)
        return undelivered

    async def aclose(self) -> list[Timeout]:
        """Stop as `stop()` does, cancel the coroutines that run, and wait for their end."""
        undelivered = self.stop()
        running = [task for task in self._tasks if task is not asyncio.current_task()]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        return undelivered

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    def __del__(self) -> None:
        if not getattr(self, "_stopped", True):
            self._stopped = True
            pending = self.pending
            self._end()
            if pending:  # at last: a warning may be an error
                warnings.warn(
                    f"{self!r} was dropped with {pending} timeouts pending; "
                    "call `await timer.aclose()`",
                    ResourceWarning,
                    source=self,
                    stacklevel=1,
                )

    def _wake(self, deadline_ns: int) -> None:
        if running_loop() is self._loop:
            self._aim(deadline_ns)
            return
        if not call_on_loop(self._loop, _turn, weakref.ref(self)):
            self._hub.armed_ns = NEVER
            raise TimerStopped(
                "the loop of this timer is closed; make a new timer on a running loop"
            )

    def _aim(self, wake_ns: int) -> None:
        """Have the loop call at that time, instead of later."""
        if self._handle is not None:
            self._handle.cancel()
        delay = max(wake_ns - self._hub.now(), 0) / 1e9
        if self._whole_ms:
            delay = max(math.ceil(delay * 1e3), 1) / 1e3
        self._handle = self._loop.call_later(delay, _turn, weakref.ref(self))
        armed_ns = self._hub.armed_ns
        if 0 < armed_ns < wake_ns:  # by a finalizer, or a signal handler, meanwhile
            self._aim(armed_ns)

    def _serve(self) -> None:
        """Run what is due, a batch at most, and leave the rest to the loop's next round."""
        self._wakeups += 1
        hub = self._hub
        hub.armed_ns = 0
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None
        self._serving = True
        try:
            self._run_due(BATCH)
            wake_ns = NEVER if self._stopped else hub.arm()
        finally:
            self._serving = False
        if self._stopped:
            return
        if wake_ns <= hub.now():
            hub.armed_ns = 0
            self._handle = self._loop.call_soon(_turn, weakref.ref(self))
        elif wake_ns != NEVER:
            self._aim(wake_ns)

    def _finish(self, timeout: Timeout, result: object) -> None:
        if not inspect.isawaitable(result):
            return
        task: asyncio.Task[object] = self._loop.create_task(
            self._watch(timeout, timeout._task, result)
        )
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _watch(self, expired: Timeout, work: object, result: Awaitable[object]) -> None:
        try:
            await result
        except Exception as error:  # noqa: BLE001 - reported like any task's error
            expired._task = work
            self._report(expired, error)
            expired._let_go()


def _turn(timer_ref: weakref.ref[AsyncWheelTimer]) -> None:
    timer = timer_ref()
    if timer is not None and not timer.stopped:
        timer._serve()
