"""Appends per second by several threads: `python -m benchmarks.failback.appends SCALE DURABILITY`.

Prints a line of JSON: for each subject and number of threads the medians of calls per second, and
of the ratio of the times within a round to those of the bare driver.
"""

from __future__ import annotations

import json
import logging
import random
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import grpc

from benchmarks.failback.scale import (
    BARE,
    BODY,
    CHANNEL,
    FRONT,
    GROUPED,
    MEMORY,
    NEVER_S,
    PUSH,
    QUEUE,
    SCALES,
    THREADS,
    Scale,
)
from benchmarks.journal.bare import BareSqlite
from rpcwheel.call import CallPolicy
from rpcwheel.failback import FailbackPolicy
from rpcwheel.interceptors import FailbackQueues, intercept_channel
from rpcwheel.journal import NewCall
from rpcwheel.journal.journal import open_journal

TARGET = "127.0.0.1:1"
"""Nothing listens there."""

LIMIT = 1 << 40

Work = Callable[[int], object]
"""Makes so many calls, on one of the threads."""


def new_call(number: int) -> NewCall:
    """Make a call that is never due."""
    return NewCall(QUEUE, TARGET, PUSH, f"{number:032x}", BODY, NEVER_S, NEVER_S)


def time_of(work: Work, calls: int, threads: int) -> float:
    """Seconds for so many calls by so many threads."""
    begin = threading.Barrier(threads + 1)

    def run() -> None:
        begin.wait()
        work(calls // threads)

    running = [threading.Thread(target=run) for _ in range(threads)]
    for thread in running:
        thread.start()
    begin.wait()
    began_s = time.perf_counter()
    for thread in running:
        thread.join()
    return time.perf_counter() - began_s


def channel_calls(stack: ExitStack, journal: str | None) -> Work:
    """Make calls that fail and are queued, through a channel."""
    policy = FailbackPolicy(
        retry_on="UNAVAILABLE", backoff=NEVER_S, name=QUEUE, max_pending=1 << 30, journal=journal
    )
    queues = FailbackQueues()
    stack.callback(queues.close, 0)
    plain = stack.enter_context(grpc.insecure_channel(TARGET))
    channel = intercept_channel(plain, CallPolicy(failback=policy), queues=queues)
    push = channel.unary_unary(PUSH)

    def work(calls: int) -> None:
        for _ in range(calls):
            push(BODY, timeout=60.0)

    return work


def measure(scale: Scale, durability: str) -> list[dict[str, Any]]:
    """The figures for each subject and number of threads."""
    logging.disable()
    rows = []
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        bare = stack.enter_context(closing(BareSqlite(Path(directory) / "bare.db", durability)))
        option = f"?durability={durability}"
        journal = stack.enter_context(closing(open_journal(f"sqlite://{directory}/own.db{option}")))
        stored = channel_calls(stack, f"sqlite://{directory}/channel.db{option}")
        queued = channel_calls(stack, None)

        new_calls = [new_call(number) for number in range(scale.calls)]
        prepared = bare.prepare(new_calls[: max(THREADS)])

        def append_bare(calls: int, *, size: int = 1) -> None:
            for _ in range(calls // size):
                bare.append(prepared[:size])

        def append_now(calls: int) -> None:
            for call in new_calls[:calls]:
                journal.append_now(call, LIMIT)

        for threads in THREADS:
            subjects: dict[str, tuple[Work, int, int]] = {
                BARE: (append_bare, scale.calls, threads),
                GROUPED: (partial(append_bare, size=threads), scale.calls, 1),
                FRONT: (append_now, scale.calls, threads),
                MEMORY: (queued, scale.channel_calls, threads),
                CHANNEL: (stored, scale.channel_calls, threads),
            }
            times: dict[str, list[float]] = {name: [] for name in subjects}
            for number in range(scale.rounds + 1):
                for name in random.sample(list(subjects), len(subjects)):
                    work, calls, workers = subjects[name]
                    took_s = time_of(work, calls, workers) / calls
                    if number:  # the first round is a warm-up
                        times[name].append(took_s)
            rows += [
                {
                    "durability": durability,
                    "threads": threads,
                    "subject": name,
                    "per_s": 1 / median(taken),
                    "bare": median(map(ratio, taken, times[BARE])),
                    "grouped": median(map(ratio, taken, times[GROUPED])),
                    "memory": median(map(ratio, taken, times[MEMORY])),
                }
                for name, taken in times.items()
            ]
    return rows


def ratio(one: float, other: float) -> float:
    """Divide."""
    return one / other


if __name__ == "__main__":
    print(json.dumps(measure(SCALES[sys.argv[1]], sys.argv[2])))
