"""The timer on a thread, and the shared timer of the process."""

from __future__ import annotations

import os
import threading
import time
import weakref
from contextvars import Context
from typing import TYPE_CHECKING

from rpcwheel._concurrency.executor import EXECUTOR
from rpcwheel.durations import NEVER
from rpcwheel.events.events import TaskFailed, TaskSlow
from rpcwheel.events.hub import emit
from rpcwheel.telemetry import components
from rpcwheel.timer.core import BATCH, DEFAULT_NAME, OnError, TimerCore

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from rpcwheel.timer._base import Timeout, TimerQueue

__all__ = ["WheelTimer", "shared_timer"]

STOP_TIMEOUT_S = 5.0  # how long `stop()` waits for the running task ...
STOP_STEPS = 10  # ... in this number of steps: a suspended process loses only one of them


class WheelTimer(TimerCore):
    """A timer on one daemon thread, started by the first timeout that needs it.

    The thread sleeps until the next deadline. Tasks run on it, so they must be short; with an
    `executor` they run there. One timer is enough for a process: see `shared_timer`.

    Args:
        queue: The queue of timeouts; by default the fastest, with ticks of 1 ms.
            `HashedWheel(tick=0.1, slots=512)` is Netty's and Dubbo's timer.
        max_pending: The maximum of pending timeouts; beyond it `new_timeout` raises
            `TooManyTimeouts`. None: no limit.
        executor: An object with `submit`, such as a `ThreadPoolExecutor`. If it does not accept a
            task, an `ExecutorRejected` event is emitted.
        name: The name of the timer and its thread, in events and log lines.
        on_error: Called as `on_error(timeout, error)` on the thread of the task that raised. By
            default a `TaskFailed` event is emitted.

    A context manager, which stops the timer on exit. After `os.fork` the child's timer has no
    pending timeouts. A timer that is garbage-collected with pending timeouts before `stop()` emits
    a `ResourceWarning`.

    Raises:
        TypeError, ConfigurationError: An argument is invalid.
    """

    _on_users_thread = False
    _how_to_stop = "call stop(), or use it in a with statement"

    def __init__(
        self,
        queue: TimerQueue | None = None,
        *,
        max_pending: int | None = None,
        executor: Executor | None = None,
        name: str = DEFAULT_NAME,
        on_error: OnError | None = None,
    ) -> None:
        self._reset_thread()  # first: `__del__` needs it, also if the rest is interrupted
        super().__init__(
            queue, max_pending=max_pending, executor=executor, name=name, on_error=on_error
        )
        self._register()

    def stop(self) -> list[Timeout]:
        """Stop the timer. Idempotent and thread-safe. Waits at most 5 s for the running task.

        Returns:
            The pending timeouts, by deadline. They are cancelled and keep their tasks. The second
            call returns an empty list.

        Raises:
            RuntimeError: Called by a task on the timer's own thread.
        """
        self._forbid_inside_task(inside=self._thread is threading.current_thread())
        self._stopped = True
        self._timer_state.queue.limit(-1)
        self._wake_thread()
        thread = self._thread
        if thread is not None:
            for _ in range(STOP_STEPS):
                thread.join(STOP_TIMEOUT_S / STOP_STEPS)
                if not thread.is_alive():
                    break
            else:
                emit(TaskSlow(self.name, "that runs while the timer stops", STOP_TIMEOUT_S))
        with self._ending:
            return self._end()

    def _end(self) -> list[Timeout]:
        undelivered = super()._end()
        self._wake_thread()  # to end
        return undelivered

    def _reset_thread(self) -> None:
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()  # acquired once, to start the thread
        self._ending = threading.RLock()  # a signal handler may call `stop` during `stop`
        self._wakeup = threading.Lock()  # the thread sleeps in acquire()
        self._wakeup.acquire()

    def _wake_thread(self) -> None:
        try:
            self._wakeup.release()
        except RuntimeError:
            """The thread is being woken already."""

    def _wake(self, deadline_ns: int) -> None:
        if self._thread is None and self._starting.acquire(blocking=False):
            thread = threading.Thread(
                target=Context().run,  # as in `_Thread` of the executor
                args=(_run_thread, weakref.ref(self), self._wakeup),
                name=self.name,
                daemon=True,
            )
            try:
                thread.start()
            except BaseException:
                self._starting.release()
                raise
            self._thread = thread
        else:
            self._wake_thread()

    def _serve(self) -> int:
        """Run all due tasks; return when the thread is to run the next, 0 if it is to end."""
        self._wakeups += 1
        state = self._timer_state
        state.armed_ns = 0
        while not self._stopped:
            try:
                if not self._run_due(BATCH) and (wake_ns := state.arm()) > state.now():
                    return wake_ns
            except Exception as error:  # noqa: BLE001 - a bug in this package
                emit(TaskFailed(self.name, "the timer itself", error))
                time.sleep(0.05)
            state.armed_ns = 0
        return 0

    def _after_fork(self) -> None:
        """Reset the timer in a forked child: no thread, no timeouts of its parent, counts of 0."""
        self._reset_thread()
        self._running = False
        self._timer_state.armed_ns = NEVER
        queue = self._timer_state.queue
        queue.drain()
        queue._added = queue._removed = 0
        if self._max_pending is not None:
            queue.limit(self._max_pending)
        self._reset_counts()


def _run_thread(timer_ref: weakref.ref[WheelTimer], wakeup: threading.Lock) -> None:
    """Run tasks on the thread, which refers to the timer only while tasks run."""
    timer = timer_ref()
    if timer is not None:
        timer._thread = threading.current_thread()  # otherwise `stop()` might not see it
    while True:
        timer = timer_ref()
        if timer is None or timer._wakeup is not wakeup:
            return  # another lock: this is a forked child, which has a new thread
        wake_ns = timer._serve()
        del timer
        if not wake_ns:
            return
        if wake_ns == NEVER:
            wakeup.acquire()
        else:
            wakeup.acquire(
                timeout=min(max(wake_ns - time.monotonic_ns(), 0) / 1e9, threading.TIMEOUT_MAX)
            )


class _SharedTimer(WheelTimer):
    """The timer of `shared_timer()`, which is never stopped."""

    _how_to_stop = ""

    def stop(self) -> list[Timeout]:
        """Raise RuntimeError: the whole process uses this timer."""
        raise RuntimeError(
            "shared_timer() is used by the whole process and cannot be stopped; "
            "use a WheelTimer() of your own"
        )


class _Shared:
    timer: _SharedTimer | None = None
    lock = threading.RLock()  # a finalizer may call `shared_timer` during `shared_timer`


_shared = _Shared()


def shared_timer() -> WheelTimer:
    """Return the timer of this process, which all components use by default.

    It is created by the first call. It cannot be stopped: `stop()` and the exit of a `with`
    statement raise RuntimeError. A forked child has its own, without pending timeouts.
    """
    timer = _shared.timer
    if timer is None:
        with _shared.lock:
            timer = _shared.timer
            if timer is None:
                timer = _shared.timer = _SharedTimer()
    return timer


EXECUTOR.timer = shared_timer


def _after_fork_in_child() -> None:
    _shared.lock = threading.RLock()
    for timer in components.of_kind("timer"):
        if not isinstance(timer, WheelTimer):
            components.remove("timer", timer)  # its loop does not run in the child
        elif not timer.stopped:
            timer._after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
