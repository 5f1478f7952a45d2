"""Begins the attempts to each target as its `Pacing` allows.

A call that is due is given to the pacer of its target, which begins its attempt at once or later:
when another attempt has ended, or when time has passed. Calls begin in the order in which they were
given. No lock is held while an attempt is started.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any, Final, Protocol

from rpcwheel._concurrency.callbacks import callable_name
from rpcwheel.durations import NEVER
from rpcwheel.errors import TimerError, TimerStopped
from rpcwheel.events import ExecutorRejected, emit

from .pacing import Outcome, Pacing

if TYPE_CHECKING:
    from .held_calls import HeldCalls
    from .queued_call import QueuedCall
    from .timeouts import Timeouts


LOOP_CHECK_NS: Final = 1_000_000_000
"""While the window is full, how often it is checked if event loops were closed under attempts."""

FIRST_FULL_SIZE: Final = 64
"""The number of pacers at which unused ones are dropped first; later, when as many again came."""


class PacedQueue(Protocol):
    """A `FailbackQueue`, as its pacers and its journal see it."""

    name: str
    calls: HeldCalls
    pacers: Pacers
    on_loops: bool
    """Whether attempts run on event loops, which may be closed under them."""
    durable: bool
    """Whether its calls are in a journal, which gives them back after the timer was stopped."""

    def adopt(self, call: QueuedCall, delay_ns: int) -> None:
        """Attempt a call that was taken from a journal when it is due, or give it up now."""

    def start_now(self, call: QueuedCall, pacer: Pacer, began_ns: int) -> bool:
        """Start an attempt; False if it is not wanted any more. Any thread; does not block.

        The attempt reports its end to the pacer.
        """

    def end_lost_attempts(self) -> None:
        """End attempts whose event loop was closed. Any thread; does not block."""

    def on_timer_stopped(self) -> None:
        """Report the calls that wait for a timer that was stopped. Any thread."""


class Pacer:
    """Begins the attempts to one target. Thread-safe.

    One thread at a time starts attempts, those of other threads too: an attempt that ends inside of
    the function that starts it does not make the stack deeper.
    """

    def __init__(self, pacing: Pacing, timeouts: Timeouts) -> None:
        self._pacing = pacing
        self._timeouts = timeouts
        self._lock = threading.RLock()  # a finalizer may make a call that fails
        self._ready: deque[tuple[PacedQueue, QueuedCall]] = deque()
        self._is_starting = False
        self._wakes_at_ns = NEVER

    def add(self, queue: PacedQueue, call: QueuedCall) -> None:
        """Begin an attempt of a call as soon as allowed."""
        with self._lock:
            self._ready.append((queue, call))
        self.start()

    def ended(self, began_ns: int, outcome: Outcome) -> None:
        """Note that an attempt has ended, and begin others."""
        with self._lock:
            self._pacing.ended(began_ns, self._timeouts.now_ns(), outcome)
        self.start()

    def capacity(self, within_ns: int) -> int:
        """Return how many calls can be at hand; see `Pacing.capacity`."""
        with self._lock:
            return self._pacing.capacity(within_ns)

    def is_new(self) -> bool:
        """Whether no call waits and the pacing has nothing to remember."""
        with self._lock:
            return not self._ready and self._pacing.is_new(self._timeouts.now_ns())

    def start(self) -> None:
        """Begin the attempts that may begin now."""
        with self._lock:
            if self._is_starting:  # by that thread, which looks again
                return
            self._is_starting = True
        try:
            while (begun := self._next()) is not None:
                queue, call, began_ns = begun
                if not queue.start_now(call, self, began_ns):
                    with self._lock:
                        self._pacing.ended(began_ns, began_ns, Outcome.UNKNOWN)
        except BaseException:
            self._is_starting = False
            raise

    def _next(self) -> tuple[PacedQueue, QueuedCall, int] | None:
        """Take the next call that may begin now.

        None: there is none, and a timeout or the end of an attempt calls `start` again. If no
        timeout can be set, the next call begins anyway, unless an attempt runs whose end will start
        it.
        """
        can_wait = True
        while True:
            with self._lock:
                while self._ready and not self._ready[0][1].is_at_pacer:
                    self._ready.popleft()
                if not self._ready:
                    self._is_starting = False
                    return None
                now_ns = self._timeouts.now_ns()
                at_ns = self._pacing.next_ns(now_ns)
                if at_ns <= now_ns or not (can_wait or self._pacing.in_flight):
                    queue, call = self._ready.popleft()
                    self._pacing.began(now_ns, call.timeout_ns)
                    return queue, call, now_ns
                waiting = self._ready[0][0]
                if at_ns == NEVER and waiting.on_loops:  # an attempt that is lost does not end
                    at_ns = now_ns + LOOP_CHECK_NS
                if not can_wait or at_ns >= min(NEVER, self._wakes_at_ns):
                    self._is_starting = False
                    return None
                self._wakes_at_ns = at_ns
            can_wait = self._wake_after(at_ns - now_ns, waiting)

    def _wake_after(self, delay_ns: int, queue: PacedQueue) -> bool:
        """Set a timeout; False if that is not possible now: then attempts follow each other.

        If the timer was stopped, the calls of a queue in the memory are reported, and end.
        """
        try:
            self._timeouts.set(delay_ns, self.wake, self._timer_stopped, queue.name)
        except TimerStopped:
            self._report_stop()
            if not queue.durable:
                return True
        except (TimerError, RuntimeError) as error:  # RuntimeError: no thread can be started
            emit(ExecutorRejected(timer=queue.name, task=callable_name(self.start), error=error))
        else:
            return True
        self._wakes_at_ns = NEVER
        return False

    def wake(self) -> None:
        """Begin attempts whose time has come. On the timer's thread."""
        self._wakes_at_ns = NEVER
        with self._lock:
            is_full = self._pacing.in_flight >= self._pacing.window
        if is_full:
            for queue in self._queues():
                queue.end_lost_attempts()
        self.start()

    def _timer_stopped(self) -> None:
        self._wakes_at_ns = NEVER
        self._report_stop()

    def _report_stop(self) -> None:
        """Report the calls that wait for the timer."""
        for queue in self._queues():
            queue.on_timer_stopped()

    def _queues(self) -> list[PacedQueue]:
        """List the queues of the calls that wait."""
        with self._lock:
            return list({id(queue): queue for queue, _ in self._ready}.values())


class Pacers:
    """The pacers of one queue, or of all queues of a worker, by target. Thread-safe."""

    def __init__(self, rate: float | None, max_in_flight: int | None, timeouts: Timeouts) -> None:
        """Begin without a pacer; the arguments are those of `Pacing` and `Pacer`."""
        self._rate = rate
        self._max_in_flight = max_in_flight
        self._timeouts = timeouts
        self.reset()

    def reset(self) -> None:
        """Begin without a pacer, in a forked child."""
        self._lock = threading.RLock()
        self._by_name: dict[str, Pacer] = {}
        self._by_channel: weakref.WeakKeyDictionary[Any, Pacer] = weakref.WeakKeyDictionary()
        self._full_size = FIRST_FULL_SIZE

    def limit(self, rate: float | None, max_in_flight: int | None) -> None:
        """Change the limits, before the first attempt; None: leave that limit as it is."""
        self._rate = self._rate if rate is None else rate
        self._max_in_flight = self._max_in_flight if max_in_flight is None else max_in_flight

    def of(self, key: object) -> Pacer:
        """Get the pacer of a target or function, or of a channel, as long as that object exists."""
        pacers: Any = self._by_name if isinstance(key, str) else self._by_channel
        pacer: Pacer | None = pacers.get(key)
        if pacer is None:
            with self._lock:
                if len(self._by_name) >= self._full_size:
                    self._drop_unused()
                pacing = Pacing(self._rate, self._max_in_flight)
                pacer = pacers.setdefault(key, Pacer(pacing, self._timeouts))
        return pacer

    def _drop_unused(self) -> None:
        """Drop the pacers that have nothing to remember. Under the lock."""
        for name, pacer in list(self._by_name.items()):
            if pacer.is_new():
                del self._by_name[name]
        self._full_size = max(FIRST_FULL_SIZE, 2 * len(self._by_name))
