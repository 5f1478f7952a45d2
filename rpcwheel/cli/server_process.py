"""The demo's handle of one server process: start it, hear from it, kill it."""

from __future__ import annotations

import os
import queue
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Self

__all__ = ["DemoError", "ServerProcess"]

HOST = "127.0.0.1"
START_WITHIN = 20.0
"""Seconds; a start takes half a second on an idle machine."""


class DemoError(Exception):
    """Something that the story needs did not happen; what was seen until then is judged."""


class ServerProcess:
    """One run of `rpcwheel.cli.demo_server`.

    Started by the constructor, which waits until the server listens. `kill` and `close` may be
    called in any order and more than once. The process reads a pipe that this object holds, and
    leaves when the pipe does.

    Args:
        directory: For its journal and its log; made here, one for each process.
        port: Where it must listen; 0 for a free port.
        arguments: More arguments of `demo_server`, such as those that make it hold a call.

    Raises:
        DemoError: The process ended, or said nothing; the message has its last words.
    """

    def __init__(self, directory: Path, *, port: int = 0, arguments: tuple[str, ...] = ()) -> None:
        directory.mkdir()
        self.journal = directory / "journal"
        self._log = directory / "log"
        command = [
            sys.executable,
            "-m",
            "rpcwheel.cli.demo_server",
            "--journal",
            str(self.journal),
            "--port",
            str(port),
        ]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(  # noqa: S603 - our own module, no shell
                [*command, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=_environment(),
                start_new_session=True,  # Ctrl-C is for the demo, which then ends the server
            )
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, name="rpcwheel-demo-reader", daemon=True)
        self._reader.start()
        try:
            self.port = int(self.hear("ready", START_WITHIN))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    def hear(self, word: str, timeout: float) -> str:
        """Wait for the server to say `word`, and give what follows on that line.

        Raises:
            DemoError: It ended or `timeout` seconds passed.
        """
        give_up_at = time.monotonic() + timeout
        while True:
            try:
                line = self._lines.get(timeout=max(0.0, give_up_at - time.monotonic()))
            except queue.Empty:
                raise DemoError(
                    f"the server did not say {word!r} within {timeout:g} s{self._last_words()}"
                ) from None
            if not line:
                raise DemoError(f"the server ended before it said {word!r}{self._last_words()}")
            first, _, rest = line.strip().partition(" ")
            if first == word:
                return rest

    def kill(self) -> int:
        """Kill the process with SIGKILL, if it lives; give its exit status: -9 if that was it."""
        self._process.kill()
        return self._process.wait()

    def close(self) -> None:
        """End the process, whatever it does, and let go of its pipes."""
        self.kill()
        self._reader.join()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def refuses(self) -> bool:
        """Whether the port refuses a TCP connection: nobody listens."""
        with socket.socket() as probe:
            probe.settimeout(5.0)
            try:
                probe.connect((HOST, self.port))
            except ConnectionRefusedError:
                return True
        return False

    def _read(self) -> None:
        assert self._process.stdout is not None  # noqa: S101 - for mypy: Popen was given a pipe
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def _last_words(self) -> str:
        words = self._log.read_text(errors="replace").strip()
        return f"; its last words: {words.splitlines()[-1]}" if words else ""


def _environment() -> dict[str, str]:
    """Let the server import the package that this code is part of, wherever the demo runs."""
    root = str(Path(__file__).parents[2])
    path = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": f"{root}{os.pathsep}{path}" if path else root}
