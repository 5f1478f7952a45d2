"""The server process of the benchmark, which can be frozen; and the limit of open files."""

from __future__ import annotations

import os
import resource
import signal
import time
from pathlib import Path

from benchmarks.calls.server_process import ServerProcess

LONG_S = 3600.0
"""The default idle timeout."""


class Far(ServerProcess):
    """A process with a server for each subject (`server.py`)."""

    program = "benchmarks.connections.server"

    def freeze(self) -> None:
        """Stop it: its connections stay open, and nothing answers."""
        os.kill(self.pid, signal.SIGSTOP)
        status = Path(f"/proc/{self.pid}/stat")
        while status.exists() and status.read_text().rpartition(")")[2].split()[0] != "T":
            time.sleep(0.001)  # a signal takes its time

    def close(self) -> None:
        """End it, frozen or not."""
        os.kill(self.pid, signal.SIGCONT)
        super().close()


def make_room() -> None:
    """Allow this process and its children as many descriptors as the system lets them have."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
