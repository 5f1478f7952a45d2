"""Starts the process of the servers, and asks it what it has used.

The servers' process and this one are each bound to one processor, where the system can do that.
Otherwise the threads of a Python process pass the interpreter lock between two processors, or stay
on one, by chance and for long: the same server's CPU time a message was 55 µs in one run and 110 µs
in the next; bound to one processor, 46 to 47 µs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from benchmarks.calls.scale import World

ROOT = Path(__file__).parents[2]


class ServerProcess:
    """A process with one server for each subject."""

    program = "benchmarks.calls.server"

    def __init__(self, world: World, *subjects: str) -> None:
        command = [sys.executable, "-m", self.program, world, *subjects]
        self._processors = sorted(_processors())
        _bind_to(self._processors[-1:])  # for the new process, which inherits it
        self._process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        _bind_to(self._processors[:1])  # for this thread, and for those that it starts
        ports: dict[str, int] = json.loads(self._ask(None))
        self.targets = {name: f"127.0.0.1:{port}" for name, port in ports.items()}

    def cpu_ns(self) -> int:
        """The CPU time of all its threads so far."""
        return int(self._ask("cpu"))

    def _ask(self, question: str | None) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        if question is not None:
            self._process.stdin.write(f"{question}\n")
            self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"the servers' process ended with {self._process.wait()}")
        return answer

    def close(self) -> None:
        """End the process."""
        with self._process:
            assert self._process.stdin is not None
            self._process.stdin.close()
        _bind_to(self._processors)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _processors() -> set[int]:
    """The processors that this thread may run on; none if the system cannot say."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()


def _bind_to(processors: Sequence[int]) -> None:
    if processors:
        os.sched_setaffinity(0, processors)
