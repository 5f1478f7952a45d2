"""The common part of the journals in SQLite and PostgreSQL: columns, conditions, and rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from .backend import CallState, Dead, Delivered, Depth, StoredCall, storable

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .backend import Filter, NewCall, Result

COLUMNS: Final = (
    "id, queue, target, method, call_key, body, due_ms, created_ms, expires_ms, attempts, error, "
    "order_key, state, reason"
)
"""In the order of `stored_call`."""

APPEND_COLUMNS: Final = (
    "queue, target, method, call_key, body, due_ms, created_ms, expires_ms, attempts, error, "
    "order_key, state"
)
"""In the order of `append_row`."""

LARGEST_ID: Final = 2**63 - 1


def append_row(call: NewCall, now_ms: int, state: CallState) -> tuple[Any, ...]:
    """Return the values of a new row."""
    return (
        call.queue,
        call.target,
        call.method,
        call.key,
        call.body,
        now_ms + round(call.delay_s * 1e3),
        now_ms,
        now_ms + round(call.max_age_s * 1e3),
        call.attempts,
        call.error,
        call.order_key,
        int(state),
    )


def stored_call(row: Sequence[Any], now_ms: int) -> StoredCall:
    """Make a call of a row."""
    number, queue, target, method, key, body, due, created, expires, *rest = row
    attempts, error, order_key, state, reason = rest
    return StoredCall(
        number,
        queue,
        target,
        method,
        key,
        bytes(body),
        (due - now_ms) / 1e3,
        max(0, now_ms - created) / 1e3,  # the clock may have been set back
        (expires - now_ms) / 1e3,
        attempts,
        error,
        order_key,
        CallState(state),
        reason,
    )


def depths_of(rows: Sequence[Sequence[Any]], now_ms: int) -> list[Depth]:
    """Make depths of rows: queue, target, state, number, the time when the oldest was stored."""
    counts: dict[tuple[str, str], list[int]] = {}
    oldest: dict[tuple[str, str], int] = {}
    for queue, target, state, number, created_ms in rows:
        key = queue, target
        counts.setdefault(key, [0, 0, 0, 0])[state] += number
        if state != CallState.DEAD:
            oldest[key] = min(oldest.get(key, created_ms), created_ms)
    return [
        Depth(*key, ready + blocked, taken, dead, max(0, now_ms - oldest.get(key, now_ms)) / 1e3)
        for key, (ready, blocked, taken, dead) in sorted(counts.items())
    ]


def split_results(
    results: Sequence[Result], now_ms: int, worker: str
) -> tuple[list[tuple[Any, ...]], list[tuple[Any, ...]]]:
    """Return the parameters of a DELETE and of an UPDATE.

    The UPDATE has: state, due_ms (None: unchanged), attempts, error, reason, id, worker.
    """
    deleted: list[tuple[Any, ...]] = []
    updated: list[tuple[Any, ...]] = []
    for result in results:
        if isinstance(result, Delivered):
            deleted.append((result.id, worker))
            continue
        dead = isinstance(result, Dead)
        state = CallState.DEAD if dead else CallState.READY
        due_ms = None if isinstance(result, Dead) else now_ms + round(result.delay_s * 1e3)
        reason = storable(result.reason) if isinstance(result, Dead) else ""
        error = storable(result.error)
        updated.append((int(state), due_ms, result.attempts, error, reason, result.id, worker))
    return deleted, updated


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


COUNT_BY_STATE: Final = " UNION ALL ".join(  # one statement, so that a call is counted once
    f"""SELECT queue, target, {int(state)} AS state, count(*), min(created_ms) FROM call
        WHERE state = {int(state)} GROUP BY queue, target"""
    for state in CallState
)
"""The rows of `depths_of`. Each state has an index, which has all columns."""
