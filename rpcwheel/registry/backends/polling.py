"""How a backend whose engine is asked keeps its watches true: one job at a time, on EXECUTOR.

The engine's own notices (a node has changed, a message has come) are hints only: any thread may
give them, and what follows is a look at the engine. It is looked at without a hint too, now and
then, as a hint can be lost; and again and again while it fails.
"""

from __future__ import annotations

import random
import threading
from functools import partial
from typing import TYPE_CHECKING, Final

from rpcwheel._concurrency.executor import EXECUTOR, reset_after_fork
from rpcwheel.durations import to_ns
from rpcwheel.errors import RegistryError, RegistryUnavailable
from rpcwheel.observe import ExecutorRejected, emit
from rpcwheel.registry.one_shot_timer import OneShotTimer

if TYPE_CHECKING:
    from collections.abc import Callable

    from rpcwheel.errors import TimerError
    from rpcwheel.registry.backend import View, Watcher
    from rpcwheel.timer.api import Timer

__all__ = ["PollingWatcher"]

FIRST_RETRY_S: Final = 0.2

_JITTER: Final = random.SystemRandom()
"""Not the program's own, whose order of numbers is its business; and forked children differ."""


class PollingWatcher:
    """All watches of one backend. Thread-safe; nothing in here blocks but `read`, on EXECUTOR.

    In a forked child it begins anew, without watches.
    """

    def __init__(
        self,
        read: Callable[[str, View | None], View],
        *,
        timer: Timer | None,
        period_s: float,
        retry_s: float,
        anew: bool,
    ) -> None:
        """Take note.

        Args:
            read: Asks the engine for a service; gets what it has answered last (None after contact
                was lost), and may give that very object back. One call at a time. May raise
                RegistryError.
            timer: None for `shared_timer()`, when the first watch comes.
            period_s: Seconds between looks that nobody has asked for, 10 % more or less.
            anew: Whether those looks read everything, or what `read` was told last does.
            retry_s: The longest wait after a failed look; the first is at random up to 0.2 s.
        """
        self._read = read
        self._timer = timer
        self._period_s = period_s
        self._retry_s = retry_s
        self._anew = anew
        self._closed = False
        self.reset()
        reset_after_fork(self)

    def reset(self) -> None:
        """Start anew, without watches, in a forked child."""
        self._changed = threading.Lock()
        self._watches: dict[str, list[_Watch]] = {}
        self._views: dict[str, View] = {}
        self._dirty: dict[str, None] = {}  # services to look at, in order
        self._late: set[str] = set()  # those that failed
        self._doubt: str | None = None  # to be told to all, before anything else
        self._running = False
        self._failures = 0
        self._period = OneShotTimer(self._timer, self._period_over, self._refused)
        self._retry = OneShotTimer(self._timer, self._retry_due, self._refused)
        self._planned: set[OneShotTimer] = set()  # those that will ring

    def watch(self, service: str, watcher: Watcher) -> _Watch:
        """Have the watcher told from now on, soon for the first time."""
        watch = _Watch(self, service, watcher)
        with self._changed:
            if self._closed:
                return watch
            self._watches.setdefault(service, []).append(watch)
            self._dirty[service] = None
            self._start()
            self._schedule(self._period, _JITTER.uniform(0.9, 1.1) * self._period_s)
        return watch

    def look(self, service: str | None = None) -> None:
        """Look at this service soon; None: at all."""
        with self._changed:
            for name in self._watches if service is None else (service,):
                if name in self._watches:
                    self._dirty[name] = None
            self._start()

    def lost(self, reason: str) -> None:
        """Tell all that contact was lost, once until they see the engine again; and look."""
        with self._changed:
            self._doubt = reason
            self._views.clear()
            self._dirty.update(dict.fromkeys(self._watches))
            self._start()

    def close(self) -> None:
        """End all watches: nothing is told after this returns. Idempotent."""
        with self._changed:
            self._closed = True
            watches = [watch for each in self._watches.values() for watch in each]
            self._plan_nothing()
        for watch in watches:
            watch.close()

    @property
    def services(self) -> frozenset[str]:
        """Those that are watched."""
        with self._changed:
            return frozenset(self._watches)

    def _start(self) -> None:
        """With the lock: have a job run if there is work."""
        if not self._running and not self._closed and (self._dirty or self._doubt is not None):
            self._running = True
            EXECUTOR.submit(self, self._work)

    def _schedule(self, alarm: OneShotTimer, delay_s: float) -> None:
        """With the lock: look again then, if that is not planned already."""
        if alarm not in self._planned and not self._closed and self._watches:
            self._planned.add(alarm)
            alarm.wake(alarm.now_ns() + to_ns(delay_s))

    def _plan_nothing(self) -> None:
        """With the lock."""
        for alarm in self._planned:
            alarm.clear()
        self._planned.clear()

    def _rang(self, alarm: OneShotTimer) -> bool:
        """With the lock: take note of it; False if it has rung before."""
        alarm.rang()
        planned = alarm in self._planned
        self._planned.discard(alarm)
        return planned

    def _refused(self, error: TimerError) -> None:
        told = ExecutorRejected(timer="registry", task=repr(self._read), error=error)
        EXECUTOR.submit(told, partial(emit, told))

    def _period_over(self) -> None:
        with self._changed:
            if not self._rang(self._period):
                return
            if self._anew:
                self._views.clear()
            self._dirty.update(dict.fromkeys(self._watches))
            self._start()
            self._schedule(self._period, _JITTER.uniform(0.9, 1.1) * self._period_s)

    def _retry_due(self) -> None:
        with self._changed:
            if not self._rang(self._retry):
                return
            self._dirty.update(dict.fromkeys(self._late & self._watches.keys()))
            self._late.clear()
            self._start()

    # On a thread of EXECUTOR

    def _work(self) -> None:
        try:
            while self._step():
                pass
        except BaseException:
            with self._changed:  # a bug, told by EXECUTOR; those to come must not wait for this job
                self._running = False
            raise

    def _step(self) -> bool:
        """Do the next thing; False if there is none."""
        with self._changed:
            reason, self._doubt = self._doubt, None
            if self._closed or (reason is None and not self._dirty):
                self._running = False
                return False
            service = "" if reason is not None else next(iter(self._dirty))
            self._dirty.pop(service, None)
            known = self._views.get(service)
            told = tuple(
                watch
                for name, watches in self._watches.items()
                for watch in watches
                if reason is not None or name == service
            )
        if reason is not None:
            for watch in told:
                watch.suspect(reason)
        elif told:
            self._look_at(service, known, told)
        return True

    def _look_at(self, service: str, known: View | None, watches: tuple[_Watch, ...]) -> None:
        try:
            view = self._read(service, known)
        except RegistryError as error:
            self._failed(service, error)
            return
        with self._changed:
            self._failures = 0
            if self._doubt is not None:  # lost meanwhile: it may be from before, and is read again
                return
            self._views[service] = view
        for watch in watches:
            watch.saw(view)

    def _failed(self, service: str, error: RegistryError) -> None:
        with self._changed:
            self._late.add(service)
            if isinstance(error, RegistryUnavailable):  # it would not answer the others either
                self._late.update(self._watches)
                self._dirty.clear()
                self._views.clear()
                doubtful = [watch for each in self._watches.values() for watch in each]
            else:
                self._views.pop(service, None)
                doubtful = list(self._watches.get(service, ()))
            most = min(self._retry_s, FIRST_RETRY_S * 2 ** min(self._failures, 20))
            self._failures += 1
            self._schedule(self._retry, _JITTER.uniform(0, most))
        for watch in doubtful:
            watch.suspect(str(error))

    def _drop(self, watch: _Watch) -> None:
        with self._changed:
            left = [each for each in self._watches.pop(watch.service, ()) if each is not watch]
            if left:
                self._watches[watch.service] = left
            else:
                self._views.pop(watch.service, None)
            if not self._watches:
                self._plan_nothing()


class _Watch:
    """One watcher of one service."""

    def __init__(self, following: PollingWatcher, service: str, watcher: Watcher) -> None:
        self.service = service
        self._following = following
        self._watcher = watcher
        self._telling = threading.RLock()  # a watcher may close its own watch
        self._open = True
        self._doubtful = False

    def saw(self, view: View) -> None:
        with self._telling:
            if self._open:
                self._doubtful = False
                self._watcher.saw(view)

    def suspect(self, reason: str) -> None:
        with self._telling:
            if self._open and not self._doubtful:
                self._doubtful = True
                self._watcher.suspect(reason)

    def close(self) -> None:
        with self._telling:
            self._open = False
        self._following._drop(self)  # noqa: SLF001 - its other half
