"""The timer on a thread of its own, and the one that a whole process shares."""

from __future__ import annotations

import os
import threading
import time
import warnings
import weakref
from typing import TYPE_CHECKING

from rpcwheel.durations import NEVER
from rpcwheel.events.events import TaskFailed, TaskSlow
from rpcwheel.events.hub import emit
from rpcwheel.timer.core import BATCH, OnError, TimerCore, _live

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from rpcwheel.timer._base import Hub, Timeout, TimerQueue

__all__ = ["WheelTimer", "shared_timer"]

STOP_PATIENCE_S = 5.0  # how long `stop()` waits for the task that runs at that moment
STOP_SLICES = 10  # ... in so many parts: a machine that stands still takes but one of them


class WheelTimer(TimerCore):
    """A timer on one daemon thread, started by the first timeout that needs it.

    The thread sleeps until the next deadline, for ever when there is none. A task runs on it, so
    it must be short; with an `executor`, tasks run there. One timer serves a whole process: see
    `shared_timer`.

    Args:
        queue: Which structure holds the timeouts; by default the fastest that this installation
            has, with 1 ms ticks. `HashedWheel(tick=0.1, slots=512)` is Netty's and Dubbo's timer.
        max_pending: At most so many timeouts wait; more raise `TooManyTimeouts`. None: no limit.
        executor: Anything with `submit`, such as a `ThreadPoolExecutor`. What it refuses is an
            event and counted.
        name: Of the thread, in events and logs.
        on_error: Called as `on_error(timeout, error)` on the thread of the task that raised; by
            default a log.

    A context manager: leaving it stops the timer. After `os.fork` the child starts with nothing
    pending. A timer that is dropped unstopped while timeouts wait ends with a `ResourceWarning`.

    Raises:
        TypeError, ConfigurationError: An argument makes no sense.
    """

    _on_users_thread = False
    _warns_if_dropped = True

    def __init__(
        self,
        queue: TimerQueue | None = None,
        *,
        max_pending: int | None = None,
        executor: Executor | None = None,
        name: str = "rpcwheel-timer",
        on_error: OnError | None = None,
    ) -> None:
        super().__init__(
            queue, max_pending=max_pending, executor=executor, name=name, on_error=on_error
        )
        self._set_up()
        self._enlist()

    def stop(self) -> list[Timeout]:
        """Stop for good. Idempotent, thread-safe; waits for the task that runs, but 5 s at most.

        Returns:
            The timeouts not delivered, by deadline, all cancelled; they keep their tasks. Empty
            the second time.

        Raises:
            RuntimeError: Called by a task on the timer's own thread.
        """
        if self._thread is threading.current_thread():
            raise RuntimeError(
                f"{self.name}: a task can't stop the timer that runs it; do it from another thread"
            )
        self._stopped = True
        self._hub.queue.limit(-1)
        self._ring()
        thread = self._thread
        if thread is not None:
            for _ in range(STOP_SLICES):
                thread.join(STOP_PATIENCE_S / STOP_SLICES)
                if not thread.is_alive():
                    break
            else:
                emit(
                    TaskSlow(self.name, "the task that runs while the timer stops", STOP_PATIENCE_S)
                )
        with self._ending:
            return self._end()

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    def __del__(self) -> None:
        if not getattr(self, "_stopped", True):
            self._stopped = True
            pending = self.pending
            self._end()
            self._ring()
            if pending and self._warns_if_dropped:  # at last: a warning may be an error
                warnings.warn(
                    f"{self!r} was dropped with {pending} timeouts pending; "
                    "call stop(), or use it in a with statement",
                    ResourceWarning,
                    source=self,
                    stacklevel=1,
                )

    def _set_up(self) -> None:
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()  # held for ever by whoever starts the thread
        self._ending = threading.RLock()  # a signal handler may stop what is being stopped
        self._bell = threading.Lock()  # locked: nothing new; the thread sleeps in acquire()
        self._bell.acquire()

    def _ring(self) -> None:
        try:
            self._bell.release()
        except RuntimeError:
            """It rings already."""

    def _wake(self, deadline_ns: int) -> None:
        if self._thread is None and self._starting.acquire(blocking=False):
            thread = threading.Thread(
                target=_turn,
                args=(weakref.ref(self), self._hub, self._bell),
                name=self.name,
                daemon=True,
            )
            try:
                thread.start()
            except BaseException:
                self._hub.armed_ns = NEVER
                self._starting.release()
                raise
            self._thread = thread
        else:
            self._ring()

    def _serve(self) -> bool:
        """Run all that is due; False to end the thread."""
        self._wakeups += 1
        hub = self._hub
        hub.armed_ns = 0
        while not self._stopped:
            try:
                if not self._run_due(BATCH) and hub.arm() > hub.now():
                    return True
            except Exception as error:  # noqa: BLE001 - a bug of ours: told, and survived
                emit(TaskFailed(self.name, "the timer itself", error))
                time.sleep(0.05)
            hub.armed_ns = 0
        return False

    def _after_fork(self) -> None:
        """In a child: the thread is gone, and what waits belongs to the parent."""
        self._set_up()
        self._running = False
        self._hub.armed_ns = NEVER
        queue = self._hub.queue
        queue.drain()
        queue._filed = queue._gone  # a heap may have counted one that its thread never filed here


def _turn(timer_ref: weakref.ref[WheelTimer], hub: Hub, bell: threading.Lock) -> None:
    """Be the thread. It holds the timer only while it works: one dropped meanwhile is freed."""
    timer = timer_ref()
    if timer is not None:
        timer._thread = threading.current_thread()  # `stop()` sees it, or it sees `_stopped`
    while True:
        timer = timer_ref()
        if timer is None or timer._bell is not bell or not timer._serve():
            return  # another bell: this is a forked child, whose thread is another
        del timer
        wake_ns = hub.armed_ns
        if wake_ns == NEVER:
            bell.acquire()
        elif wake_ns:
            bell.acquire(
                timeout=min(max(wake_ns - time.monotonic_ns(), 0) / 1e9, threading.TIMEOUT_MAX)
            )


class _SharedTimer(WheelTimer):
    """The timer of `shared_timer()`. It lasts as long as the process."""

    _warns_if_dropped = False

    def stop(self) -> list[Timeout]:
        """Raise RuntimeError: the timer belongs to the whole process."""
        raise RuntimeError(
            "shared_timer() belongs to the whole process and can't be stopped; "
            "to have a timer that you can stop, make a WheelTimer()"
        )


class _Shared:
    timer: _SharedTimer | None = None
    lock = threading.RLock()  # a finalizer may ask for the timer while it is being made


_shared = _Shared()


def shared_timer() -> WheelTimer:
    """Return the timer of this process, which each component uses that is given no other.

    It is made when first asked for. `stop()` on it, and leaving it as a context manager, raise
    RuntimeError. It ends with the process; a forked child has its own, with nothing pending.
    """
    timer = _shared.timer
    if timer is None:
        with _shared.lock:
            timer = _shared.timer
            if timer is None:
                timer = _shared.timer = _SharedTimer()
    return timer


def _after_fork_in_child() -> None:
    _shared.lock = threading.RLock()
    for timer in list(_live):
        if isinstance(timer, WheelTimer) and not timer.stopped:
            timer._after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
