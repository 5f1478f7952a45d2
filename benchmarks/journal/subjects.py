"""What is measured, and how much of it."""

from __future__ import annotations

from dataclasses import dataclass

ENGINES = ("sqlite-process", "sqlite-power", "postgresql", "redis")
"""SQLite with both values of `durability`."""

BARE = "bare driver"
OURS = "rpcwheel"

ONE = "append, one by one"
BATCH = "append, batches of 100"
SINGLE = "take and report, one by one"
WORKER = "take and report, batches of 100, 1 worker"
WORKERS = "take and report, batches of 100, 4 workers"

AT_MOST = 1.2
"""The target: wall time of appends over that of the bare driver."""


@dataclass(frozen=True, slots=True)
class Scale:
    """How much of everything."""

    rounds: int
    warm_up: int
    single: int  # calls in one burst, one by one
    batched: int  # in batches


SCALES = {
    "quick": Scale(rounds=3, warm_up=1, single=300, batched=3_000),
    "full": Scale(rounds=5, warm_up=1, single=1_000, batched=10_000),
}

BATCH_SIZE = 100
BODY = b"x" * 300
TARGET = "dns:///orders.shop:443"
LEASE_S = 3600.0
