"""The server of demo.py, in a process of its own that can be killed.

Run as a program, it records each request in a file before it answers: the bytes that arrived, and
the idempotency key. It prints `ready PORT` and `holding NUMBER`, and ends when its stdin ends, so
that it never outlives the demo.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import socket
import sys
import threading
from concurrent import futures
from typing import TYPE_CHECKING, NamedTuple

import grpc
from audit_pb2 import Line, Receipt
from demo_process import ChildProcess

if TYPE_CHECKING:
    from pathlib import Path

HOST = "127.0.0.1"

PORTS = range(20_000, 32_768)
"""Below the ephemeral ports. A client that connects to an ephemeral port of a dead server may get
that port as its own, connect to itself, and so keep the server from listening there again."""

NO_KEY = "-"
"""Stands for the idempotency key of a call that has none."""


class Received(NamedTuple):
    """A request as it arrived."""

    request: bytes
    key: str
    """Its idempotency key; "" if it has none."""


class ServerProcess(ChildProcess):
    """One process of the server. The constructor returns when it listens.

    Args:
        directory: A new directory for its record of requests and its log.
        port: The port to listen on; 0 for a free one.
        arguments: More arguments of the program.

    Raises:
        DemoError: The process ended or did not listen in time.
    """

    def __init__(self, directory: Path, port: int, *arguments: str) -> None:
        directory.mkdir()
        self._received = directory / "received"
        super().__init__(__file__, [str(self._received), str(port), *arguments], directory / "log")
        self.port = int(self.ready)

    def refuses_connections(self) -> bool:
        """Return whether nothing listens on the port."""
        with socket.socket() as probe:
            return probe.connect_ex((HOST, self.port)) != 0

    def received(self) -> list[Received]:
        """Return the requests so far. SIGKILL may have cut the last line; it is ignored."""
        if not self._received.exists():
            return []
        *lines, _unfinished = self._received.read_text("ascii").split("\n")
        pairs = [line.split() for line in lines]
        return [
            Received(bytes.fromhex(request), "" if key == NO_KEY else key) for request, key in pairs
        ]


class Audit(grpc.GenericRpcHandler):
    """`/shop.Audit/Push` on bytes, as parsing could hide that a request has changed.

    Args:
        received: The file descriptor of the record of requests.
        hold_before: The number of an order that is neither recorded nor answered, once.
        hold_after: The number of an order that is recorded and not answered, once.
    """

    def __init__(self, received: int, hold_before: int | None, hold_after: int | None) -> None:
        self._received = received
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

    def _push(self, request: bytes, context: grpc.ServicerContext) -> Receipt:
        number = int(Line.FromString(request).text.split()[1])  # "order 7 ..."
        if number == self._hold_before:
            self._hold_before = None
            self._hold(number)
        key = dict(context.invocation_metadata()).get("idempotency-key", NO_KEY)
        # One write without a buffer, so SIGKILL cannot undo it.
        os.write(self._received, f"{request.hex()} {key}\n".encode())
        if number == self._hold_after:
            self._hold_after = None
            self._hold(number)
        return Receipt(number=number)

    def _hold(self, number: int) -> None:
        print("holding", number, flush=True)
        threading.Event().wait()


def main() -> None:
    """Serve until stdin ends, or until killed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("received")
    parser.add_argument("port", type=int)
    parser.add_argument("--hold-before", type=int)
    parser.add_argument("--hold-after", type=int)
    args = parser.parse_args()
    server = grpc.server(futures.ThreadPoolExecutor(8), options=[("grpc.so_reuseport", 0)])
    received = os.open(args.received, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    server.add_generic_rpc_handlers([Audit(received, args.hold_before, args.hold_after)])
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
