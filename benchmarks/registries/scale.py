"""How much is measured. What comes out are the rows of `benchmarks.calls.scale`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Scale:
    """How much of everything."""

    calls: int  # unary calls timed in one go
    rounds: int  # of them
    warm_up: int  # bursts of each before the first round
    few: int  # instances that are called
    many: int
    picks: int  # timed in one go
    pick_rounds: int
    picked: tuple[int, int, int]  # from so many subchannels
    listed: int  # instances of a channel whose picks are measured
    prepared: int  # times for the largest of them
    restarted: int  # of those, in a rolling restart
    restart_pause_s: float  # between two of them
    instances: int  # that are published
    sessions: int  # of subscribers
    subscribers: int  # of all sessions together
    changes: int  # of one instance
    timeout_s: float  # for any of that
    publishers: int  # sessions that publish again
    lease_s: float  # theirs
    window_s: float  # over which they spread it


FULL = Scale(
    calls=50,
    rounds=101,
    warm_up=10,
    few=3,
    many=100,
    picks=500,
    pick_rounds=31,
    picked=(3, 100, 1000),
    listed=2000,
    prepared=21,
    restarted=1000,
    restart_pause_s=0.01,
    instances=1000,
    sessions=20,
    subscribers=1000,
    changes=21,
    timeout_s=60.0,
    publishers=10,
    lease_s=15.0,
    window_s=5.0,
)
QUICK = Scale(
    calls=25,
    rounds=41,
    warm_up=8,
    few=3,
    many=100,
    picks=1000,
    pick_rounds=11,
    picked=(3, 100, 1000),
    listed=2000,
    prepared=5,
    restarted=300,
    restart_pause_s=0.01,
    instances=1000,
    sessions=10,
    subscribers=1000,
    changes=7,
    timeout_s=30.0,
    publishers=10,
    lease_s=6.0,
    window_s=2.0,
)
SCALES = {"full": FULL, "quick": QUICK}
