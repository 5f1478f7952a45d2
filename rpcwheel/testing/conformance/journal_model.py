"""Random requests to backends of one journal, compared with a reference in memory.

The sequence of requests is the same in each run. Before each comparison `harness.rule` is set to
the rule of `JournalBackend` that the comparison is about, so a failed check names it. No result
depends on the speed of the machine: leases do not end, and the times at which calls are due differ
by a multiple of `GAP_S`. Only a call that is retried is due now, at zero.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from rpcwheel.journal.backend import CallState, Dead, Delivered, Filter, NewCall, Postponed

from .journal_harness import HOUR_S, MANY
from .registry_harness import require

if TYPE_CHECKING:
    from rpcwheel.journal.backend import Result, StoredCall

    from .journal_harness import JournalHarness

STEPS: Final = 150
BACKENDS: Final = 2
WORKERS: Final = 3
GAP_S: Final = 1000.0
UNKNOWN_ID: Final = 2**40


@dataclass
class _ReferenceCall:
    """A call that the journal must have."""

    new: NewCall
    due_s: float
    attempts: int
    error: str | None
    """None: it was a dead letter, whose error may be kept."""
    worker: str = ""
    """The worker that has taken it, or an empty string."""
    is_dead: bool = False
    reason: str = ""

    @property
    def order(self) -> tuple[str, str, str | None]:
        return self.new.queue, self.new.target, self.new.order_key


class RandomJournal:
    """The backends, and the calls and leases that the journal must have."""

    def __init__(self, harness: JournalHarness) -> None:
        self._harness = harness
        self._random = random.Random(7)
        self._backends = [harness.new_backend() for _ in range(BACKENDS)]
        self._workers = [harness.new_worker() for _ in range(WORKERS)]
        self._calls: dict[int, _ReferenceCall] = {}
        self._leases: dict[str, bool] = dict.fromkeys(self._workers, False)
        self._last_id = 0
        self._gaps = itertools.count(1)
        self._queues = [harness.queue, f"{harness.queue}a"]
        self._places = [(queue, target) for queue in self._queues for target in ("", "a", "A")]

    def run(self) -> None:
        """Send the requests, and compare after each of them."""
        steps = [self._append] * 4 + [self._take] * 5 + [self._report] * 4
        steps += [self._release, self._retry, self._delete, self._renew]
        for _ in range(STEPS):
            self._backend = self._random.choice(self._backends)
            self._random.choice(steps)()
            self._compare()

    # Requests: each sets the rule of the comparison that follows

    def _append(self) -> None:
        """Append calls, with and without an order key, some of which are overdue."""
        self._harness.rule = "appended_calls_are_kept_unchanged"
        calls = []
        for _ in range(self._random.randint(1, 5)):
            queue, target = self._random.choice(self._places)
            call = self._harness.new_call(
                self._random.randint(1, 99),
                queue=queue,
                target=target,
                method=self._random.choice(["/shop.Orders/Push", "/shop.Bills/Push"]),
                delay_s=self._delay_s(),
                attempts=self._random.randint(0, 9),
                error=self._random.choice(["", "down"]),
                order_key=self._random.choice([None, "", "k", "K"]),
            )
            calls.append(call)
        ids = self._harness.append(self._backend, *calls)
        require(
            ids == sorted(set(ids)) and ids[0] > self._last_id,
            f"ids must increase, also after the last call was deleted, but {ids} follow "
            f"{self._last_id}",
        )
        self._last_id = ids[-1]
        for number, call in zip(ids, calls, strict=True):
            self._calls[number] = _ReferenceCall(call, call.delay_s, call.attempts, call.error)

    def _take(self) -> None:
        """Take calls of some routes, one of which may be there twice."""
        self._harness.rule = "ready_calls_of_the_routes_are_taken_when_they_are_due"
        worker = self._random.choice(self._workers)
        places = self._random.choices(self._places, k=self._random.randint(0, 4))
        limits = [self._random.choice([-1, 0, 1, 2, MANY]) for _ in places]
        within_s = self._random.choice([0.0, 0.0, 1e9, -20.5 * GAP_S])
        routes = [
            self._harness.route(limit, queue=queue, target=target)
            for (queue, target), limit in zip(places, limits, strict=True)
        ]
        taken = self._backend.take(worker, HOUR_S, routes, within_s)
        for place in dict.fromkeys(places):
            limit = sum(
                max(0, each) for at, each in zip(places, limits, strict=True) if at == place
            )
            numbers = [call.id for call in taken if (call.queue, call.target) == place]
            self._require_taken(numbers, place, limit, within_s)
        require(
            {(call.queue, call.target) for call in taken} <= set(places),
            f"take must return calls of the routes {places} only, not {taken}",
        )
        for call in taken:
            self._require_equal(call, "take", CallState.TAKEN)
            self._calls[call.id].worker = worker
        self._leases[worker] |= bool(taken)

    def _require_taken(
        self, numbers: list[int], place: tuple[str, str], limit: int, within_s: float
    ) -> None:
        """Check what was taken by a route. Calls that are due at zero have any order."""
        ready = [
            (call.due_s, number)
            for number, call in self._calls.items()
            if call.order[:2] == place
            and self._state_of(number) is CallState.READY
            and call.due_s <= within_s
        ]
        wanted = [due_s for due_s, _ in sorted(ready)[:limit]]
        dues = {number: due_s for due_s, number in ready}
        require(
            [dues.get(number) for number in numbers] == wanted,
            f"take of {place} must return the first {limit} of the ready calls "
            f"{[number for _, number in sorted(ready)]}, which are due within {within_s} s, in "
            f"this order, not {numbers}",
        )

    def _report(self) -> None:
        """Report results of calls that a worker has, and of others."""
        self._harness.rule = "results_of_taken_calls_are_stored_and_others_ignored"
        worker = self._random.choice(self._workers)
        owned = [number for number, call in self._calls.items() if call.worker == worker]
        others = [number for number, call in self._calls.items() if call.worker != worker]
        chosen = self._random.sample(owned, self._random.randint(0, len(owned)))
        wrong = [*self._random.sample(others, min(2, len(others))), UNKNOWN_ID]
        results: list[Result] = [self._result(number) for number in chosen + wrong]
        self._random.shuffle(results)
        lost = self._backend.report(worker, results)
        require(
            sorted(lost) == sorted(wrong),
            f"report must return the ids of calls that the worker does not have, {wrong}, "
            f"not {lost}",
        )
        for result in results:
            if result.id in chosen:
                self._store(result)

    def _result(self, number: int) -> Result:
        attempts = self._random.randint(2, 9)
        kinds: tuple[Result, ...] = (
            Delivered(number),
            Postponed(number, attempts, self._delay_s(), "busy"),
            Dead(number, attempts, "gone", "too old"),
        )
        return self._random.choice(kinds)

    def _store(self, result: Result) -> None:
        call = self._calls[result.id]
        match result:
            case Delivered():
                del self._calls[result.id]
                return
            case Postponed():
                call.due_s = result.delay_s
            case Dead():
                call.is_dead, call.reason = True, result.reason
        call.attempts, call.error, call.worker = result.attempts, result.error, ""

    def _release(self) -> None:
        self._harness.rule = "released_calls_are_ready_at_once"
        worker = self._random.choice(self._workers)
        self._backend.release(worker)
        self._leases[worker] = False
        for call in self._calls.values():
            call.worker = "" if call.worker == worker else call.worker

    def _renew(self) -> None:
        self._harness.rule = "only_a_worker_that_has_taken_calls_has_a_lease"
        for worker, has_lease in self._leases.items():
            has_calls = any(call.worker == worker for call in self._calls.values())
            if has_calls or not has_lease:  # a lease without calls may end
                renewed = self._backend.renew(worker, HOUR_S)
                require(renewed is has_lease, f"renew must return {has_lease}, not {renewed}")

    def _retry(self) -> None:
        self._harness.rule = "waiting_and_dead_calls_are_retried_now"
        chosen, ids = self._selection()
        ids = [number for number in ids if not self._calls[number].worker]
        retried = self._backend.retry(chosen)
        require(
            retried == len(ids),
            f"retry must return the number of changed calls, {len(ids)}, not {retried}",
        )
        for number in ids:
            call = self._calls[number]
            call.due_s = 0.0
            if call.is_dead:
                call.is_dead, call.reason, call.attempts, call.error = False, "", 0, None

    def _delete(self) -> None:
        self._harness.rule = "deleted_calls_are_gone"
        chosen, ids = self._selection()
        deleted = self._backend.delete(chosen)
        require(
            deleted == len(ids),
            f"delete must return the number of calls, {len(ids)}, not {deleted}",
        )
        for number in ids:
            del self._calls[number]

    def _selection(self) -> tuple[Filter, list[int]]:
        """Return a filter, and the ids of the calls that it selects."""
        queue, target = self._random.choice(self._places)
        state = self._random.choice([*CallState])
        some = self._random.sample(sorted(self._calls), len(self._calls) // 3)
        chosen = self._random.choice(
            [
                Filter(queue=queue, ids=(*some, UNKNOWN_ID)),
                Filter(queue=queue, target=target, states=(state,)),
            ]
        )
        ids = [
            number
            for number, call in self._calls.items()
            if call.new.queue == queue
            and (chosen.ids is None or number in chosen.ids)
            and (chosen.states is None or self._state_of(number) is state)
            and chosen.target in {None, call.new.target}
        ]
        return chosen, ids

    def _delay_s(self) -> float:
        """Return a delay that no other call has; half of them are in the past."""
        return next(self._gaps) * GAP_S * self._random.choice([-1, 1])

    # Comparisons

    def _state_of(self, number: int) -> CallState:
        """Derive the state of a call from the other calls of its order key."""
        call = self._calls[number]
        if call.is_dead:
            return CallState.DEAD
        if call.worker:
            return CallState.TAKEN
        if call.new.order_key is None:
            return CallState.READY
        others = {
            other: each
            for other, each in self._calls.items()
            if each.order == call.order and not each.is_dead
        }
        is_first = number == min(others) and not any(each.worker for each in others.values())
        return CallState.READY if is_first else CallState.BLOCKED

    def _compare(self) -> None:
        backend = self._random.choice(self._backends)
        stored: list[StoredCall] = []
        for queue in self._queues:
            stored += backend.select(Filter(queue=queue), limit=MANY)
        ids = sorted(call.id for call in stored)
        require(
            ids == sorted(self._calls), f"the calls {sorted(self._calls)} must be stored, not {ids}"
        )
        for call in stored:
            self._require_equal(call, "select", self._state_of(call.id))
        self._harness.rule = "depths_count_calls_by_state"
        depths = {
            (depth.queue, depth.target): (depth.waiting, depth.taken, depth.dead)
            for depth in backend.depths()
            if depth.queue in self._queues
        }
        wanted = {place: counts for place in self._places if any(counts := self._counts(place))}
        require(depths == wanted, f"depths must be {wanted}, not {depths}")
        require(list(depths) == sorted(depths), f"depths must be in order, not {list(depths)}")
        self._harness.rule = "routes_have_ready_calls"
        routes = {route for route in backend.routes() if route[0] in self._queues}
        ready = {
            call.order[:2]
            for number, call in self._calls.items()
            if self._state_of(number) is CallState.READY
        }
        require(routes == ready, f"routes must return {sorted(ready)}, not {sorted(routes)}")

    def _counts(self, place: tuple[str, str]) -> tuple[int, int, int]:
        calls = [call for call in self._calls.values() if call.order[:2] == place]
        taken, dead = sum(bool(call.worker) for call in calls), sum(call.is_dead for call in calls)
        return len(calls) - taken - dead, taken, dead

    def _require_equal(self, stored: StoredCall, method: str, state: CallState) -> None:
        """Check all values of a call that a method has returned."""
        call = self._calls[stored.id]
        error = stored.error if call.error is None else call.error
        new = call.new
        wanted: tuple[object, ...] = (
            *(new.queue, new.target, new.method, new.key, new.body, new.order_key),
            *(call.attempts, error, call.reason, state.name),
        )
        actual: tuple[object, ...] = (
            *(stored.queue, stored.target, stored.method, stored.key, stored.body),
            *(stored.order_key, stored.attempts, stored.error, stored.reason, stored.state.name),
        )
        require(
            actual == wanted,
            f"{method} must return the call {stored.id} with {wanted}, not {actual}",
        )
        require(
            call.due_s - GAP_S / 2 < stored.due_s <= call.due_s + GAP_S / 2,
            f"the call {stored.id} must be due in {call.due_s} s, not {stored.due_s}",
        )
