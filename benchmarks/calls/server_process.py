"""Starts the process of the servers, and asks it what it has used.

The servers' process and this one are each bound to one processor, where the system can do that.
Otherwise the threads of a Python process pass the interpreter lock between two processors, or stay
on one, by chance and for long: the same server's CPU time a message was 55 µs in one run and 110 µs
in the next; bound to one processor, 46 to 47 µs.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from benchmarks._process import Process
from benchmarks.calls.scale import World


class ServerProcess(Process):
    """A process with one server for each subject."""

    program = "benchmarks.calls.server"

    def __init__(self, world: World, *subjects: str) -> None:
        self._processors = sorted(_processors())
        _bind_to(self._processors[-1:])  # for the new process, which inherits it
        super().__init__(self.program, world, *subjects)
        _bind_to(self._processors[:1])  # for this thread, and for those that it starts
        self.targets = {name: f"127.0.0.1:{port}" for name, port in self.first.items()}

    def cpu_ns(self) -> int:
        """The CPU time of all its threads so far."""
        return int(self.ask("cpu"))

    def close(self) -> None:
        """End the process."""
        super().close()
        _bind_to(self._processors)


def _processors() -> set[int]:
    """The processors that this thread may run on; none if the system cannot say."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()


def _bind_to(processors: Sequence[int]) -> None:
    if processors:
        os.sched_setaffinity(0, processors)
