"""A process that delivers a backlog: `python -m ...backlog_client NAME URL TARGET CALLS`.

Answers a line of the input, `"wait"` or `"end"`, with what it has counted.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import grpc

from benchmarks._process import obey
from benchmarks.failback.scale import (
    BOTH_CODES,
    FAST,
    MEMORY_AIO,
    MEMORY_SYNC,
    PROGRAM,
    PUSH,
    QUEUE,
    TIMEOUT_S,
)
from rpcwheel.call import CallPolicy
from rpcwheel.failback import FailbackPolicy, JournalWorker
from rpcwheel.interceptors import FailbackQueues, aio, intercept_channel

POLL_S = 0.02
MEMORY: dict[str, Any] = {
    "retry_on": "UNAVAILABLE", "max_attempts": 1000, "max_pending": 1 << 20, "backoff": 1.0,
}  # fmt: skip


def report(stats: Callable[[], list[dict[str, Any]]]) -> None:
    """Answer the lines of the input with the counts, and exit."""

    def answer(question: str) -> dict[str, int]:
        while question == "wait" and any(each["pending"] for each in stats()):
            time.sleep(POLL_S)
        names = {"attempts": "attempts", "delivered": "redelivered", "lost": "lost"}
        return {ours: sum(each[name] for each in stats()) for ours, name in names.items()}

    obey("ready", answer)
    os._exit(0)


def deliver_stored(name: str, url: str, target: str) -> None:
    """Deliver the calls of a journal."""
    if name in (PROGRAM, BOTH_CODES, FAST):
        codes = ("UNAVAILABLE", "DEADLINE_EXCEEDED") if name == BOTH_CODES else ("UNAVAILABLE",)
        policy = FailbackPolicy(retry_on=codes, name=QUEUE, journal=url)
        queues = FailbackQueues()
        plain = grpc.insecure_channel(target)
        channel = intercept_channel(plain, CallPolicy(failback=policy), queues=queues)
        report(lambda: [asdict(each) for each in queues.stats().values()])
        del channel
    else:
        worker = JournalWorker(url)
        worker.start()
        report(lambda: [asdict(each) for each in worker.stats().values()])


def deliver_queued(target: str, calls: int) -> None:
    """Make calls that fail, and deliver them from memory."""
    queues = FailbackQueues()
    plain = grpc.insecure_channel(target)
    policy = CallPolicy(failback=FailbackPolicy(**MEMORY))
    push = intercept_channel(plain, policy, queues=queues).unary_unary(PUSH)
    for number in range(calls):
        push(b"%d" % number, timeout=TIMEOUT_S)
    report(lambda: [asdict(each) for each in queues.stats().values()])


async def aio_deliver_queued(target: str, calls: int) -> None:
    """The same with `grpc.aio`."""
    queues = aio.FailbackQueues()
    plain = grpc.aio.insecure_channel(target)
    policy = CallPolicy(failback=FailbackPolicy(**MEMORY))
    push = aio.intercept_channel(plain, policy, queues=queues).unary_unary(PUSH)
    for number in range(calls):
        await push(b"%d" % number, timeout=TIMEOUT_S)
    await asyncio.to_thread(report, lambda: [asdict(each) for each in queues.stats().values()])


def main(name: str, url: str, target: str, calls: int) -> None:
    """Deliver."""
    logging.disable()
    if name == MEMORY_SYNC:
        deliver_queued(target, calls)
    elif name == MEMORY_AIO:
        asyncio.run(aio_deliver_queued(target, calls))
    else:
        deliver_stored(name, url, target)


if __name__ == "__main__":
    main(*sys.argv[1:4], int(sys.argv[4]))
