"""What the demo claims, computed from what it saw; nothing here calls, waits or prints.

Each check fails when its observation is missing: a story that broke off halfway has not shown what
comes after.
"""

from __future__ import annotations

import hashlib
import statistics
from collections import Counter
from dataclasses import dataclass, field
from enum import Enum
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

__all__ = ["Answer", "Call", "Check", "Counts", "Observed", "Outage", "When", "judge", "summary"]

OUTAGES = 2
"""The story kills the server between calls, and again during calls."""

SIGKILLED = -9


class When(Enum):
    """What the server was doing while a call was made."""

    UP = "up"
    DOWN = "down"
    KILLED = "killed"  # up when the call began, killed before it answered


class Answer(Enum):
    """What the caller got."""

    SERVER = "server"  # the server's answer
    QUEUED = "queued"  # the default, at once; failback delivers later
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Call:
    """One call, as its caller saw it."""

    event: int
    request: bytes  # as serialized before the call
    altered: bytes  # as serialized after the call, when the caller had written into it
    when: When
    answer: Answer
    began: (
        float  # monotonic seconds; when the server was killed, for a call that was in flight then
    )
    ended: float  # when the caller had its answer
    error: str = ""  # what it said, if it was one


@dataclass(slots=True)
class Outage:
    """One time without a server. `None`: not seen."""

    exit_status: int | None = None
    port_refuses: bool | None = None
    sizes: list[int] = field(default_factory=list)  # of the queue, after each call without a server
    left: int | None = None  # in the queue when the story went on
    drain_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Counts:
    """What failback itself has counted."""

    queued: int
    delivered: int  # of the queued ones, by one of the
    retries: int


@dataclass(slots=True)
class Observed:
    """Everything that the story saw."""

    events: int
    answer_within: float
    calls: list[Call] = field(default_factory=list)
    outages: list[Outage] = field(default_factory=list)
    arrived: list[bytes] = field(default_factory=list)  # every request in every server's journal
    counts: Counts | None = None
    problems: list[str] = field(
        default_factory=list
    )  # what broke the story off; what failback logged as an error


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the table."""

    claim: str
    seen: str
    passed: bool


def judge(observed: Observed) -> list[Check]:
    """Compute the table."""
    return [
        _killed(observed),
        _answered_while_down(observed),
        _answered_in_flight(observed),
        _no_error(observed),
        _queue_grew(observed),
        _queue_drained(observed),
        _counted(observed),
        _all_arrived(observed),
        _byte_for_byte(observed),
        _twice(observed),
        _no_problem(observed),
    ]


def summary(checks: Sequence[Check]) -> str:
    """Give the result in one line."""
    failed = [check.claim for check in checks if not check.passed]
    if not failed:
        return f"All {len(checks)} checks passed."
    return f"FAILED, {len(failed)} of {len(checks)} checks: {'; '.join(failed)}."


def _killed(observed: Observed) -> Check:
    outages = observed.outages
    exits = _listed(str(outage.exit_status) for outage in outages)
    refused = _listed("refused" if outage.port_refuses else "open" for outage in outages)
    return Check(
        "server killed, twice",
        f"exit {exits}; port {refused}",
        len(outages) == OUTAGES
        and all(outage.exit_status == SIGKILLED and outage.port_refuses for outage in outages),
    )


def _answered_while_down(observed: Observed) -> Check:
    return _answered(observed, When.DOWN, "callers answered")


def _answered_in_flight(observed: Observed) -> Check:
    return _answered(observed, When.KILLED, "those in flight")


def _answered(observed: Observed, when: When, who: str) -> Check:
    claim = f"{who} within {observed.answer_within * 1e3:.0f} ms"
    calls = [call for call in observed.calls if call.when is when]
    if not calls:
        return Check(claim, "no such call", passed=False)
    queued = sum(call.answer is Answer.QUEUED for call in calls)
    times = [call.ended - call.began for call in calls]
    median, slowest = statistics.median(times), max(times)
    return Check(
        claim,
        f"{queued} of {len(calls)}, median {median * 1e3:.1f}, slowest {slowest * 1e3:.1f} ms",
        queued == len(calls) and slowest <= observed.answer_within,
    )


def _no_error(observed: Observed) -> Check:
    answers = Counter(call.answer for call in observed.calls)
    errors = [call.error for call in observed.calls if call.answer is Answer.ERROR]
    return Check(
        "no caller saw an error",
        f"{answers[Answer.SERVER]} answers, {answers[Answer.QUEUED]} defaults, "
        f"{len(errors)} errors{f', the first: {errors[0]}' if errors else ''}",
        len(observed.calls) == observed.events and not errors and answers[Answer.SERVER] > 0,
    )


def _queue_grew(observed: Observed) -> Check:
    peaks = [outage.sizes[-1] for outage in observed.outages if outage.sizes]
    queued = sum(call.answer is Answer.QUEUED for call in observed.calls)
    by_one = all(
        after == before + 1
        for outage in observed.outages
        for before, after in pairwise(outage.sizes)
    )
    return Check(
        "queue grew with each such call",
        f"to {_listed(peaks)}; {queued} calls",
        len(peaks) == OUTAGES and by_one and sum(peaks) == queued,
    )


def _queue_drained(observed: Observed) -> Check:
    drained = [outage for outage in observed.outages if outage.left == 0]
    seconds = _listed(f"{outage.drain_seconds or 0.0:.2f}" for outage in drained)
    left = sum(outage.left or 0 for outage in observed.outages)
    return Check(
        "queue drained to 0, twice",
        f"{left} still wait" if left else f"in {seconds} s",
        len(drained) == OUTAGES,
    )


def _counted(observed: Observed) -> Check:
    queued = sum(call.answer is Answer.QUEUED for call in observed.calls)
    claim, counts = "failback counts the same", observed.counts
    if counts is None:
        return Check(claim, "not asked", passed=False)
    return Check(
        claim,
        f"{counts.delivered} of {counts.queued} delivered, {counts.retries} retries",
        counts.delivered == counts.queued == queued,
    )


def _all_arrived(observed: Observed) -> Check:
    sent, arrived = {call.request for call in observed.calls}, set(observed.arrived)
    return Check(
        "every event arrived",
        f"{len(sent & arrived)} of {observed.events}",
        len(sent) == observed.events and sent <= arrived,
    )


def _byte_for_byte(observed: Observed) -> Check:
    sent, arrived = {call.request for call in observed.calls}, set(observed.arrived)
    unaltered = sum(call.altered == call.request for call in observed.calls)
    if strangers := arrived - sent:
        changed = sum(call.altered in strangers for call in observed.calls)
        seen = f"{len(strangers)} never sent, of which {changed} as the caller changed them later"
    else:
        seen = f"sha256 {_digest(sent)}, {_digest(arrived)}"
    return Check(
        "byte for byte, as when called", seen, bool(sent) and sent == arrived and not unaltered
    )


def _twice(observed: Observed) -> Check:
    count = Counter(observed.arrived)
    again = [call for call in observed.calls if count[call.request] > 1]
    return Check(
        "twice only if killed in flight",
        f"twice: event {_listed(call.event for call in again)}" if again else "none twice",
        bool(count)
        and all(call.when is When.KILLED and count[call.request] <= OUTAGES for call in again),
    )


def _no_problem(observed: Observed) -> Check:
    return Check(
        "nothing else went wrong", "; ".join(observed.problems) or "nothing", not observed.problems
    )


def _digest(requests: Iterable[bytes]) -> str:
    return hashlib.sha256(b"".join(_framed(requests))).hexdigest()[:12]


def _framed(requests: Iterable[bytes]) -> Iterator[bytes]:
    for request in sorted(requests):
        yield len(request).to_bytes(4, "big") + request


def _listed(values: Iterable[object]) -> str:
    return " and ".join(str(value) for value in values) or "none"
