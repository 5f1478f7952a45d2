"""How the stop of a server runs: step by step, each with an event and a deadline.

The jobs of a step run on workers, all at once, so that one that hangs delays the stop for a bounded
time only. A hurried stop takes no more time than it must.
"""

from __future__ import annotations

import threading
from functools import partial
from typing import TYPE_CHECKING, Final

from rpcwheel._concurrency.executor import EXECUTOR
from rpcwheel._concurrency.notifications import NotificationQueue
from rpcwheel.durations import to_seconds
from rpcwheel.events import CallbackFailed, ShutdownStep
from rpcwheel.timer.manual import clock_of

from .server_adapter import ServerGone

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from rpcwheel.timer.api import Timer

STOP_MARGIN_S: Final = 1.0
"""The server may take this much longer than the grace to stop."""

HURRIED_TIMEOUT_S: Final = 0.5
"""The limit for a step of a hurried stop, unless the step is left out."""

POLL_INTERVAL_S: Final = 0.05
"""How often a step checks whether the stop is hurried by now, or a manual clock has advanced."""


class Shutdown:
    """The stop of a server: why and how fast it stops, and its steps. Thread-safe."""

    def __init__(
        self, name: Callable[[], str], timer: Timer | None, lame_duck_s: float, grace_s: float
    ) -> None:
        """Prepare the stop of the server that events call `name()`."""
        self._name = name
        self.now_ns = clock_of(timer)
        self.lame_duck_s = lame_duck_s
        self.grace_s = grace_s
        self.reason = ""
        """For events."""
        self.hurried = threading.Event()
        self.events = NotificationQueue()

    def hurry(self) -> None:
        """Leave out the lame duck, and give each step `HURRIED_TIMEOUT_S` at most."""
        self.hurried.set()

    def begin_step(self, name: str, timeout_s: float | None = 0.0) -> RunningStep:
        """Begin a step, and emit its event; the deadline is as of `RunningStep`."""
        step = RunningStep(self, timeout_s)
        self.events.emit(ShutdownStep(self._name(), name, self.reason))
        return step

    def run(
        self, name: str, job: Callable[[], object], ended: threading.Event | None = None
    ) -> None:
        """Run a job; an exception becomes a `CallbackFailed` event."""
        try:
            job()
        except ServerGone:
            pass  # there is nothing to stop any more
        except Exception as error:  # noqa: BLE001 - reported
            self.events.emit(CallbackFailed(self._name(), name, error))
        finally:
            if ended is not None:
                ended.set()


class RunningStep:
    """A step of the stop, with a deadline on the timer's clock."""

    def __init__(self, shutdown: Shutdown, timeout_s: float | None) -> None:
        """Begin now.

        Args:
            shutdown: The stop of which it is a step.
            timeout_s: The time from now to the deadline, unless the stop is hurried. None: the
                grace of the stop, which may become shorter meanwhile.
        """
        self._shutdown = shutdown
        self._timeout_s = timeout_s
        self._begin_ns = shutdown.now_ns()

    @property
    def hurried(self) -> threading.Event:
        """Set if the stop is hurried."""
        return self._shutdown.hurried

    def left_s(self) -> float:
        """Return the seconds until the deadline, or 0."""
        timeout_s = self._timeout_s
        if timeout_s is None:
            timeout_s = self._shutdown.grace_s
        elif self.hurried.is_set():
            timeout_s = HURRIED_TIMEOUT_S
        return max(0.0, timeout_s - to_seconds(self._shutdown.now_ns() - self._begin_ns))

    def wait_for(self, events: Iterable[threading.Event]) -> None:
        """Wait until all events are set, or until the deadline."""
        for event in events:
            while (left_s := self.left_s()) > 0:
                if event.wait(min(left_s, POLL_INTERVAL_S)):
                    break

    def run_all(self, *jobs: tuple[str, Callable[[], object]]) -> None:
        """Run named jobs on workers, all at once; wait for them until the deadline."""
        ends: list[threading.Event] = []
        for name, job in jobs:
            ended = threading.Event()  # also the key: a job that hangs delays no other
            EXECUTOR.submit(ended, partial(self._shutdown.run, name, job, ended))
            ends.append(ended)
        self.wait_for(ends)
