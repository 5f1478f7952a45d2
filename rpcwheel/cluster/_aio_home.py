"""The loop on which a channel is at home, and what other threads want done there."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Any

from rpcwheel._concurrency.callbacks import run_callback
from rpcwheel._concurrency.loop import call_on_loop, running_loop
from rpcwheel.durations import to_seconds

from ._timeout import timeout_on

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
        name: str,
        arrived: Job,
    ) -> None:
        """Begin without a loop.

        Args:
            timer: For jobs that are to be done later.
            name: Of the channel, in events.
            arrived: Called when there is a loop at last.
        """
        self._timer = timer
        self._name = name
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
        loop, here = self._loop, running_loop()
        if here is not None and (here is loop or loop is None or loop.is_closed()):
            self.enter()
            self._jobs.append(job)
            self._work(job)
            return
        self._jobs.append(job)
        if loop is not None:
            call_on_loop(loop, self._work)

    def _work(self, own: Job | None = None) -> None:
        while self._jobs:
            job = self._jobs.popleft()
            if job is own:
                job()
            else:
                run_callback(self._name, job, name="a change of its members")

    def after(self, delay_ns: int, job: Job) -> Any:
        """Do it on the running loop after a while."""
        loop = self.enter()
        timeout = timeout_on(self._timer, lambda _: call_on_loop(loop, job), delay_ns)
        return loop.call_later(to_seconds(delay_ns), job) if timeout is None else timeout
