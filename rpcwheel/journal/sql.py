"""The common part of the journals in SQLite and PostgreSQL: conditions, rows, results, scans."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple

from .backend import (
    CallState,
    Dead,
    Delivered,
    Depth,
    JournalBackend,
    NewRow,
    Postponed,
    storable,
    stored_call,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .backend import Filter, NewCall, Result, StoredCall
    from .url import JournalUrl

Key = tuple[str, str, str]
"""A queue, a target, and an order key."""

COLUMNS: Final = (
    "id, queue, target, method, call_key, body, due_ms, created_ms, expires_ms, attempts, error, "
    "order_key, state, reason"
)
"""In the order of the fields of `StoredCall`."""

LARGEST_ID: Final = 2**63 - 1


class Update(NamedTuple):
    """The values of a call that stays after its attempt."""

    id: int
    state: int
    delay_ms: int | None
    """The time until it is due; None: unchanged."""
    attempts: int
    error: str
    reason: str

    @classmethod
    def of(cls, result: Postponed | Dead) -> Update:
        state, delay_ms, reason = CallState.READY, None, ""
        if isinstance(result, Postponed):
            delay_ms = round(result.delay_s * 1e3)
        else:
            state, reason = CallState.DEAD, storable(result.reason)
        return cls(result.id, int(state), delay_ms, result.attempts, storable(result.error), reason)


class SqlJournal(JournalBackend):
    """A journal with one connection for workers and one for scans of the whole table."""

    _dialect: ClassVar[Dialect]

    def __init__(self, url: JournalUrl) -> None:
        self.url = url
        self._closed = False

    def append(self, calls: Sequence[NewCall]) -> list[int]:
        return self._insert([NewRow.of(call) for call in calls]) if calls else []

    @abstractmethod
    def _insert(self, rows: list[NewRow]) -> list[int]: ...

    def report(self, worker: str, results: Sequence[Result]) -> list[int]:
        if not results:
            return []
        delivered = {result.id for result in results if isinstance(result, Delivered)}
        updates = {
            result.id: Update.of(result)
            for result in results
            if not isinstance(result, Delivered) and result.id not in delivered
        }
        stored = set(self._store(worker, list(delivered), list(updates.values())))
        late = []
        for result in results:
            if result.id in stored:
                stored.remove(result.id)  # a second result for the same call is late
            else:
                late.append(result.id)
        return late

    @abstractmethod
    def _store(self, worker: str, delivered: list[int], updates: list[Update]) -> list[int]:
        """Store results, each of another call. Returns the ids of the calls the worker has had."""

    def depths(self) -> list[Depth]:
        """Count the calls, each state by the index that has no other.

        PostgreSQL reads the table too where autovacuum has not been yet.
        """
        count = " UNION ALL ".join(  # one statement, so that a call is counted once
            f"""SELECT queue, target, {int(state)} AS state, count(*),
                {self._dialect.now} - min(created_ms)
                FROM $call WHERE state = {int(state)} GROUP BY queue, target"""
            for state in CallState
        )
        counts: dict[tuple[str, str], list[int]] = {}
        ages: dict[tuple[str, str], int] = {}
        for queue, target, state, number, age_ms in self._count(count):
            place = queue, target
            counts.setdefault(place, [0, 0, 0, 0])[state] += number
            if state != CallState.DEAD:
                ages[place] = max(ages.get(place, 0), age_ms)
        return [
            Depth(*place, ready + blocked, taken, dead, ages.get(place, 0) / 1e3)
            for place, (ready, blocked, taken, dead) in sorted(counts.items())
        ]

    def select(self, chosen: Filter, *, after: int = 0, limit: int = 100) -> list[StoredCall]:
        mark, (condition, parameters) = self._dialect.mark, where(chosen, self._dialect)
        text = f"""SELECT {COLUMNS}, {self._dialect.now} FROM $call
            WHERE id > {mark} AND {condition} ORDER BY id LIMIT {mark}"""
        rows = self._scan(text, (after, *parameters, limit))
        return [stored_call(row[:-1], row[-1]) for row in rows]

    def _count(self, text: str) -> list[Any]:
        """Return the rows of the statement that counts the calls."""
        return self._scan(text)

    @abstractmethod
    def _scan(self, text: str, parameters: Sequence[Any] = ()) -> list[Any]:
        """Return the rows of a statement, in which `$` stands for the schema."""


@dataclass(frozen=True, slots=True)
class Dialect:
    """The syntax of an engine's conditions."""

    mark: str
    """How a parameter is written."""
    now: str
    """The time of the engine, in ms."""
    like: str
    """The operator of patterns."""
    pattern: Callable[[str], str]
    """Makes the operand of `like` of a pattern with `*` and `?`."""
    contains: str
    """The condition that a text contains the parameter, with `{}` for the text."""
    among: str
    """The condition that a number is in the list that is the parameter."""
    numbers: Callable[[list[int]], object]
    """Makes the parameter of such a list."""


def where(chosen: Filter, dialect: Dialect) -> tuple[str, list[Any]]:
    """Return the condition for a filter, and its parameters."""
    terms: list[str] = ["1 = 1"]
    parameters: list[Any] = []
    if chosen.ids is not None:
        terms.append(f"id {dialect.among}")
        ids = [int(number) for number in chosen.ids if 0 < number <= LARGEST_ID]
        parameters.append(dialect.numbers(ids))
    if chosen.states is not None:
        states = ", ".join(str(int(state)) for state in chosen.states)
        terms.append(f"state IN ({states or 'NULL'})")
    for column, value in (("queue", chosen.queue), ("target", chosen.target)):
        if value is not None:
            terms.append(f"{column} = {dialect.mark}")
            parameters.append(storable(value))
    if chosen.method is not None:
        terms.append(f"method {dialect.like} {dialect.mark}")
        parameters.append(dialect.pattern(storable(chosen.method)))
    if chosen.error is not None:
        contains = dialect.contains
        terms.append(f"({contains.format('error')} OR {contains.format('reason')})")
        parameters += [storable(chosen.error)] * 2
    if chosen.min_age_s is not None:
        terms.append(f"created_ms <= {dialect.now} - {dialect.mark}")
        parameters.append(round(chosen.min_age_s * 1e3))
    return " AND ".join(terms), parameters
