"""Server processes of the registry examples, which are started, stopped and killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Callable


class Server:
    """A process `python PROGRAM NAME URL`. A context manager that starts and kills it."""

    def __init__(self, program: str, name: str, url: str) -> None:
        self._command = [sys.executable, program, name, url]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the process. It is published in the registry as soon as it serves."""
        self._forget()
        self._process = subprocess.Popen(self._command, stdin=subprocess.PIPE)  # noqa: S603 - ours

    @property
    def running(self) -> bool:
        """Whether the process runs."""
        return self._process is not None and self._process.poll() is None

    def stop(self) -> None:
        """Send SIGTERM: it stops gracefully."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL: it withdraws nothing."""
        self._end(signal.SIGKILL)

    def _end(self, signum: int) -> None:
        if self._process is not None:
            self._process.send_signal(signum)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._forget()

    def _forget(self) -> None:
        if self._process is not None:
            self._process.communicate()


def when_parent_has_ended(end: Callable[[], object]) -> None:
    """Call `end` when the parent process has ended."""

    def wait() -> None:
        os.read(0, 1)
        end()

    threading.Thread(target=wait, daemon=True).start()
