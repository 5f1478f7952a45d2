"""A client whose failback has a journal: `python -m benchmarks.failback.client URL TARGET`.

With `WAIT` in the environment, it waits for its first delivery. Prints the seconds since its
imports, and since `SPAWNED_NS` in the environment. Then it obeys lines of the input: `"memory"`
asks for its memory, `["append", threads, calls]` for the number of calls that `Journal.append_now`
stores in a second.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import threading
import time
from pathlib import Path
from typing import Any

import grpc

from benchmarks._process import obey
from benchmarks.failback.appends import LIMIT, new_call, time_of
from benchmarks.failback.scale import QUEUE
from rpcwheel.call import CallPolicy
from rpcwheel.events import FailbackDelivered, add_sink
from rpcwheel.failback import FailbackPolicy
from rpcwheel.interceptors import FailbackQueues, intercept_channel
from rpcwheel.journal.journal import open_journal


def memory() -> dict[str, float]:
    """The memory of this process in MB: now, and the most so far."""
    status = Path("/proc/self/status").read_text()
    found = {name: re.search(rf"{key}:\s+(\d+)", status) for name, key in SIZES.items()}
    return {name: int(size[1]) / 1024 for name, size in found.items() if size}


SIZES = {"now_mb": "VmRSS", "peak_mb": "VmHWM"}


def main(url: str, target: str) -> None:
    """Deliver until the input ends."""
    logging.disable()
    delivered = threading.Event()
    add_sink(lambda event: delivered.set() if isinstance(event, FailbackDelivered) else None)
    began_ns = time.monotonic_ns()
    policy = FailbackPolicy(
        retry_on="UNAVAILABLE", backoff=1.0, name=QUEUE, max_pending=1 << 30, journal=url
    )
    queues = FailbackQueues()
    plain = grpc.insecure_channel(target)
    channel = intercept_channel(plain, CallPolicy(failback=policy), queues=queues)
    journal = open_journal(url)

    def append(calls: int) -> None:
        for number in range(calls):
            journal.append_now(new_call(number), LIMIT)

    def answer(question: Any) -> object:
        match question:
            case "memory":
                return memory()
            case ["append", threads, calls]:
                return calls / time_of(append, calls, threads)
        raise ValueError(f"memory or append, not {question}")

    if os.environ.get("WAIT"):
        delivered.wait()
    now_ns = time.monotonic_ns()
    first = [(now_ns - since) / 1e9 for since in (began_ns, int(os.environ["SPAWNED_NS"]))]
    obey({"after_imports_s": first[0], "after_spawn_s": first[1]}, answer)
    del channel
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
