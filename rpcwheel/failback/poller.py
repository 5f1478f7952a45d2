"""When the queue of a journal looks for calls that are due: at an interval, and on request."""

from __future__ import annotations

import contextlib
import threading
from functools import partial
from typing import TYPE_CHECKING, Final

from rpcwheel._concurrency.callbacks import callable_name, weak_callback
from rpcwheel._concurrency.executor import EXECUTOR
from rpcwheel.durations import to_ns
from rpcwheel.errors import TimerError
from rpcwheel.events import ExecutorRejected, emit

if TYPE_CHECKING:
    from collections.abc import Callable

    from .held_calls import HeldCalls
    from .timeouts import Timeouts

HORIZON_S: Final = 2.0
"""Calls are taken if they are due within this time, and can begin within it."""


class Poller:
    """Looks at a journal at an interval, and earlier if it is asked to, until `end`.

    Thread-safe. One look runs at a time, on a worker thread. With a `ManualTimer`, `advance` looks
    too, while its clock stands still: so it cannot pass the end of the lease.
    """

    def __init__(
        self,
        name: str,
        calls: HeldCalls,
        timeouts: Timeouts,
        interval_s: float,
        look: Callable[[float], object],
        stopped: Callable[[], object],
    ) -> None:
        """Begin without a look.

        Args:
            name: The name of the queue.
            calls: Those of the queue. If it was closed, `start` has no effect.
            timeouts: For the interval.
            interval_s: The time between two looks.
            look: Called with the time within which calls must be due.
            stopped: Called when the timer is stopped; must not block.
        """
        self._name = name
        self._calls = calls
        self._timeouts = timeouts
        self._interval_ns = to_ns(interval_s)
        self._look = look
        self._stopped = stopped
        self.has_ended = False
        """Whether no more looks begin."""
        self.reset()

    def reset(self) -> None:
        """Begin without a look, in a forked child."""
        self._looking = threading.Lock()
        self._is_requested = False
        self._is_ticking = False

    def start(self) -> None:
        """Look at the interval from now on. Idempotent."""
        with self._calls.lock:
            if self._is_ticking or self._calls.closed:
                return
            self._is_ticking = True
        self._set_tick()

    def end(self) -> bool:
        """Begin no more looks. False if that was done before."""
        with self._calls.lock:
            had_ended, self.has_ended = self.has_ended, True
            return not had_ended

    def request(self) -> None:
        """Look soon. Never blocks."""
        with self._calls.lock:
            if self._is_requested or self.has_ended:
                return
            self._is_requested = True
        # A `ManualTimer` may be advanced before a timeout is set, which would then be too late.
        within_s = 0.0 if self._timeouts.is_manual else HORIZON_S
        EXECUTOR.submit((self, "journal"), partial(self.look, within_s))

    def request_after(self, delay_ns: int) -> None:
        """Look after a delay, unless that is after the next look. Never blocks."""
        if delay_ns < self._interval_ns:
            with contextlib.suppress(TimerError, RuntimeError):
                self._set(delay_ns, self.request)

    def look(self, within_s: float = HORIZON_S) -> None:
        """Look now, after a look that runs. Blocks."""
        with self._looking:
            self._is_requested = False
            if not self.has_ended:
                self._look(within_s)

    def _tick(self) -> None:
        if self.has_ended:
            return
        if self._timeouts.is_manual:
            self.look()
        else:
            self.request()
        self._set_tick()

    def _set_tick(self) -> None:
        try:
            self._set(self._interval_ns, self._tick)
        except (TimerError, RuntimeError) as error:  # RuntimeError: no thread can be started
            self._is_ticking = False
            emit(ExecutorRejected(timer=self._name, task=callable_name(self._tick), error=error))

    def _set(self, delay_ns: int, method: Callable[[], None]) -> None:
        # Weak, so that a queue is freed that is dropped without `close`.
        self._timeouts.set(delay_ns, weak_callback(method), self._stopped, self._name)
