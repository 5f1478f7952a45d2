"""Reports of overloads of a server, and of the throttling of a client."""

from __future__ import annotations

import threading
from functools import partial
from typing import TYPE_CHECKING, Final

from rpcwheel._concurrency.callbacks import weak_callback
from rpcwheel._concurrency.executor import EXECUTOR
from rpcwheel.durations import to_seconds
from rpcwheel.events import emit
from rpcwheel.timer.manual import clock_of, start_timeout

if TYPE_CHECKING:
    from collections.abc import Callable

    from rpcwheel.events import Event
    from rpcwheel.timer import Timeout
    from rpcwheel.timer.api import Timer

QUIET_NS: Final = 5_000_000_000
"""A series of refusals has ended if no call was refused for this long."""


class Refusals:
    """Reports when calls begin to be refused, and when that has ended. Any thread may use it.

    Its events are emitted on a worker, because sinks and log handlers of users may block. A begin
    is not reported if the timer takes no timeout, which could not report the end.
    """

    def __init__(
        self,
        timer: Timer | None,
        began: Callable[[], Event],
        ended: Callable[[int, float], Event],
    ) -> None:
        """Begin without refused calls.

        Args:
            timer: Any rpcwheel timer; None for `shared_timer()`. It does not keep this alive.
            began: Makes the event of the start.
            ended: Makes the event of the end, from the number of refused calls, and the seconds
                from the first one to the last one.
        """
        self._timer = timer
        self._now_ns = clock_of(timer)
        self._began = began
        self._ended = ended
        self._lock = threading.RLock()
        self._began_ns = self._last_ns = 0
        self.calls = 0
        """The number of calls refused in the current series; 0 if there is none."""

    def reset_after_fork(self) -> None:
        """Go on in a forked child, in which the timeout that looks for the end is gone."""
        self._lock, self.calls = threading.RLock(), 0

    def note(self, calls: int = 1) -> None:
        """Note that calls are refused now."""
        with self._lock:
            begins = not self.calls
            self.calls += calls
            self._last_ns = self._now_ns()
            if not begins:
                return
            self._began_ns = self._last_ns
        if self._check_after(QUIET_NS):
            self._emit(self._began())
        else:
            with self._lock:
                self.calls = 0

    def _check_after(self, delay_ns: int) -> bool:
        check = weak_callback(self._check)
        return start_timeout(self._timer, check, to_seconds(delay_ns)) is not None

    def _check(self, _: Timeout) -> None:
        left_ns = self._end(QUIET_NS)
        if left_ns > 0 and not self._check_after(left_ns):
            self._end(0)

    def _end(self, quiet_ns: int) -> int:
        """End the series if no call was refused for `quiet_ns`. Else return the time until then."""
        with self._lock:
            if not self.calls:  # a `ManualTimer` keeps the timeouts of the parent in a forked child
                return 0
            left_ns = self._last_ns + quiet_ns - self._now_ns()
            if left_ns > 0:
                return left_ns
            calls, self.calls = self.calls, 0
            lasted_s = to_seconds(self._last_ns - self._began_ns)
        self._emit(self._ended(calls, lasted_s))
        return 0

    def _emit(self, event: Event) -> None:
        EXECUTOR.submit(("refusals", id(self)), partial(emit, event))
