"""Which services are to be watched, and which watches run: by the latest intent, as `core.py`.

A watch goes on by itself whatever happens to its engine. What can fail is to begin one, and a
subscription may be over, or another in its place, before that is done. Pure, as the core.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from rpcwheel.durations import NEVER

if TYPE_CHECKING:
    from .provider import Watch, Watcher
    from .rules import RegistryRules

__all__ = ["Task", "Watching"]


class Task(NamedTuple):
    """A watch to close, or (if there is none to close) one to begin."""

    service: str
    watcher: Watcher
    watch: Watch | None


@dataclass(slots=True)
class _Watched:
    wanted: Watcher | None
    runs: tuple[Watcher, Watch] | None = None
    """For whom, and what is to be closed."""
    attempts: int = 0
    due_ns: int = NEVER


class Watching:
    """All watches of one process at one registry. Not thread-safe."""

    def __init__(self, rules: RegistryRules) -> None:
        self._rules = rules
        self._all: dict[str, _Watched] = {}
        self._task: Task | None = None

    def want(self, service: str, watcher: Watcher | None, now_ns: int) -> None:
        """Have a service watched for this one, in the place of who was before; None: no more."""
        watched = self._all.get(service)
        if watched is None:
            if watcher is None:
                return
            watched = self._all[service] = _Watched(watcher)
        watched.wanted, watched.attempts, watched.due_ns = watcher, 0, now_ns

    def close(self, now_ns: int) -> None:
        """Have nothing watched any more."""
        for service in self._all:
            self.want(service, None, now_ns)

    def next_task(self, now_ns: int) -> Task | None:
        """What to do now; it is then on its way. None: nothing, or something is already."""
        if self._task is not None:
            return None
        for service, watched in tuple(self._all.items()):
            if watched.due_ns > now_ns:
                continue
            watched.due_ns = NEVER
            self._task = self._step(service, watched)
            if self._task is not None:
                return self._task
        return None

    def delay_ns(self, task: Task, error: BaseException) -> int:
        """How long to wait as a task has failed. It asks the user's strategy: without the lock."""
        attempts = self._all[task.service].attempts + 1
        return self._rules.retry_ns(attempts, elapsed_ns=0, error=error)

    def done(
        self,
        task: Task,
        now_ns: int,
        *,
        watch: Watch | None = None,
        error: BaseException | None,
        delay_ns: int = 0,
    ) -> int | None:
        """Take the result of a task; gives how long it waits if it has failed, and is repeated.

        `delay_ns` is what `delay_ns()` gave for the error.
        """
        self._task = None
        watched = self._all[task.service]
        if task.watch is not None:
            watched.runs = None
        elif watch is not None:
            watched.runs = (task.watcher, watch)
        if error is None or watched.wanted is not task.watcher:
            watched.attempts = 0
            watched.due_ns = now_ns
            return None
        watched.attempts += 1
        watched.due_ns = now_ns + delay_ns
        return delay_ns

    def next_wake_ns(self) -> int:
        """When `next_task` is to be asked again, if nothing happens before."""
        if self._task is not None:
            return NEVER
        return min((watched.due_ns for watched in self._all.values()), default=NEVER)

    def _step(self, service: str, watched: _Watched) -> Task | None:
        runs = watched.runs
        if runs is not None and runs[0] is not watched.wanted:
            return Task(service, runs[0], runs[1])
        if runs is None and watched.wanted is not None:
            return Task(service, watched.wanted, None)
        if runs is None:
            del self._all[service]
        return None
