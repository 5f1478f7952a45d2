"""The server of demo.py, in a process of its own that can be killed.

Run as a program, it writes each request to a journal, as the bytes that arrived, before it answers.
It prints `ready PORT` and `holding NUMBER`, and ends when its stdin ends, so that it never outlives
the demo.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import queue
import random
import socket
import subprocess
import sys
import threading
from concurrent import futures
from typing import TYPE_CHECKING, Self

import grpc
from audit_pb2 import Line, Receipt

if TYPE_CHECKING:
    from pathlib import Path

HOST = "127.0.0.1"

PORTS = range(20_000, 32_768)
"""Below the ephemeral ports. A client that connects to an ephemeral port of a dead server may get
that port as its own, connect to itself, and so keep the server from listening there again."""

START_TIMEOUT_S = 20.0


class DemoError(Exception):
    """A step of the demo failed, so the demo cannot continue."""


class ServerProcess:
    """One process of the server. The constructor returns when it listens.

    Args:
        directory: A new directory for its journal and its log.
        port: The port to listen on; 0 for a free one.
        arguments: More arguments of the program.

    Raises:
        DemoError: The process ended or did not listen in time.
    """

    def __init__(self, directory: Path, port: int, *arguments: str) -> None:
        directory.mkdir()
        self.journal = directory / "journal"
        self._log = directory / "log"
        command = [sys.executable, __file__, str(self.journal), str(port), *arguments]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(  # noqa: S603 - this file
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,  # Ctrl-C is for the demo, which then ends the server
            )
        self.pid = self._process.pid
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        try:
            self.port = int(self.wait_for("ready", START_TIMEOUT_S))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def wait_for(self, word: str, timeout: float) -> str:
        """Wait until the server prints a line with this word, and return the rest of the line."""
        with contextlib.suppress(queue.Empty):
            while line := self._lines.get(timeout=timeout):
                first, _, rest = line.strip().partition(" ")
                if first == word:
                    return rest
        log = self._log.read_text(errors="replace").strip().rpartition("\n")[2]
        raise DemoError(f"the server did not print {word!r} within {timeout:g} s; its log: {log}")

    def kill(self) -> int:
        """Kill the process with SIGKILL, and return its exit status."""
        self._process.kill()
        return self._process.wait()

    def close(self) -> None:
        """End the process, and close its pipes."""
        self.kill()
        self._reader.join()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def refuses_connections(self) -> bool:
        """Return whether nothing listens on the port."""
        with socket.socket() as probe:
            return probe.connect_ex((HOST, self.port)) != 0

    def requests(self) -> list[bytes]:
        """Return the requests in the journal. SIGKILL may have cut the last line; it is ignored."""
        if not self.journal.exists():
            return []
        *lines, _unfinished = self.journal.read_text("ascii").split("\n")
        return [bytes.fromhex(line) for line in lines]

    def _read(self) -> None:
        if self._process.stdout is not None:
            for line in self._process.stdout:
                self._lines.put(line)
        self._lines.put("")


class Audit(grpc.GenericRpcHandler):
    """`/shop.Audit/Push` on bytes, as parsing could hide that a request has changed.

    Args:
        journal: The file descriptor of the journal.
        hold_before: The number of an order that is neither recorded nor answered.
        hold_after: The number of an order that is recorded and not answered.
    """

    def __init__(self, journal: int, hold_before: int | None, hold_after: int | None) -> None:
        self._journal = journal
        self._hold_before = hold_before
        self._hold_after = hold_after

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        """Return the handler of `Push`; it has no deserializer, so it gets bytes."""
        if details.method != "/shop.Audit/Push":
            return None
        handler: grpc.RpcMethodHandler = grpc.unary_unary_rpc_method_handler(
            self._push, response_serializer=Receipt.SerializeToString
        )
        return handler

    def _push(self, request: bytes, _: grpc.ServicerContext) -> Receipt:
        number = int(Line.FromString(request).text.split()[1])  # "order 7 ..."
        if number == self._hold_before:
            self._hold(number)
        # One write without a buffer, so SIGKILL cannot undo it.
        os.write(self._journal, request.hex().encode() + b"\n")
        if number == self._hold_after:
            self._hold(number)
        return Receipt(number=number)

    def _hold(self, number: int) -> None:
        print("holding", number, flush=True)
        threading.Event().wait()


def main() -> None:
    """Serve until stdin ends, or until killed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("journal")
    parser.add_argument("port", type=int)
    parser.add_argument("--hold-before", type=int)
    parser.add_argument("--hold-after", type=int)
    args = parser.parse_args()
    server = grpc.server(futures.ThreadPoolExecutor(8), options=[("grpc.so_reuseport", 0)])
    journal = os.open(args.journal, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    server.add_generic_rpc_handlers([Audit(journal, args.hold_before, args.hold_after)])
    for port in [args.port] if args.port else random.sample(PORTS, 50):
        with contextlib.suppress(RuntimeError):  # in use
            server.add_insecure_port(f"{HOST}:{port}")
            server.start()
            print("ready", port, flush=True)
            sys.stdin.read()
            os._exit(0)  # a normal exit would wait for the calls that are held
    sys.exit(f"no free port on {HOST}")


if __name__ == "__main__":
    main()
