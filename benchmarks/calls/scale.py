"""How much is measured, and the results: the scales and the rows."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

World = Literal["sync", "aio"]
Side = Literal["client", "server"]

UNARY = "unary"
RESPONSES, REQUESTS, BOTH = "response stream", "request stream", "both stream"
MEASURES = (UNARY, RESPONSES, REQUESTS, BOTH)
"""The four kinds of call: the costs are of a call, or of a message of a stream."""
HEDGING = "hedging"
COUNTS, COUNTS_ALONE = "counts", "counts alone"


@dataclass(frozen=True, slots=True)
class Scale:
    """How much of everything is measured."""

    calls: int  # unary calls timed in one go
    streams: int  # streams timed in one go
    messages: int  # of each stream, in each direction that streams
    rounds: int  # of unary calls
    stream_rounds: int
    warm_up: int  # bursts of each subject before the first round
    hedged: int  # unary calls to the server that delays some, without hedging and with it

    def units(self, what: str) -> int:
        """How many calls, or messages of streams, are timed in one go."""
        return self.calls if what == UNARY else self.streams * self.messages

    def turns(self, what: str) -> int:
        """How many rounds there are."""
        return self.rounds if what == UNARY else self.stream_rounds


FULL = Scale(
    calls=50, streams=2, messages=100, rounds=301, stream_rounds=101, warm_up=10, hedged=2000
)
QUICK = Scale(
    calls=25, streams=1, messages=100, rounds=61, stream_rounds=21, warm_up=3, hedged=1000
)
SCALES = {"full": FULL, "quick": QUICK}


@dataclass(frozen=True, slots=True)
class Row:
    """The result of one measurement of one subject. The names of the figures end in their units.

    `cpu_us` and `wall_us` are of a call or a message. `cpu_ratio` and `wall_ratio` are relative to
    the no-op interceptor, each with the quartiles `_q1` and `_q3`. `hedging.py` has other figures.
    """

    side: Side
    world: World
    measure: str
    subject: str
    values: dict[str, float]


@dataclass(frozen=True, slots=True)
class Results:
    """All rows of a run."""

    rows: tuple[Row, ...]

    def of(self, side: Side, world: World, measure: str) -> Iterable[Row]:
        """The rows of one table."""
        wanted = (side, world, measure)
        return (row for row in self.rows if (row.side, row.world, row.measure) == wanted)

    def value(self, side: Side, world: World, measure: str, subject: str, key: str) -> float | None:
        """One figure, if it was measured."""
        found = (row for row in self.of(side, world, measure) if row.subject == subject)
        return next((row.values.get(key) for row in found), None)
