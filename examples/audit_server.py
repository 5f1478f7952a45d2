"""The server of the examples: a separate process that prints each request and can be killed."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import socket
import subprocess
import sys
import time
from concurrent import futures
from typing import Self

import grpc
from audit_pb2 import Line, Receipt
from audit_pb2_grpc import AuditServicer, add_AuditServicer_to_server


class AuditServer:
    """Runs this file as a server process that can be frozen, killed and restarted on its port."""

    def __init__(self, name: str = "server") -> None:
        self._name = name  # printed before each request
        self._port = free_port()
        self.target = f"127.0.0.1:{self._port}"

    def start(self) -> None:
        """Return when the server listens."""
        command = [sys.executable, __file__, self.target, self._name]
        self._process = subprocess.Popen(  # noqa: S603 - this file
            command,
            stdin=subprocess.PIPE,
            process_group=0,  # so that the system ends it with this process
        )
        while self._process.poll() is None:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self._port)) == 0:
                    return
            time.sleep(0.02)
        raise RuntimeError(f"the server on {self.target} ended with {self._process.returncode}")

    def freeze(self) -> None:
        """Send SIGSTOP: its connections stay open, and it does not answer."""
        self._process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED)  # otherwise it may still answer a call

    def kill(self) -> None:
        """Send SIGKILL."""
        with self._process:
            self._process.kill()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


def free_port() -> int:
    """Find a port below the ephemeral ones, which a client that connects may get as its own."""
    while True:
        port = random.randrange(20_000, 32_768)
        with contextlib.suppress(OSError), socket.socket() as tried:
            tried.bind(("127.0.0.1", port))
            return port


class Audit(AuditServicer):
    """Prints the lines that it gets."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)

    def Push(self, request: Line, context: grpc.ServicerContext) -> Receipt:  # noqa: N802
        """Take one line."""
        print(f"    {sys.argv[2]}: {request.text}", flush=True)
        return Receipt(number=next(self._numbers))


def main() -> None:
    """Serve on the given target until stdin ends, when the parent process ends."""
    server = grpc.server(futures.ThreadPoolExecutor(4))
    add_AuditServicer_to_server(Audit(), server)
    server.add_insecure_port(sys.argv[1])
    server.start()
    sys.stdin.read()


if __name__ == "__main__":
    main()
