"""Ends background calls before the thread pools of servers in the same process are shut down.

Background calls are those for whose result no user code waits: heartbeats, health probes,
deliveries of failback.

When the main thread ends, `concurrent.futures` shuts down every `ThreadPoolExecutor`. If a call
reaches a `grpc.server` of the process after that, the thread that takes calls in ends with
"RuntimeError: cannot schedule new futures after shutdown", and the process hangs at its end: gRPC
frees the completion queue of the server and waits for events that never come (grpcio 1.85.1, with
plain stubs too; cancelling the call does not help). So no background call may begin from then on,
and those that have begun must have ended.

A process without such a server makes background calls until it exits: other threads of it may go
on for long after the main thread.
"""

from __future__ import annotations

import atexit
import concurrent.futures.thread  # noqa: F401 - before ours: what is registered last runs first
import contextlib
import sys
import threading
import weakref
from typing import TYPE_CHECKING, Final, Protocol

from rpcwheel._concurrency.executor import reset_after_fork
from rpcwheel.events import TaskFailed, emit

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["BACKGROUND", "BackgroundCall", "BackgroundCalls"]

STEPS: Final = 40
STEP_S: Final = 0.05
"""How long the exit waits for calls that have begun. In steps, of which a process that stands
still uses up only one."""


class MakesCalls(Protocol):
    """A heartbeat, or a queue of failback."""

    def end_at_exit(self) -> None:
        """Make no more calls; report what was not done."""


class BackgroundCall:
    """A background call that runs. It has ended when this object is garbage."""

    __slots__ = ("__weakref__", "cancel", "is_lost")

    def __init__(self) -> None:
        self.cancel: Callable[[], object] | None = None
        """Ends the call, if it can be ended."""
        self.is_lost: Callable[[], bool] | None = None
        """Whether the call can't end any more, such as `is_closed` of its event loop."""


class BackgroundCalls:
    """The background calls of this process that are in flight, and who makes them. Thread-safe."""

    def __init__(self) -> None:
        self.reset()
        reset_after_fork(self)

    def reset(self) -> None:
        """Begin anew: a forked child has no background calls."""
        self._changed = threading.Condition()  # over an RLock: a finalizer may end a call anywhere
        self._makers: weakref.WeakSet[MakesCalls] = weakref.WeakSet()
        self._calls: weakref.WeakSet[BackgroundCall] = weakref.WeakSet()
        self.closed = False
        """Whether no more calls may begin."""

    def add(self, maker: MakesCalls) -> bool:
        """Have `close` call `end_at_exit` of a maker of calls; False if it was called already."""
        with self._changed:
            if not self.closed:
                self._makers.add(maker)
            return not self.closed

    def begin_call(self) -> BackgroundCall | None:
        """Note a call that is about to begin; None if it must not. Hold what this returns."""
        call = BackgroundCall()
        with self._changed:
            if self.closed:
                return None
            self._calls.add(call)
            return call

    def end_call(self, call: BackgroundCall | None) -> None:
        """Note that a call has ended; idempotent."""
        if call is not None:
            with self._changed:
                self._calls.discard(call)
                if self.closed:
                    self._changed.notify_all()

    def _in_flight(self) -> list[BackgroundCall]:
        return [call for call in self._calls if call.is_lost is None or not call.is_lost()]

    def close(self, steps: int = STEPS) -> None:
        """Begin no more calls, wait for those in flight, and end all makers of calls.

        Args:
            steps: How often to wait for `STEP_S`; calls that have not ended then are canceled.
        """
        with self._changed:
            self.closed = True
            for _ in range(steps):
                if self._changed.wait_for(lambda: not self._in_flight(), STEP_S):
                    break
            jobs: list[Callable[[], object]] = [maker.end_at_exit for maker in self._makers]
            jobs += [call.cancel for call in self._in_flight() if call.cancel is not None]
        for job in jobs:
            try:
                job()
            except Exception as error:  # noqa: BLE001 - the others must end too; told as an event
                emit(TaskFailed(timer="exit", task=repr(job), error=error))


BACKGROUND: Final = BackgroundCalls()
"""Those of this process."""


def _serves() -> bool:
    """Whether a server of `grpc` runs in this process."""
    grpc_server = sys.modules.get("grpc._server")  # imported by `grpc.server()`
    take_calls = getattr(grpc_server, "_serve", None)
    targets = (getattr(thread, "_target", None) for thread in threading.enumerate())
    return take_calls is not None and take_calls in targets


def _at_exit() -> None:
    if _serves():
        BACKGROUND.close()


# When the main thread ends, as `concurrent.futures` does it; CPython 3.9 to 3.14 have it.
_register = getattr(threading, "_register_atexit", atexit.register)
with contextlib.suppress(RuntimeError):  # imported at the exit: then nothing is sent for long
    _register(_at_exit)
