"""What is measured, and how much of it."""

from __future__ import annotations

from dataclasses import dataclass

STEPS = ("appends", "waiting")
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
    memory_s: float  # how long a client runs until its memory is read


SCALES = {
    "quick": Scale(rounds=3, calls=1_000, channel_calls=300, waiting=100_000, memory_s=3.0),
    "full": Scale(rounds=7, calls=4_000, channel_calls=2_000, waiting=10_000_000, memory_s=30.0),
}
