"""One timeout for the next thing that a component has to do."""

from __future__ import annotations

import threading
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from rpcwheel._concurrency.executor import EXECUTOR, reset_after_fork
from rpcwheel.durations import NEVER, to_seconds
from rpcwheel.errors import TimerError, TimerStopped
from rpcwheel.events import RegistryFailed, emit
from rpcwheel.timer import shared_timer
from rpcwheel.timer.manual import checked_timer, clock_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from rpcwheel.timer import Timeout
    from rpcwheel.timer.api import Timer


class OneShotTimer:
    """Calls a function at the earliest of the times that it is given.

    Thread-safe; the function is called without a lock. A user's timer that is full is replaced by
    `shared_timer()` for that one timeout, so that no lease is lost. One that was stopped is not
    replaced: it is reported once, and nothing is called any more. In a forked child nothing is set.
    """

    def __init__(
        self,
        timer: Timer | None,
        expired: Callable[[], object],
        registry: str = "",
        request: str = "watch",
    ) -> None:
        """Set nothing yet.

        Args:
            timer: None for `shared_timer()`, when it is first needed.
            expired: Called on the timer's thread; must not block.
            registry: The registry's name in the event if the timer is full or stopped. "": that is
                not reported.
            request: The request that the event names, as in `RegistryFailed`.
        """
        self.now_ns = clock_of(timer)
        self._timer = checked_timer(timer)
        self._expired = expired
        self._registry, self._request = registry, request
        self.is_stopped = False
        """Whether the timer was stopped, as far as is known."""
        self.reset()
        reset_after_fork(self)

    def reset(self) -> None:
        """Forget the timeout, in a forked child, where the timer has dropped it."""
        self._lock = threading.RLock()  # a finalizer may call `clear`
        self._timeout: Timeout | None = None
        self._wake_ns = NEVER
        self._is_started = False

    def start(self) -> None:
        """Have the timer start its thread, before anything relies on a timeout. Idempotent.

        Timeouts need no other thread then, except while a user's timer is full.

        Raises:
            RuntimeError: The system can't start a thread.
        """
        if self._is_started:
            return
        timer = shared_timer() if self._timer is None else self._timer
        with suppress(TimerError):  # it is stopped or full, which `wake` handles
            timer.new_timeout(self, 60.0).cancel()  # any delay: it starts the thread
        self._is_started = True

    def wake(self, wake_ns: int) -> None:
        """Call the function then, or earlier; `NEVER` changes nothing."""
        with self._lock:
            if wake_ns < self._wake_ns and not self.is_stopped:
                self.clear()
                self._add_timeout(wake_ns)

    def _add_timeout(self, wake_ns: int) -> None:
        delay_s = to_seconds(max(0, wake_ns - self.now_ns()))
        try:
            timer = shared_timer() if self._timer is None else self._timer
            if timer.stopped:  # one whose loop is closed would take the timeout
                self._stopped()
                return
            self._timeout = timer.new_timeout(self, delay_s)
        except TimerStopped:
            self._stopped()
        except TimerError as error:
            self._report(error, 0.0)
            with suppress(TimerError):  # the program ends
                self._timeout = shared_timer().new_timeout(self, delay_s)
        if self._timeout is not None:
            self._wake_ns = wake_ns

    def clear(self) -> None:
        """Do not call the function; one call may be running."""
        with self._lock:
            if self._timeout is not None:
                self._timeout.cancel()
            self._timeout, self._wake_ns = None, NEVER

    # As a task of the timer

    def run(self, timeout: Timeout) -> None:
        """Call the function: the timeout has expired."""
        with self._lock:
            if timeout is self._timeout:
                self.clear()
        self._expired()

    def timer_stopped(self, _: Timeout) -> None:
        """Handle the stop of the timer while the timeout waited in it."""
        self._stopped()

    def _stopped(self) -> None:
        if not self.is_stopped:
            self.is_stopped = True
            error = TimerStopped(
                "the timer was stopped, so nothing is renewed, retried or refreshed any more; "
                "give a timer that outlives this registry, or none"
            )
            self._report(error, None)

    def _report(self, error: TimerError, delay_s: float | None) -> None:
        if self._registry:
            failed = RegistryFailed(self._registry, self._request, error, delay_s)
            EXECUTOR.submit(self, partial(emit, failed))
