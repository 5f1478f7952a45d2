"""The server of the examples: prints what arrives, in a process of its own that can be killed."""

from __future__ import annotations

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
    """Starts, freezes, kills and starts again this file as a program, on one port."""

    def __init__(self, name: str = "server") -> None:
        self._name = name  # before each line that it prints
        # Below the ephemeral ports, one of which a knocking client may be given as its own.
        self._port = random.randrange(20_000, 32_768)
        self.target = f"127.0.0.1:{self._port}"

    def start(self) -> None:
        """Return when the server listens."""
        command = [sys.executable, __file__, self.target, self._name]
        self._process = subprocess.Popen(  # noqa: S603 - this file
            command,
            stdin=subprocess.PIPE,
            process_group=0,  # so the system ends it, even frozen, should this process die
        )
        while self._process.poll() is None:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self._port)) == 0:
                    return
            time.sleep(0.02)
        raise RuntimeError(f"the server on {self.target} ended with {self._process.returncode}")

    def freeze(self) -> None:
        """Stop it with SIGSTOP: its connections stay open, and nothing answers."""
        self._process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED)  # or it may answer once more

    def kill(self) -> None:
        """Kill it with SIGKILL."""
        with self._process:
            self._process.kill()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


class Audit(AuditServicer):
    """Yours does more."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)

    def Push(self, request: Line, context: grpc.ServicerContext) -> Receipt:  # noqa: N802
        """Take one line."""
        print(f"    {sys.argv[2]}: {request.text}", flush=True)
        return Receipt(number=next(self._numbers))


def main() -> None:
    """Serve on the target given until stdin ends: when the example that started this does."""
    server = grpc.server(futures.ThreadPoolExecutor(4))
    add_AuditServicer_to_server(Audit(), server)
    server.add_insecure_port(sys.argv[1])
    server.start()
    sys.stdin.read()


if __name__ == "__main__":
    main()
