"""The demo's server: a real gRPC server in a process of its own, made to be killed.

Run as `python -m rpcwheel.cli.demo_server --journal FILE`. It writes each request to the journal as
it came off the wire, and only then answers. It tells the demo what it does in lines on stdout
(`ready PORT`, `holding ID`) and lives as long as its stdin is open, so that it never outlives the
demo, however that ends.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import sys
import threading
from concurrent import futures
from typing import TYPE_CHECKING

import grpc

from rpcwheel.cli import audit_pb2

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

__all__ = ["main", "read_journal"]

HOST = "127.0.0.1"

PORTS = range(20_000, 32_768)
"""Below the ephemeral ports of Linux and macOS. On one of those a client that knocks at a dead
server's port can, once in some ten thousand times, be given that very port as its own, connect to
itself, and keep the server from coming back.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until stdin ends, or until killed."""
    parser = argparse.ArgumentParser(prog="python -m rpcwheel.cli.demo_server")
    parser.add_argument("--journal", required=True, help="append each request to this file")
    parser.add_argument("--port", type=int, default=0, help="0, the default: a free one")
    parser.add_argument(
        "--hold-before", type=int, metavar="ID", help="never journal nor answer this event"
    )
    parser.add_argument(
        "--hold-after", type=int, metavar="ID", help="journal this event, but never answer it"
    )
    args = parser.parse_args(argv)
    server = grpc.server(futures.ThreadPoolExecutor(8), options=[("grpc.so_reuseport", 0)])
    journal = os.open(args.journal, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    _Audit(journal, args.hold_before, args.hold_after).add_to(server)
    port = _listen(server, args.port)
    server.start()
    _tell(f"ready {port}")
    sys.stdin.buffer.read()
    os._exit(0)  # a held call would keep a normal exit waiting


def read_journal(path: Path) -> list[bytes]:
    """Give the requests of a journal, in the order of their arrival; none if there is no file.

    A last line without its end is a write that SIGKILL cut short: that request was not recorded.

    Raises:
        ValueError: A line is not what `_Audit` writes.
    """
    if not path.exists():
        return []
    *lines, _unfinished = path.read_text("ascii").split("\n")
    return [bytes.fromhex(line) for line in lines]


class _Audit:
    """`rpcwheel.demo.Audit`, on the raw bytes: to parse and write anew could hide a difference."""

    def __init__(self, journal: int, hold_before: int | None, hold_after: int | None) -> None:
        self._journal = journal
        self._hold_before = hold_before
        self._hold_after = hold_after

    def add_to(self, server: grpc.Server) -> None:
        push = grpc.unary_unary_rpc_method_handler(
            self.push, response_serializer=audit_pb2.Receipt.SerializeToString
        )  # no request_deserializer: `push` gets the bytes
        service = audit_pb2.DESCRIPTOR.services_by_name["Audit"].full_name
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(service, {"Push": push}),)
        )

    def push(self, request: bytes, _context: grpc.ServicerContext) -> audit_pb2.Receipt:
        event = audit_pb2.Event.FromString(request)
        if event.id == self._hold_before:
            _hold(event.id)
        # One write, straight to the kernel: SIGKILL can't take it back.
        os.write(self._journal, request.hex().encode("ascii") + b"\n")
        if event.id == self._hold_after:
            _hold(event.id)
        return audit_pb2.Receipt(id=event.id, server_pid=os.getpid())


def _listen(server: grpc.Server, port: int) -> int:
    for candidate in [port] if port else random.sample(PORTS, 50):
        with contextlib.suppress(RuntimeError):  # in use
            listening: int = server.add_insecure_port(f"{HOST}:{candidate}")
            return listening
    raise SystemExit(
        f"cannot listen on {HOST}, port {port or f'{PORTS[0]} to {PORTS[-1]}'}: in use"
    )


def _hold(event_id: int) -> None:
    _tell(f"holding {event_id}")
    threading.Event().wait()


def _tell(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
