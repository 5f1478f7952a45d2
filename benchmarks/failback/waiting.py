"""Clients of a journal with millions of waiting calls: `python -m ...waiting SCALE DIRECTORY`.

Prints a line of JSON.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from signal import SIGKILL
from statistics import median
from typing import Any

import grpc

from benchmarks._process import Process
from benchmarks.failback.scale import BODY, NEVER_S, PUSH, QUEUE, SCALES, Scale
from rpcwheel.failback.stored import StoredRpc
from rpcwheel.journal import NewCall, open_journal_backend
from rpcwheel.rpc import Kind

BATCH = 1000
TURNS = 5
CALLS = 4000
"""Appends that are measured at once, in so many turns."""


def fill(url: str, target: str, waiting: int) -> float:
    """Store calls that are due now; return how many are stored in a second."""
    body = StoredRpc(Kind.UNARY_UNARY, (BODY,)).encoded()
    began_s = time.perf_counter()
    with closing(open_journal_backend(url)) as journal:
        for first in range(0, waiting, BATCH):
            calls = [
                NewCall(QUEUE, target, PUSH, f"{number:032x}", body, 0.0, NEVER_S)
                for number in range(first, first + BATCH)
            ]
            journal.append(calls)
    return waiting / (time.perf_counter() - began_s)


def client(url: str, target: str, *, delivers: bool) -> Process:
    """Start the process of `client.py`; one that delivers waits for its first delivery."""
    env = {"SPAWNED_NS": str(time.monotonic_ns())} | ({"WAIT": "1"} if delivers else {})
    return Process("benchmarks.failback.client", url, target, env=env)


def _succeed(_request: bytes, _context: grpc.ServicerContext) -> bytes:
    return b""


@contextmanager
def serving(target: str) -> Iterator[str]:
    """A server that answers every call with success."""
    server = grpc.server(ThreadPoolExecutor(8))
    handler = grpc.unary_unary_rpc_method_handler(_succeed)
    _, service, method = PUSH.split("/")
    server.add_registered_method_handlers(service, {method: handler})
    port = server.add_insecure_port(target)
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None).wait()


def measure(scale: Scale, directory: Path) -> dict[str, Any]:
    """All figures."""
    big, small = f"sqlite://{directory}/big.db", f"sqlite://{directory}/small.db"
    with serving("127.0.0.1:0") as target:
        pass
    found: dict[str, Any] = {
        "waiting": scale.waiting,
        "fill_per_s": fill(big, target, scale.waiting),
    }
    found["file_mb"] = (directory / "big.db").stat().st_size / 2**20
    rates: dict[str, list[float]] = {}
    with (
        client(small, target, delivers=False) as idle,
        client(big, target, delivers=False) as waits,
    ):
        time.sleep(scale.memory_s)
        found["idle"], found["waits"] = idle.ask("memory"), waits.ask("memory")
        for turn in range(TURNS + 1):
            for threads in (1, 8):
                for name, process in (("empty", idle), ("full", waits)):
                    per_s = process.ask(["append", threads, CALLS])
                    if turn:
                        rates.setdefault(f"{name}, {threads}", []).append(per_s)
    found["rates"] = {name: median(taken) for name, taken in rates.items()}
    with serving(target):
        firsts = []
        for _ in range(TURNS):
            with client(big, target, delivers=True) as process:
                firsts.append(process.first)
                os.kill(process.pid, SIGKILL)
        found["first"] = {name: median(first[name] for first in firsts) for name in firsts[0]}
        with client(big, target, delivers=True) as process:
            time.sleep(scale.memory_s)
            found["delivers"] = process.ask("memory")
    return found


if __name__ == "__main__":
    print(json.dumps([measure(SCALES[sys.argv[1]], Path(sys.argv[2]))]))
