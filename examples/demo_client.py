"""A client of demo.py with a journal, in a process of its own that can be killed.

Run as a program, it prints `ready`. With `--first NUMBER` it makes calls until it is killed, and
prints `queued NUMBER REQUEST` (or `response ...`) after a call was answered. Without, it makes no
calls: it delivers the calls in the journal, prints `delivered COUNT`, and ends. It also ends when
its stdin ends, so that it never outlives the demo.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import threading
import time
from typing import TYPE_CHECKING

from audit_pb2 import Line, Receipt
from audit_pb2_grpc import AuditStub
from demo_process import ChildProcess

from rpcwheel import FailbackPolicy, Kit, MethodPolicy

if TYPE_CHECKING:
    from pathlib import Path

QUEUED = Receipt()
"""The response of a queued call."""

TIMEOUT_S = 1.0
"""The timeout of each attempt."""

CHANNEL_OPTIONS = [
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 300),  # the default is two minutes
    ("grpc.enable_retries", 0),
]


class ClientProcess(ChildProcess):
    """One process of the client. The constructor returns when it has a channel.

    Args:
        journal: The URL of the journal.
        target: The server.
        log: A file for its log.
        arguments: More arguments of the program.

    Raises:
        DemoError: The process ended or did not begin in time.
    """

    def __init__(self, journal: str, target: str, log: Path, *arguments: str) -> None:
        super().__init__(__file__, [journal, target, *arguments], log)


def make_calls(audit: AuditStub, first: int) -> None:
    """Make one call after the other, and print how each was answered."""
    for number in itertools.count(first):
        line = Line(text=f"order {number} \N{EURO SIGN} {os.urandom(32).hex()}")
        answer = "queued" if audit.Push(line) is QUEUED else "response"
        print(answer, number, line.SerializeToString().hex(), flush=True)
        time.sleep(0.01)


def end_with_stdin() -> None:
    """End the process when its stdin ends, whatever it does."""
    sys.stdin.read()
    os._exit(0)


def main() -> None:
    """Make calls until killed, or deliver those that are stored."""
    parser = argparse.ArgumentParser()
    parser.add_argument("journal")
    parser.add_argument("target")
    parser.add_argument("--first", type=int)
    args = parser.parse_args()
    threading.Thread(target=end_with_stdin, daemon=True).start()
    failback = FailbackPolicy(
        retry_on={"UNAVAILABLE", "DEADLINE_EXCEEDED"},
        backoff=0.2,
        default=QUEUED,
        journal=args.journal,
    )
    kit = Kit(timeout=TIMEOUT_S, methods={"/shop.Audit/*": MethodPolicy(failback=failback)})
    with kit, kit.channel(args.target, options=CHANNEL_OPTIONS) as channel:
        print("ready", flush=True)
        if args.first is not None:
            make_calls(AuditStub(channel), args.first)
        kit.flush()
        print("delivered", sum(one.redelivered for one in kit.stats().values()), flush=True)


if __name__ == "__main__":
    main()
