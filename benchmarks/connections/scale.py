"""How much is measured. What comes out are the rows of `benchmarks.calls.scale`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Scale:
    """How much of everything."""

    channels: int  # that are kept alive by heartbeats
    interval_s: float  # between two heartbeats
    intervals: int  # that are measured, after a first one
    calls: int  # unary calls timed in one go
    rounds: int  # of them
    warm_up: int  # bursts of each before the first round
    replacements: int  # of each subject's connection, the server being well
    outages: int
    outage_s: float
    freezes: int
    beat_s: float  # the interval of heartbeats and pings to a server that freezes
    dead_s: float  # after so much silence it is dead
    timeout_s: float  # the limit for the detection
    connections: int  # of the server whose connections are looked at
    looks: int  # at all of them
    closings: int  # of half of them
    idle_s: float  # after so long they are idle; longer than it takes to use half of them
    cycles: int  # of a connection that is opened and closed
    cycles_s: float  # for all of them at most
    settle_s: float  # and then, until what is left is counted


FULL = Scale(
    channels=1000,
    interval_s=60.0,
    intervals=1,
    calls=50,
    rounds=101,
    warm_up=10,
    replacements=500,
    outages=5,
    outage_s=4.0,
    freezes=3,
    beat_s=1.0,
    dead_s=3.0,
    timeout_s=65.0,
    connections=2000,
    looks=21,
    closings=3,
    idle_s=3.0,
    cycles=10_000,
    cycles_s=30.0,
    settle_s=1.5,
)
QUICK = Scale(
    channels=400,
    interval_s=6.0,
    intervals=2,
    calls=25,
    rounds=41,
    warm_up=3,
    replacements=100,
    outages=3,
    outage_s=2.0,
    freezes=1,
    beat_s=1.0,
    dead_s=3.0,
    timeout_s=8.0,
    connections=2000,
    looks=7,
    closings=1,
    idle_s=3.0,
    cycles=10_000,
    cycles_s=15.0,
    settle_s=1.5,
)
SCALES = {"full": FULL, "quick": QUICK}
