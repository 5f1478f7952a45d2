"""Ends background calls when the process exits, before the thread pools of its servers shut down.

Background calls are heartbeats, health checks and deliveries of failback: no user code waits for
their results.

When the main thread ends, `concurrent.futures` shuts down every `ThreadPoolExecutor`. If a call
reaches a `grpc.server` of the process after that, the server's thread ends with "RuntimeError:
cannot schedule new futures after shutdown", and the process hangs at its exit: gRPC frees the
completion queue of the server and waits for events that never come (grpcio 1.85.1, with plain stubs
too; canceling the call does not help). So before that all background calls are ended, and no other
may begin.

In a process without such a server, background calls continue after the end of the main thread, as
long as other threads run.
"""

from __future__ import annotations

import atexit
import concurrent.futures.thread  # noqa: F401 - registers before this module; the last runs first
import contextlib
import sys
import threading
import weakref
from typing import TYPE_CHECKING, Final, Protocol

from rpcwheel.events import TaskFailed, emit

from .callbacks import callable_name
from .executor import reset_after_fork

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["BACKGROUND", "BackgroundCall", "BackgroundCalls"]

STEPS: Final = 40
STEP_TIMEOUT_S: Final = 0.05
"""The exit waits `STEPS` times `STEP_TIMEOUT_S` for calls in flight. If the process is suspended
meanwhile, only one of the steps is lost."""


class BackgroundCaller(Protocol):
    """A heartbeat or a failback queue."""

    def end_at_exit(self) -> None:
        """Begin no more calls, and report calls that were not made."""


class BackgroundCall:
    """A background call in flight. It counts as ended when this object is garbage-collected."""

    __slots__ = ("__weakref__", "cancel", "is_lost")

    def __init__(self) -> None:
        self.cancel: Callable[[], object] | None = None
        """Cancels the call; None if it cannot be canceled."""
        self.is_lost: Callable[[], bool] | None = None
        """Whether the call cannot end any more: `is_closed` of its event loop, for example."""


class BackgroundCalls:
    """The background calls in flight, and the objects that make them. Thread-safe."""

    def __init__(self) -> None:
        self.reset()
        reset_after_fork(self)

    def reset(self) -> None:
        """Forget all calls: a forked child has none."""
        self._lock = threading.RLock()  # a finalizer may end a call
        self._changed = threading.Condition(self._lock)
        self._callers: weakref.WeakSet[BackgroundCaller] = weakref.WeakSet()
        self._calls: weakref.WeakSet[BackgroundCall] = weakref.WeakSet()
        self.closed = False
        """Whether no more calls may begin."""
        self.main_thread_has_ended = False

    def add(self, caller: BackgroundCaller) -> bool:
        """Call `caller.end_at_exit` on close; False if closed already."""
        with self._lock:
            if not self.closed:
                self._callers.add(caller)
            return not self.closed

    def begin_call(self) -> BackgroundCall | None:
        """Register a call that begins now; None if no call may begin. Keep the returned object."""
        call = BackgroundCall()
        with self._lock:
            if self.closed:
                return None
            self._calls.add(call)
            return call

    def end_call(self, call: BackgroundCall | None) -> None:
        """Remove a call that has ended. Idempotent."""
        if call is not None:
            with self._lock:
                self._calls.discard(call)
                if self.closed:
                    self._changed.notify_all()

    def _in_flight(self) -> list[BackgroundCall]:
        return [call for call in self._calls if call.is_lost is None or not call.is_lost()]

    def close(self, steps: int = STEPS) -> None:
        """Let no call begin, wait for the calls in flight, and end all callers.

        Args:
            steps: How often to wait for `STEP_TIMEOUT_S`. After that, calls in flight are canceled.
        """
        with self._lock:
            self.closed = True
            for _ in range(steps):
                if self._changed.wait_for(lambda: not self._in_flight(), STEP_TIMEOUT_S):
                    break
            jobs: list[Callable[[], object]] = [caller.end_at_exit for caller in self._callers]
            jobs += [call.cancel for call in self._in_flight() if call.cancel is not None]
        for job in jobs:
            try:
                job()
            except Exception as error:  # noqa: BLE001 - reported; the others must end too
                emit(TaskFailed(timer="exit", task=callable_name(job), error=error))


BACKGROUND: Final = BackgroundCalls()
"""The background calls of this process."""


def _serves() -> bool:
    """Return whether a server of `grpc` runs in this process."""
    grpc_server = sys.modules.get("grpc._server")  # imported by `grpc.server()`
    take_calls = getattr(grpc_server, "_serve", None)
    targets = (getattr(thread, "_target", None) for thread in threading.enumerate())
    return take_calls is not None and take_calls in targets


def _at_exit() -> None:
    BACKGROUND.main_thread_has_ended = True
    if _serves():
        BACKGROUND.close()


# Runs when the main thread ends, as the hook of `concurrent.futures` (CPython 3.9 to 3.14).
_register = getattr(threading, "_register_atexit", atexit.register)
with contextlib.suppress(RuntimeError):  # imported during the exit
    _register(_at_exit)
