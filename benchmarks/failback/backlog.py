"""Delivers long queues to a healthy server: `python -m benchmarks.failback.backlog SCALE NAME`.

The server can execute `PER_S` calls a second. Prints a line of JSON.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from typing import Any

import grpc

from benchmarks._engines import engine
from benchmarks._process import Process
from benchmarks.failback.scale import (
    BACKLOGS,
    FAST,
    MEMORY_AIO,
    MEMORY_SYNC,
    NEVER_S,
    PER_S,
    PUSH,
    QUEUE,
    SCALES,
    SERVER_THREADS,
    SERVICE_S,
    TIMEOUT_S,
    TWO_WORKERS,
    Scale,
)
from rpcwheel.failback.stored import StoredRpc
from rpcwheel.journal import CallState, Filter, NewCall, open_journal_backend
from rpcwheel.rpc import Kind

POLL_S = 0.02
PATIENCE_S = 90.0
CLIENT = "benchmarks.failback.backlog_client"


class SlowServer:
    """A server with few threads, each busy with a call for long. Counts the executions."""

    def __init__(self, service_s: float) -> None:
        self._service_s = service_s
        self.begun_s: list[float] = []
        self.ended_s: list[float] = []
        self.executions: Counter[bytes] = Counter()

    def execute(self, request: bytes, _context: grpc.ServicerContext) -> bytes:
        """Execute a call."""
        self.begun_s.append(time.monotonic())
        self.executions[request] += 1
        time.sleep(self._service_s)
        self.ended_s.append(time.monotonic())
        return b""

    @contextmanager
    def serving(self, target: str) -> Iterator[str]:
        """Serve at an address."""
        server = grpc.server(ThreadPoolExecutor(SERVER_THREADS))
        handler = grpc.unary_unary_rpc_method_handler(self.execute)
        _, service, method = PUSH.split("/")
        server.add_registered_method_handlers(service, {method: handler})
        port = server.add_insecure_port(target)
        server.start()
        try:
            yield f"127.0.0.1:{port}"
        finally:
            server.stop(None).wait()


def fill(url: str, target: str, calls: int) -> None:
    """Store calls that are due now."""
    new = [
        NewCall(
            *(QUEUE, target, PUSH, f"{number:032x}"),
            StoredRpc(Kind.UNARY_UNARY, (b"%d" % number,), timeout_s=TIMEOUT_S).encoded(),
            *(0.0, NEVER_S),
        )
        for number in range(calls)
    ]
    with closing(open_journal_backend(url)) as journal:
        journal.append(new)


def wait_delivered(url: str) -> int:
    """Wait until no call is left in a journal but dead letters; return their number."""
    waiting = CallState.READY, CallState.BLOCKED, CallState.TAKEN
    ends_s = time.monotonic() + PATIENCE_S
    with closing(open_journal_backend(url)) as journal:
        while journal.select(Filter(states=waiting), limit=1) and time.monotonic() < ends_s:
            time.sleep(POLL_S)
        return len(journal.select(Filter(states=(CallState.DEAD,)), limit=10_000))


def measure(scale: Scale, name: str) -> dict[str, Any]:
    """The figures of one way of delivery."""
    is_memory, workers = name in (MEMORY_SYNC, MEMORY_AIO), 2 if name == TWO_WORKERS else 1
    calls = scale.fast if name == FAST else scale.backlog * workers
    server = SlowServer(0.0 if name == FAST else SERVICE_S)
    with server.serving("127.0.0.1:0") as target:
        pass
    with ExitStack() as stack:
        if name == TWO_WORKERS:
            url = stack.enter_context(engine("postgresql")()).journal_url()
        else:
            url = f"sqlite://{stack.enter_context(tempfile.TemporaryDirectory())}/backlog.db"
        if not is_memory:
            fill(url, target, calls)
            stack.enter_context(server.serving(target))
        clients = [
            stack.enter_context(Process(CLIENT, name, url, target, str(calls)))
            for _ in range(workers)
        ]
        if is_memory:
            stack.enter_context(server.serving(target))
        dead = 0 if is_memory else wait_delivered(url)
        counts = [client.ask("wait" if is_memory else "end") for client in clients]
    attempts, delivered = (sum(each[key] for each in counts) for key in ("attempts", "delivered"))
    took_s = max(server.ended_s) - min(server.begun_s)
    return {
        "name": name,
        "calls": calls,
        "delivered": delivered,
        "dead": dead + sum(each["lost"] for each in counts),
        "never": calls - len(server.executions),
        "failed": attempts - delivered,
        "attempts": attempts,
        "twice": sum(count > 1 for count in server.executions.values()),
        "per_s": delivered / took_s,
        "share": None if name == FAST else delivered / took_s / PER_S,
    }


if __name__ == "__main__":
    wanted = BACKLOGS if len(sys.argv) == 2 else sys.argv[2:]
    print(json.dumps([measure(SCALES[sys.argv[1]], each) for each in wanted]))
