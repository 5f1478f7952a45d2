"""The timer on an event loop, which uses one handle of the loop for all its timeouts."""

from __future__ import annotations

import asyncio
import inspect
import math
import time
import weakref
from contextvars import Context
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
    """A timer on the running event loop (asyncio or uvloop), on which its tasks run.

    A task may be a coroutine function; its coroutine runs as an asyncio task. `new_timeout` and
    `cancel` may be called on any thread, and wake the loop if necessary.

    Args:
        queue: As for `WheelTimer`.
        max_pending: As for `WheelTimer`.
        on_error: Called on the loop as `on_error(timeout, error)`, also for coroutines. By default
            a `TaskFailed` event is emitted.

    Close it with `await timer.aclose()`, or use it in an `async with` statement.

    Raises:
        RuntimeError: No loop is running.
        TypeError, ConfigurationError: An argument is invalid.
    """

    _how_to_stop = "call `await timer.aclose()`"

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
                "no event loop is running; create an AsyncWheelTimer inside a coroutine"
            ) from None
        super().__init__(queue, max_pending=max_pending, on_error=on_error)
        self._handle: asyncio.Handle | None = None
        self._serving = False
        self._tasks: set[asyncio.Task[object]] = set()
        # libuv rounds delays to milliseconds, less than half a millisecond to 0: the loop would
        # run without a pause until the deadline.
        self._whole_ms = not type(self._loop).__module__.startswith("asyncio.")
        self._register()

    @property
    def stopped(self) -> bool:
        """Whether `stop()` was called, or the loop is closed.

        If the loop is closed, `new_timeout` raises `TimerStopped` only for a timeout that is due
        before all others: a check of the loop in each call would double its cost.
        """
        return self._stopped or self._loop.is_closed()

    def stop(self) -> list[Timeout]:
        """Stop the timer; running coroutines continue. Idempotent.

        Returns:
            The pending timeouts, by deadline. They are cancelled and keep their tasks.

        Raises:
            RuntimeError: Called by a task of this timer (a coroutine may call it).
        """
        if running_loop() is self._loop:
            self._forbid_inside_task(inside=self._running)
        self._stopped = True
        while self._serving and not self._running:
            time.sleep(0.0005)  # the loop, on another thread, reads the queue
        undelivered = self._end()
        handle, self._handle = self._handle, None
        if handle is not None and not self._loop.is_closed():
            if running_loop() is self._loop:
                handle.cancel()
            else:
                call_on_loop(self._loop, handle.cancel)
        return undelivered

    async def aclose(self) -> list[Timeout]:
        """Stop as `stop()` does, cancel running coroutines, and wait until they have ended."""
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

    def _wake(self, deadline_ns: int) -> None:
        if running_loop() is self._loop:
            self._schedule_wakeup(deadline_ns)
            return
        if not call_on_loop(self._loop, _on_wakeup, weakref.ref(self)):
            raise TimerStopped(
                "the event loop of this timer is closed; create a timer on a running loop"
            )

    def _schedule_wakeup(self, wake_ns: int) -> None:
        """Schedule the next wake-up, in place of a later one."""
        if self._handle is not None:
            self._handle.cancel()
        delay = max(wake_ns - self._timer_state.now(), 0) / 1e9
        if self._whole_ms:
            delay = max(math.ceil(delay * 1e3), 1) / 1e3
        # Not in the context of a handler that starts a timeout, which all later tasks would have.
        self._handle = self._loop.call_later(
            delay, _on_wakeup, weakref.ref(self), context=Context()
        )
        armed_ns = self._timer_state.armed_ns
        if 0 < armed_ns < wake_ns:  # set by a finalizer or a signal handler meanwhile
            self._schedule_wakeup(armed_ns)

    def _serve(self) -> None:
        """Run at most `BATCH` due tasks; the others run in the next iteration of the loop."""
        self._wakeups += 1
        state = self._timer_state
        state.armed_ns = 0
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None
        self._serving = True
        try:
            self._run_due(BATCH)
        finally:  # also after a task that has raised `CancelledError` or `SystemExit`
            self._plan_wakeup()

    def _plan_wakeup(self) -> None:
        state = self._timer_state
        try:
            wake_ns = NEVER if self._stopped else state.arm()
        finally:
            self._serving = False
        if self._stopped:
            return
        if wake_ns <= state.now():
            state.armed_ns = 0
            self._handle = self._loop.call_soon(_on_wakeup, weakref.ref(self))
        elif wake_ns != NEVER:
            self._schedule_wakeup(wake_ns)

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
        except Exception as error:  # noqa: BLE001 - the user's coroutine
            expired._task = work
            self._report(expired, error)
            expired._release_task()


def _on_wakeup(timer_ref: weakref.ref[AsyncWheelTimer]) -> None:
    timer = timer_ref()
    if timer is not None and not timer.stopped:
        timer._serve()
