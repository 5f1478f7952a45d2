"""Ends heartbeats before the thread pools of servers in the same process are shut down.

When the main thread ends, `concurrent.futures` shuts down every `ThreadPoolExecutor`. If a call
reaches a `grpc.server` of the process after that, the thread that takes calls in ends with
"RuntimeError: cannot schedule new futures after shutdown", and the process hangs at its end: gRPC
frees the completion queue of the server and waits for events that never come (grpcio 1.85.1, with
plain stubs too; cancelling the call does not help). So no heartbeat may be sent from then on, and
those that were sent must have been answered.

A process without such a server has heartbeats until it exits: other threads of it may go on for
long after the main thread.
"""

from __future__ import annotations

import atexit
import concurrent.futures.thread  # noqa: F401 - before ours: what is registered last runs first
import contextlib
import sys
import threading
import weakref
from typing import Final, Protocol

from rpcwheel.workers import reset_after_fork

__all__ = ["HEARTBEATS", "RunningHeartbeats"]

STEPS: Final = 40
STEP_S: Final = 0.05
"""How long the exit waits for heartbeats that were sent. In steps, of which a process that stands
still uses up only one."""


class Detachable(Protocol):
    """A heartbeat."""

    def detach(self) -> None:
        """End it, and cancel its calls."""


class RunningHeartbeats:
    """The heartbeats of this process, and how many of their calls are in flight. Thread-safe."""

    def __init__(self) -> None:
        self.reset()
        reset_after_fork(self)

    def reset(self) -> None:
        """Begin anew: a forked child has no heartbeats."""
        self._changed = threading.Condition()
        self._heartbeats: weakref.WeakSet[Detachable] = weakref.WeakSet()
        self._calls = 0
        self.closed = False
        """Whether no more calls may begin."""

    def add(self, heartbeat: Detachable) -> bool:
        """Have a heartbeat detached by `close`; False if it was called already."""
        with self._changed:
            if not self.closed:
                self._heartbeats.add(heartbeat)
            return not self.closed

    def begin_call(self) -> bool:
        """Count a call that is about to begin; False if it must not."""
        with self._changed:
            self._calls += not self.closed
            return not self.closed

    def end_call(self) -> None:
        """Count it no more; once for each `begin_call` that gave True."""
        with self._changed:
            self._calls -= 1
            if not self._calls:
                self._changed.notify_all()

    def close(self, steps: int = STEPS) -> None:
        """Begin no more calls, wait for those in flight, and detach all heartbeats.

        Args:
            steps: How often to wait for `STEP_S`; calls that have not ended then are cancelled.
        """
        with self._changed:
            self.closed = True
            for _ in range(steps):
                if self._changed.wait_for(lambda: not self._calls, STEP_S):
                    break
            heartbeats = tuple(self._heartbeats)
        for heartbeat in heartbeats:
            heartbeat.detach()


HEARTBEATS: Final = RunningHeartbeats()
"""Those of this process."""


def _serves() -> bool:
    """Whether a server of `grpc` runs in this process."""
    grpc_server = sys.modules.get("grpc._server")  # imported by `grpc.server()`
    take_calls = getattr(grpc_server, "_serve", None)
    targets = (getattr(thread, "_target", None) for thread in threading.enumerate())
    return take_calls is not None and take_calls in targets


def _at_exit() -> None:
    if _serves():
        HEARTBEATS.close()


# When the main thread ends, as `concurrent.futures` does it; CPython 3.9 to 3.14 have it.
_register = getattr(threading, "_register_atexit", atexit.register)
with contextlib.suppress(RuntimeError):  # imported at the exit: then nothing is sent for long
    _register(_at_exit)
