"""A process of a benchmark that answers lines of JSON, and the part of it that does so.

`Process` starts one, and `obey` answers in it: first a line of its own, then each line of the
input. The process ends when its input does.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

ROOT = Path(__file__).parents[1]

END_S = 5.0
"""How long a process may take to end."""


class ProcessEnded(Exception):
    """A process ended before it was told to."""


class Process:
    """A module that runs in a process of its own."""

    def __init__(self, module: str, *arguments: str, env: Mapping[str, str] | None = None) -> None:
        """Start it, with variables added to the environment, and wait for its first line."""
        self._module = module
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            cwd=ROOT,
            env=os.environ | (env or {}),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.first = self.answer()

    @property
    def pid(self) -> int:
        """The number of the process."""
        return self._process.pid

    def tell(self, question: object) -> None:
        """Write a line."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()

    def answer(self) -> Any:
        """Wait for a line."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise ProcessEnded(f"{self._module} has ended, {self._process.wait()}")
        return json.loads(line)

    def ask(self, question: object) -> Any:
        """Write a line, and wait for the answer."""
        self.tell(question)
        return self.answer()

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def obey(first: object, answer: Callable[[Any], object]) -> None:
    """Print a line, and the answer to each line of the input until it ends."""
    print(json.dumps(first), flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), flush=True)
