"""A child process of demo.py, with which the demo talks in lines of text."""

from __future__ import annotations

import contextlib
import queue
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from pathlib import Path

START_TIMEOUT_S = 20.0


class DemoError(Exception):
    """A step of the demo failed, so the demo cannot continue."""


class ChildProcess:
    """A program that prints `ready ...` when it has started, and ends when its stdin ends.

    Args:
        program: Its file.
        arguments: Its arguments.
        log: A file for its stderr.

    Raises:
        DemoError: The process ended or was not ready in time.
    """

    def __init__(self, program: str, arguments: list[str], log: Path) -> None:
        self._program = program
        self._log = log
        with log.open("wb") as file:
            self._process = subprocess.Popen(  # noqa: S603 - a file of the demo
                [sys.executable, program, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
                start_new_session=True,  # Ctrl-C is for the demo, which then ends its processes
            )
        self.pid = self._process.pid
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        try:
            self.ready = self.wait_for("ready", START_TIMEOUT_S)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def wait_for(self, word: str, timeout: float) -> str:
        """Wait until the process prints a line with this word, and return the rest of the line."""
        with contextlib.suppress(queue.Empty):
            while line := self._lines.get(timeout=timeout):
                first, _, rest = line.strip().partition(" ")
                if first == word:
                    return rest
        log = self._log.read_text(errors="replace").strip().rpartition("\n")[2]
        raise DemoError(
            f"{self._program} did not print {word!r} within {timeout:g} s; its log: {log}"
        )

    def kill(self) -> int:
        """Kill the process with SIGKILL, and return its exit status."""
        self._process.kill()
        return self._process.wait()

    def rest(self, word: str) -> list[str]:
        """Return what follows this word in the lines that are left of a process that has ended.

        SIGKILL may have cut the last line; it is ignored.
        """
        found = []
        while (line := self._lines.get()).endswith("\n"):
            first, _, rest = line.strip().partition(" ")
            if first == word:
                found.append(rest)
        return found

    def close(self) -> None:
        """End the process, and close its pipes."""
        self.kill()
        self._reader.join()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def _read(self) -> None:
        if self._process.stdout is not None:
            for line in self._process.stdout:
                self._lines.put(line)
        self._lines.put("")
