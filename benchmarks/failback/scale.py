"""What is measured, and how much of it."""

from __future__ import annotations

from dataclasses import dataclass

STEPS = ("appends", "waiting", "backlog")
DURABILITIES = ("process", "power")
THREADS = (1, 8, 64)

BARE = "bare sqlite3, one transaction for each call"
GROUPED = "bare sqlite3, transactions of as many calls as threads"
FRONT = "`Journal.append_now`"
CHANNEL = "failed calls of a channel, with a journal"
MEMORY = "failed calls of a channel, queued in memory"

QUEUE = "orders"
PUSH = "/shop.Orders/Push"
BODY = b"x" * 300
NEVER_S = 86_400.0
"""The delay of calls that are not to be delivered."""

SERVER_THREADS = 16
SERVICE_S = 0.2
PER_S = SERVER_THREADS / SERVICE_S
"""The server of a backlog, and the calls that it can execute in a second."""

TIMEOUT_S = 2.0
"""Of each attempt."""

PROGRAM = "journal, `retry_on` UNAVAILABLE"
BOTH_CODES = "journal, also DEADLINE_EXCEEDED"
WORKER = "`journal work`"
TWO_WORKERS = "two of them, PostgreSQL"
MEMORY_SYNC = "in memory, `grpc`"
MEMORY_AIO = "in memory, `grpc.aio`"
FAST = "journal, a server that answers at once"
BACKLOGS = (PROGRAM, BOTH_CODES, WORKER, TWO_WORKERS, MEMORY_SYNC, MEMORY_AIO, FAST)

MOST_FAILED = 0.02
LEAST_SHARE = 0.85
"""The targets: failed attempts, and calls a second, as a share of what the server can execute."""

MOST_MB = 50.0
AT_MOST = 1.2
"""The targets: memory above an idle process; time of an append over that of the engine alone."""


@dataclass(frozen=True, slots=True)
class Scale:
    """How much of everything."""

    rounds: int
    calls: int  # in one burst
    channel_calls: int
    waiting: int
    backlog: int
    fast: int  # to a server that answers at once
    memory_s: float  # how long a client runs until its memory is read


SCALES = {
    "quick": Scale(
        rounds=3,
        calls=1_000,
        channel_calls=300,
        waiting=100_000,
        backlog=300,
        fast=3_000,
        memory_s=3.0,
    ),
    "full": Scale(
        rounds=7,
        calls=4_000,
        channel_calls=2_000,
        waiting=10_000_000,
        backlog=1_000,
        fast=20_000,
        memory_s=30.0,
    ),
}
