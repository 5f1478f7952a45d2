"""How much is measured, and what comes out: the scales and the rows."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

Form = Literal["native", "pure", "jvm"]


@dataclass(frozen=True, slots=True)
class Scale:
    """How much of everything."""

    few: int  # pending timeouts: the usual number
    many: int  # ... and what is called a million
    burst: int  # calls timed in one go, at most
    rounds: int
    fired: int  # timeouts a round of `fire`
    fire_rounds: int
    late: int  # timeouts a round of `lateness`
    late_rounds: int
    idle_s: float
    collections: int
    stall_runs: int
    per_thread: int  # pairs of each of four threads
    thread_rounds: int
    netty_rounds: int
    netty_pending: tuple[int, ...]


FULL = Scale(
    few=1_000,
    many=1_000_000,
    burst=20_000,
    rounds=61,
    fired=50_000,
    fire_rounds=5,
    late=2_000,
    late_rounds=5,
    idle_s=10.0,
    collections=5,
    stall_runs=3,
    per_thread=200_000,
    thread_rounds=3,
    netty_rounds=9,
    netty_pending=(1_000, 1_000_000),
)
QUICK = Scale(
    few=1_000,
    many=100_000,
    burst=10_000,
    rounds=15,
    fired=10_000,
    fire_rounds=1,
    late=500,
    late_rounds=1,
    idle_s=1.0,
    collections=3,
    stall_runs=1,
    per_thread=20_000,
    thread_rounds=1,
    netty_rounds=3,
    netty_pending=(1_000,),
)
TINY = Scale(
    few=10,
    many=100,
    burst=10,
    rounds=2,
    fired=20,
    fire_rounds=1,
    late=10,
    late_rounds=1,
    idle_s=0.01,
    collections=1,
    stall_runs=1,
    per_thread=50,
    thread_rounds=1,
    netty_rounds=3,
    netty_pending=(1_000,),
)
SCALES = {"full": FULL, "quick": QUICK, "tiny": TINY}


@dataclass(frozen=True, slots=True)
class Row:
    """The figures of one measurement of one subject; their names end in their units."""

    measure: str
    subject: str
    form: Form  # of rpcwheel in the process that measured; rivals were measured beside it
    pending: int
    values: dict[str, float]

    def as_dict(self) -> dict[str, Any]:
        """As JSON takes it."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Results:
    """All rows of a run."""

    rows: tuple[Row, ...]

    def row(
        self, measure: str, subject: str, form: Form = "native", pending: int = 0
    ) -> Row | None:
        """That row, if it was measured; `pending=0`: whatever the number."""
        for row in self.rows:
            if (row.measure, row.subject, row.form) == (measure, subject, form) and (
                pending in (0, row.pending)
            ):
                return row
        return None

    def value(
        self, measure: str, subject: str, key: str, form: Form = "native", pending: int = 0
    ) -> float | None:
        """One figure of that row, if it was measured."""
        row = self.row(measure, subject, form, pending)
        return None if row is None else row.values.get(key)
