"""The loop on which a channel is at home, and what other threads want done there."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any

from rpcwheel.durations import to_seconds
from rpcwheel.transport._drain import timeout_on

if TYPE_CHECKING:
    from collections.abc import Callable

    from rpcwheel.timer.api import Timer

    Job = Callable[[], object]

__all__ = ["Home"]


class Home:
    """Has jobs done on one loop; `do` may be called on any thread."""

    def __init__(
        self,
        timer: Timer | None,
        run: Callable[[Job, object], object],
        arrived: Job,
    ) -> None:
        """Begin without a loop.

        Args:
            timer: For jobs that are to be done later.
            run: Runs a job of another thread, and tells what it raises, and of whom.
            arrived: Called when there is a loop at last.
        """
        self._timer = timer
        self._run = run
        self._arrived = arrived
        self._loop: asyncio.AbstractEventLoop | None = None
        self._jobs: deque[Job] = deque()  # in order

    @property
    def known(self) -> bool:
        """Whether there is a loop."""
        return self._loop is not None

    def enter(self) -> asyncio.AbstractEventLoop:
        """The running loop, which is the channel's from now on.

        Raises:
            RuntimeError: None runs.
        """
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._loop = loop
            self._work()
            self._arrived()
        return loop

    def do(self, job: Job) -> None:
        """Do it on the loop: now if this is there, else soon, in the order of these calls.

        Before there is a loop it is done as soon as there is one. Only of a job that is done now
        does it come out what it raises.
        """
        loop, here = self._loop, asyncio._get_running_loop()  # noqa: SLF001 - it is documented, and does not raise
        if here is not None and (here is loop or loop is None or loop.is_closed()):
            self.enter()
            self._jobs.append(job)
            self._work(job)
            return
        self._jobs.append(job)
        if loop is not None:
            with contextlib.suppress(RuntimeError):  # it is closed: nobody calls any more
                loop.call_soon_threadsafe(self._work)

    def _work(self, own: Job | None = None) -> None:
        while self._jobs:
            job = self._jobs.popleft()
            if job is own:
                job()
            else:
                self._run(job, "a change of its members")

    def after(self, delay_ns: int, job: Job) -> Any:
        """Do it on the running loop after a while."""
        loop = self.enter()
        timeout = timeout_on(self._timer, partial(_call_soon, loop, job), delay_ns)
        return loop.call_later(to_seconds(delay_ns), job) if timeout is None else timeout


def _call_soon(loop: asyncio.AbstractEventLoop, job: Job, _: object) -> None:
    """What the timer does, on its own thread."""
    with contextlib.suppress(RuntimeError):  # the loop is closed: nothing runs any more
        loop.call_soon_threadsafe(job)
