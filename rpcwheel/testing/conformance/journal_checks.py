"""The rules of `JournalBackend`, one function for each."""

from __future__ import annotations

import os
import re
import threading
import time
import warnings
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from rpcwheel.errors import JournalUnavailable
from rpcwheel.journal.backend import (
    CallState,
    Dead,
    Delivered,
    Filter,
    NewCall,
    Postponed,
    storable,
)

from .journal_harness import HOUR_S, MANY, SHORT_S, TIMEOUT_S, JournalHarness, wait
from .journal_model import RandomJournal
from .registry_harness import on_threads, require

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rpcwheel.journal.backend import StoredCall

READY, BLOCKED, TAKEN, DEAD = CallState

SLACK_S: Final = 60.0
"""By how much times may differ because the machine is slow."""

MILLISECOND: Final = 0.001
"""Times may be rounded to it."""

TEXTS: Final = (
    "",
    "x",
    "Zürich ∑ 数据 \U0001f600 é",
    "a'b\"c`d\\e%f_g*h?i[j]k",
    "\x01\t\r\n\x7f",
    " ",
)


def requests_agree_with_a_reference(harness: JournalHarness) -> None:
    """Random requests to two backends have the results that a reference in memory has.

    These are most rules of all requests, states, order keys and routes. A failure names the rule.
    """
    RandomJournal(harness).run()


# Appending


def appended_calls_are_kept_unchanged(harness: JournalHarness) -> None:
    """`select` and `take` return all texts, bytes of all values, and long ones."""
    backend = harness.new_backend()
    bodies = (b"", b"\0", bytes(range(256)), os.urandom(1 << 20), b"\\x41", b"'")
    calls = [
        replace(
            harness.new_call(
                queue=f"{harness.queue}{text}", target=text, method=f"/{text}", body=body
            ),
            key=text,
            max_age_s=12.5,
            attempts=number,
            error=text * 10_000,
            order_key=None if number == 0 else text,
        )
        for number, (text, body) in enumerate(zip(TEXTS, bodies, strict=True))
    ]
    ids = harness.append(backend, *calls)
    stored = {call.id: call for call in backend.select(Filter(ids=tuple(ids)), limit=MANY)}
    for number, call in zip(ids, calls, strict=True):
        require(number in stored, f"select must find the call {number}, which was appended")
        _require_same(stored[number], call, "select")
        (taken,) = harness.expect_taken(
            backend,
            harness.new_worker(),
            number,
            routes=[harness.route(queue=call.queue, target=call.target)],
        )
        _require_same(taken, call, "take")


def _require_same(stored: StoredCall, call: NewCall, method: str) -> None:
    for name in ("queue", "target", "method", "key", "body", "attempts", "error", "order_key"):
        wanted, actual = getattr(call, name), getattr(stored, name)
        require(
            actual == wanted and type(actual) is type(wanted),
            f"{method} must return {name} as it was appended, {wanted!r:.80}, not {actual!r:.80}",
        )
    require(stored.reason == "", f"{method} must return no reason, not {stored.reason!r}")
    for name, wanted in (("due_s", call.delay_s), ("expires_s", call.max_age_s)):
        actual = getattr(stored, name)
        require(
            wanted - SLACK_S < actual <= wanted + MILLISECOND,
            f"{method} must return {name} of about {wanted}, not {actual}",
        )
    require(
        -MILLISECOND <= stored.age_s < SLACK_S,
        f"{method} must return an age of about 0, not {stored.age_s}",
    )


def what_not_every_engine_can_store_is_replaced(harness: JournalHarness) -> None:
    """All requests replace U+0000 and surrogates in texts by U+FFFD."""
    backend, worker = harness.new_backend(), harness.new_worker()
    odd = "a\0b\ud800c"
    call = replace(harness.new_call(order_key=odd, error=odd, target=odd), method=odd, key=odd)
    (number,) = harness.append(backend, call)
    for name in ("target", "method", "key", "error", "order_key"):
        text = getattr(harness.stored_call(backend, number), name)
        require(
            text == storable(odd),
            f"{name} must be {storable(odd)!r} in the journal, not {text!r}",
        )
    chosen = Filter(queue=harness.queue, target=odd, method=f"{odd}*", error=odd)
    require(backend.select(chosen), "select must accept texts with U+0000 and surrogates")
    harness.expect_taken(backend, worker, number, routes=[harness.route(target=odd)])
    lost = backend.report(worker, [Dead(number, 2, odd, odd)])
    stored = harness.stored_call(backend, number)
    require(
        not lost and (stored.error, stored.reason) == (storable(odd), storable(odd)),
        f"report must accept texts with U+0000 and surrogates, but stored {stored!r}",
    )


def many_calls_are_appended_at_once(harness: JournalHarness) -> None:
    """Ids are in the order of the calls. An append of no calls is accepted."""
    backend = harness.new_backend()
    require(backend.append([]) == [], "append of no calls must return no ids")
    calls = [
        harness.new_call(number, order_key=f"{number % 7}" if number % 2 else None)
        for number in range(2000)
    ]
    ids = harness.append(backend, *calls)
    stored = harness.stored_calls(backend)
    require(
        [(call.id, call.body) for call in stored]
        == [(number, call.body) for number, call in zip(ids, calls, strict=True)],
        "append must return the ids in the order of the calls",
    )
    first: dict[str | None, int] = {}
    for call in stored:
        first.setdefault(call.order_key, call.id)
    wanted = [
        READY if call.order_key is None or first[call.order_key] == call.id else BLOCKED
        for call in stored
    ]
    require(
        [call.state for call in stored] == wanted,
        "of the calls of one append, the first of each order key must be READY, others BLOCKED",
    )


def an_append_stores_all_or_nothing(harness: JournalHarness) -> None:
    """If one of the calls cannot be stored, none is."""
    backend = harness.new_backend()
    wrong: Any = replace(harness.new_call(2), body=None)  # type: ignore[arg-type]
    for calls in (
        [harness.new_call(1), wrong],
        [harness.new_call(1, order_key="a"), replace(wrong, order_key="a")],
    ):
        raised = False
        try:
            backend.append(calls)
        except Exception:  # noqa: BLE001 - an error of the caller, which no journal has to name
            raised = True
        require(raised, "append of a call whose body is None must raise")
        require(not harness.stored_calls(backend), "an append that raised must store no call")
    harness.append(backend, harness.new_call(3))
    harness.append(backend, harness.new_call(4, order_key="a"))


def concurrent_appends_are_all_stored(harness: JournalHarness) -> None:
    """Several backends append at once, and each call is stored once."""
    backends = [harness.new_backend() for _ in range(4)]
    ids: list[list[int]] = [[] for _ in backends]

    def work(place: int) -> None:
        for number in range(20):
            ids[place] += harness.append(
                backends[place], harness.new_call(number), harness.new_call(number, order_key="a")
            )

    on_threads(*(partial(work, place) for place in range(len(backends))))
    for each in ids:
        require(each == sorted(each), f"the ids of one backend must increase, but are {each}")
    stored_ids = [call.id for call in harness.stored_calls(backends[0])]
    require(
        stored_ids == sorted(number for each in ids for number in each),
        f"all {sum(map(len, ids))} calls of concurrent appends must be stored once, "
        f"not {stored_ids}",
    )


# Taking


def a_call_becomes_due(harness: JournalHarness) -> None:
    """A call is due after its delay, by the clock of the engine."""
    backend, worker = harness.new_backend(), harness.new_worker()
    (number,) = harness.append(backend, harness.new_call(1, delay_s=0.2))
    taken: list[StoredCall] = []

    def look() -> bool:
        taken.extend(harness.take(backend, worker))
        return bool(taken)

    wait(look, lambda: "a call with a delay of 0.2 s must be taken after it")
    require(
        taken[0].id == number and taken[0].due_s <= 0 and taken[0].age_s >= 0.2 - MILLISECOND,
        f"a call must not be taken before it is due, but was: {taken[0]}",
    )


def calls_due_at_the_same_time_are_taken_in_the_order_of_their_ids(harness: JournalHarness) -> None:
    """Ids are compared as numbers, whatever their number of digits."""
    backend, worker = harness.new_backend(), harness.new_worker()
    ids = harness.append(backend, *map(harness.new_call, range(120)))
    for first in range(0, len(ids), 50):
        harness.expect_taken(backend, worker, *ids[first : first + 50], routes=[harness.route(50)])


def concurrent_workers_take_each_call_once(harness: JournalHarness) -> None:
    """Several workers take while another backend appends."""
    producer, backends = harness.new_backend(), [harness.new_backend() for _ in range(4)]
    total = 400
    taken: list[list[int]] = [[] for _ in backends]
    workers = [harness.new_worker() for _ in backends]

    def work(place: int) -> None:
        backend, worker = backends[place], workers[place]
        end = time.monotonic() + TIMEOUT_S
        while sum(map(len, taken)) < total:
            require(time.monotonic() < end, f"{total} calls must be taken, but {taken} were")
            taken_ids = [call.id for call in harness.take(backend, worker, harness.route(7))]
            lost = backend.report(worker, [Delivered(number) for number in taken_ids])
            require(not lost, f"report must accept results of taken calls, but ignored {lost}")
            taken[place] += taken_ids

    def produce() -> None:
        for first in range(0, total, 10):
            harness.append(producer, *map(harness.new_call, range(first, first + 10)))

    on_threads(produce, *(partial(work, place) for place in range(len(backends))))
    every = [number for each in taken for number in each]
    require(
        len(set(every)) == len(every) == total,
        f"each of {total} calls must be taken once, but {len(every)} were, {len(set(every))} "
        "different ones",
    )
    require(not harness.stored_calls(producer), "delivered calls must be deleted")


# Leases


def calls_are_taken_over_when_a_lease_ends(harness: JournalHarness) -> None:
    """The calls are unchanged. Late results change nothing, and `renew` returns False."""
    backend, other = harness.new_backend(), harness.new_backend()
    old, new = harness.new_worker(), harness.new_worker()
    ids = harness.append(
        backend,
        *(harness.new_call(number, attempts=3, error="down", delay_s=-5) for number in range(3)),
    )
    harness.expect_taken(backend, old, *ids, lease_s=SHORT_S)
    harness.wait_until_taken(other, new, *ids)
    before = harness.stored_calls(other)
    lost = backend.report(
        old, [Delivered(ids[0]), Postponed(ids[1], 9, 0.0, "late"), Dead(ids[2], 9, "late", "late")]
    )
    require(
        sorted(lost) == ids,
        f"report must return the ids of calls that were taken over, {ids}, not {lost}",
    )
    require(
        backend.renew(old, HOUR_S) is False, "renew of a lease that has ended must return False"
    )
    after = harness.stored_calls(other)
    for was, call in zip(before, after, strict=True):
        require(
            (was.id, was.state, was.attempts, was.error, was.reason)
            == (call.id, TAKEN, 3, "down", ""),
            f"a late result must change nothing, but changed {was} to {call}",
        )
        require(call.due_s <= -5 + MILLISECOND, "a call that is taken over must keep its due time")
    require(
        other.report(new, [Delivered(number) for number in ids]) == [],
        "report must accept the results of the new worker",
    )


def a_take_without_routes_ends_leases(harness: JournalHarness) -> None:
    """A take without routes makes calls ready whose lease has ended."""
    backend, other = harness.new_backend(), harness.new_backend()
    (number,) = harness.append(backend, harness.new_call(1))
    harness.expect_taken(backend, harness.new_worker(), number, lease_s=SHORT_S)
    worker = harness.new_worker()

    def look() -> bool:
        require(
            other.take(worker, HOUR_S, [], 0.0) == [], "take without routes must return nothing"
        )
        return (harness.queue, harness.route().target) in other.routes()

    wait(look, lambda: "take without routes must make calls ready whose lease has ended")
    harness.expect_states(other, {number: READY}, "after its lease has ended")


def a_worker_keeps_its_calls_after_its_lease(harness: JournalHarness) -> None:
    """A take of the worker itself does not end its lease, which begins again with more calls."""
    backend, worker = harness.new_backend(), harness.new_worker()
    ids = harness.append(backend, harness.new_call(1), harness.new_call(2))
    harness.expect_taken(backend, worker, *ids, lease_s=SHORT_S)
    (later,) = harness.append(backend, harness.new_call(3, delay_s=2 * SHORT_S))  # after its end
    harness.wait_until_taken(backend, worker, later)
    require(
        backend.report(worker, [Delivered(number) for number in (*ids, later)]) == [],
        "report must accept results of a worker whose calls no other worker has taken",
    )


def a_renewed_lease_does_not_end(harness: JournalHarness) -> None:
    """`renew` and taking other calls extend a lease; a take that returns nothing does not."""
    backend, other = harness.new_backend(), harness.new_backend()
    renewing, taking, idle = harness.new_worker(), harness.new_worker(), harness.new_worker()
    routes = [harness.route(queue=f"{harness.queue}.{number}") for number in range(3)]
    ids = [
        harness.append(
            backend, harness.new_call(queue=route.queue), harness.new_call(queue=route.queue)
        )
        for route in routes
    ]
    for worker, route, (number, _) in zip((renewing, taking, idle), routes, ids, strict=True):
        harness.expect_taken(
            backend, worker, number, routes=[replace(route, limit=1)], lease_s=HOUR_S
        )
    for worker in (renewing, taking, idle):
        require(backend.renew(worker, 2 * SHORT_S), "renew of a lease must return True")
    require(backend.renew(renewing, HOUR_S), "renew of a lease must return True")
    harness.expect_taken(backend, taking, ids[1][1], routes=[routes[1]])
    harness.take(backend, idle, harness.route(queue=f"{harness.queue}.none"))
    taken: list[int] = []

    def look() -> bool:
        taken.extend(call.id for call in harness.take(other, harness.new_worker(), *routes))
        return ids[2][0] in taken

    wait(look, lambda: "a lease must end that was only shortened by renew, or after an empty take")
    require(
        sorted(taken) == sorted([ids[0][1], *ids[2]]),
        f"the calls {[ids[0][1], *ids[2]]} must be taken when a lease ends, but {taken} were: the "
        "others have been renewed by `renew` or by `take`",
    )
    harness.let_a_lease_end(other)
    require(
        harness.take(other, harness.new_worker(), *routes) == [],
        "calls with a renewed lease must not be taken by others",
    )
    require(
        backend.report(renewing, [Delivered(ids[0][0])])
        == backend.report(taking, [Delivered(number) for number in ids[1]])
        == [],
        "report must accept results of calls with a renewed lease",
    )


# Reporting


def a_report_stores_all_or_nothing(harness: JournalHarness) -> None:
    """If one of the results cannot be stored, none is."""
    backend, worker = harness.new_backend(), harness.new_worker()
    ids = harness.append(
        backend,
        *(harness.new_call(number, order_key="a" if number else None) for number in range(2)),
    )
    harness.expect_taken(backend, worker, *ids)
    wrong: Any = Postponed(ids[1], None, 0.0, "x")  # type: ignore[arg-type]
    raised = False
    try:
        backend.report(worker, [Delivered(ids[0]), wrong])
    except Exception:  # noqa: BLE001 - an error of the caller, which no journal has to name
        raised = True
    require(raised, "report of a result whose attempts are None must raise")
    harness.expect_states(backend, dict.fromkeys(ids, TAKEN), "after a report that raised")
    require(
        backend.report(worker, [Delivered(number) for number in ids]) == [],
        "report must accept results after one that raised",
    )


# Order keys


def a_call_that_is_taken_over_still_blocks(harness: JournalHarness) -> None:
    """A call that was released blocks later ones too."""
    backend, old, new = harness.new_backend(), harness.new_worker(), harness.new_worker()
    first, second = harness.append(
        backend, harness.new_call(order_key="a"), harness.new_call(order_key="a")
    )
    harness.expect_taken(backend, old, first)
    backend.release(old)
    harness.expect_states(backend, {first: READY, second: BLOCKED}, "after a release")
    harness.expect_taken(backend, old, first, lease_s=SHORT_S)
    harness.wait_until_taken(backend, new, first)
    harness.expect_states(backend, {first: TAKEN, second: BLOCKED}, "after the lease has ended")
    backend.report(old, [Delivered(first)])
    harness.expect_states(backend, {first: TAKEN, second: BLOCKED}, "after a late result")
    backend.report(new, [Delivered(first)])
    harness.expect_taken(backend, new, second)


def concurrent_workers_keep_the_order(harness: JournalHarness) -> None:
    """Other backends append meanwhile, several calls of different keys at once."""
    backends, producers = (
        [harness.new_backend() for _ in range(3)],
        [harness.new_backend() for _ in range(2)],
    )
    keys, rounds = ("a", "b", "c"), 15
    total = len(keys) * rounds * len(producers)
    lock, busy = threading.Lock(), set[str | None]()
    done: dict[str | None, list[int]] = {key: [] for key in keys}

    def produce(place: int) -> None:
        turned = keys if place else keys[::-1]
        for number in range(rounds):
            harness.append(
                producers[place], *(harness.new_call(number, order_key=key) for key in turned)
            )

    def work(place: int) -> None:
        backend, worker = backends[place], harness.new_worker()
        end = time.monotonic() + TIMEOUT_S
        while sum(map(len, done.values())) < total:
            require(time.monotonic() < end, f"{total} calls must be taken, but only {done} were")
            calls = harness.take(backend, worker, harness.route(2))
            with lock:
                taken = {call.order_key for call in calls}
                require(
                    len(taken) == len(calls) and not taken & busy,
                    "two calls of one order key were taken at the same time",
                )
                busy.update(taken)
                for call in calls:
                    done[call.order_key].append(call.id)
            with lock:
                busy.difference_update(taken)  # from the report on, the next may be taken
            backend.report(worker, [Delivered(call.id) for call in calls])

    on_threads(
        *(partial(produce, place) for place in range(len(producers))),
        *(partial(work, place) for place in range(len(backends))),
    )
    for key, ids in done.items():
        require(ids == sorted(ids), f"calls of the order key {key} were taken in the order {ids}")
    require(not harness.stored_calls(producers[0]), "all calls must be delivered")


# Selecting


def select_finds_what_its_filter_says(harness: JournalHarness) -> None:
    """All conditions must hold; a filter without conditions selects all calls."""
    backend, worker = harness.new_backend(), harness.new_worker()
    dead, taken, ready, elsewhere = harness.append(
        backend,
        harness.new_call(1, target="a:1", error="status UNAVAILABLE: x"),
        harness.new_call(2, target="b:1", method="/shop.Orders/Pull", error="100% of_it"),
        harness.new_call(3, target="a:1", order_key="k"),
        harness.new_call(4, target="a:1", order_key="k", queue=f"{harness.queue}.other"),
    )
    (blocked,) = harness.append(backend, harness.new_call(5, target="a:1", order_key="k"))
    harness.expect_taken(backend, worker, taken, routes=[harness.route(target="b:1")])
    harness.expect_taken(backend, worker, dead, routes=[harness.route(1, target="a:1")])
    backend.report(worker, [Dead(dead, 2, "status UNAVAILABLE: x", "Too old: [9]")])
    chosen: tuple[tuple[Filter, list[int]], ...] = (
        (Filter(), [dead, taken, ready, elsewhere, blocked]),
        (Filter(ids=(ready, dead, ready)), [dead, ready]),
        (Filter(ids=()), []),
        (Filter(ids=(-1, 0, 2**63, 2**70, taken)), [taken]),
        (Filter(states=(READY,)), [ready, elsewhere]),
        (Filter(states=(BLOCKED,)), [blocked]),
        (Filter(states=(TAKEN, DEAD)), [dead, taken]),
        (Filter(states=()), []),
        (Filter(queue=harness.queue), [dead, taken, ready, blocked]),
        (Filter(queue=f"{harness.queue}.other"), [elsewhere]),
        (Filter(queue=f"{harness.queue}.*"), []),
        (Filter(target="a:1"), [dead, ready, elsewhere, blocked]),
        (Filter(target="A:1"), []),
        (Filter(target="*"), []),
        (Filter(target="b:1", method="*Pull"), [taken]),
        (Filter(target="a:1", method="*Pull"), []),
        (Filter(error="UNAVAILABLE"), [dead]),
        (Filter(error="unavailable"), []),
        (Filter(error="Too old: [9]"), [dead]),
        (Filter(error="0% of_"), [taken]),
        (Filter(error="%"), [taken]),
        (Filter(error=""), [dead, taken, ready, elsewhere, blocked]),
        (Filter(min_age_s=-1.0), [dead, taken, ready, elsewhere, blocked]),
        (Filter(min_age_s=HOUR_S), []),
        (Filter(states=(READY,), target="a:1", queue=f"{harness.queue}.other"), [elsewhere]),
    )
    for each, wanted in chosen:
        selected = [
            stored.id
            for stored in backend.select(each, after=dead - 1, limit=MANY)
            if stored.queue.startswith(harness.queue)
        ]
        require(selected == wanted, f"select of {each} must find {wanted}, not {selected}")


def wildcards_match_any_text(harness: JournalHarness) -> None:
    """Only `*` and `?` are wildcards, the whole text must match, and case matters."""
    backend = harness.new_backend()
    texts = (
        "a", "ab", "abc", "aXc", "ABC", "a*c", "a%c", "a_c", "a[b]c", "a\\c", "aéc", "", "a\nc",
        "a数c", "[a]", "{a}", "a.c", "-", "ababab",
    )  # fmt: skip
    patterns = (
        "*", "?", "a?c", "a*", "*c", "*b*", "a**c", "*?", "a%c", "a_c", "a\\c", "[a]", "a[b]c",
        "{a}", "a.c", "*ab", "a*b", "*a*b*a*b*", "abc", "", "a-z",
    )  # fmt: skip
    meanings = {"*": ".*", "?": "."}
    harness.append(backend, *(harness.new_call(method=text) for text in texts))
    for pattern in patterns:
        matches = re.compile("".join(meanings.get(c, re.escape(c)) for c in pattern), re.DOTALL)
        wanted = sorted(filter(matches.fullmatch, texts))
        chosen = Filter(queue=harness.queue, method=pattern)
        selected = [stored.method for stored in backend.select(chosen, limit=MANY)]
        require(
            sorted(selected) == wanted,
            f"the pattern {pattern!r} must match {wanted}, not {sorted(selected)}",
        )


def select_returns_pages(harness: JournalHarness) -> None:
    """Pages follow each other in the order of ids."""
    backend = harness.new_backend()
    ids = harness.append(
        backend, *(harness.new_call(delay_s=float(-number)) for number in range(25))
    )
    chosen, selected, pages = Filter(queue=harness.queue), list[int](), 0
    while page := backend.select(chosen, after=selected[-1] if selected else 0, limit=10):
        require(len(page) <= 10, "select must return at most `limit` calls")  # noqa: PLR2004
        selected += [call.id for call in page]
        pages += 1
    require(selected == ids, f"pages must have the calls {ids} in the order of ids, not {selected}")
    require(pages == 3, "select must return `limit` calls if there are as many")  # noqa: PLR2004
    require(backend.select(chosen, limit=0) == [], "select with a limit of 0 must return nothing")


def many_ids_can_be_selected(harness: JournalHarness) -> None:
    """`select`, `retry` and `delete` accept 40,000 ids."""
    backend = harness.new_backend()
    ids = harness.append(backend, *map(harness.new_call, range(40)))
    many = Filter(queue=harness.queue, ids=(*range(ids[-1] + 1, ids[-1] + 40_000), *ids))
    require(len(backend.select(many)) == len(ids), "select must accept 40,000 ids")
    require(backend.retry(many) == len(ids), "retry must accept 40,000 ids")
    require(backend.delete(many) == len(ids), "delete must accept 40,000 ids")


def a_call_that_a_deletion_makes_ready_stays(harness: JournalHarness) -> None:
    """`delete` of READY calls deletes those that were READY before, also if there are many."""
    backend = harness.new_backend()
    calls = [harness.new_call(number) for number in range(2_500)]
    calls[0], calls[-1] = replace(calls[0], order_key="k"), replace(calls[-1], order_key="k")
    ids = harness.append(backend, *calls)
    deleted = backend.delete(Filter(states=(READY,), queue=harness.queue))
    require(deleted == len(ids) - 1, f"delete must return {len(ids) - 1}, not {deleted}")
    last = harness.stored_call(backend, ids[-1])
    require(last.state == READY, f"the call behind a deleted one must be READY, but is {last}")


def dead_letters_are_retried_as_if_they_were_new(harness: JournalHarness) -> None:
    """A retried dead letter has no attempts, and its whole maximum age again."""
    backend, worker = harness.new_backend(), harness.new_worker()
    (number,) = harness.append(backend, harness.new_call(max_age_s=0.2))
    harness.expect_taken(backend, worker, number)
    backend.report(worker, [Dead(number, 7, "no", "too old")])
    wait(
        lambda: harness.stored_call(backend, number).expires_s < -0.1,  # noqa: PLR2004
        lambda: "expires_s must decrease with time",
    )
    aged = harness.stored_call(backend, number).age_s
    require(aged >= 0.3 - MILLISECOND, f"age_s must increase with time, but is {aged}")
    require(backend.retry(Filter(states=(DEAD,), queue=harness.queue)) == 1, "retry must return 1")
    (call,) = harness.expect_taken(backend, worker, number)
    require(
        (call.attempts, call.reason) == (0, ""),
        f"a dead letter that is retried must have 0 attempts and no reason, but is {call}",
    )
    total = call.age_s + call.expires_s
    require(
        abs(total - 0.2) <= 2 * MILLISECOND,
        f"a dead letter that is retried must have its maximum age of 0.2 s again, not {total}",
    )
    require(
        call.age_s - (call.due_s * -1) <= 2 * MILLISECOND,
        f"a dead letter that is retried must be as if it was stored now, but is {call}",
    )


# Counting


def depths_have_the_age_of_the_oldest_call(harness: JournalHarness) -> None:
    """Dead letters do not count; one that is retried is as old as if it was stored then."""
    backend, worker = harness.new_backend(), harness.new_worker()

    def oldest_s() -> float:
        return next(depth.oldest_s for depth in backend.depths() if depth.queue == harness.queue)

    (dead,) = harness.append(backend, harness.new_call(1))
    harness.expect_taken(backend, worker, dead)
    backend.report(worker, [Dead(dead, 2, "", "")])
    require(oldest_s() == 0, "the oldest call that is not dead must be 0 s old without one")
    (waiting,) = harness.append(backend, harness.new_call(2, delay_s=HOUR_S, order_key="a"))
    wait(
        lambda: harness.stored_call(backend, waiting).age_s > 0.05,  # noqa: PLR2004
        lambda: "age_s must increase with time",
    )
    harness.append(backend, harness.new_call(3, order_key="a"))  # a younger one, which is blocked
    backend.retry(Filter(ids=(dead,)))  # is now the youngest, and has the lowest id
    before = harness.stored_call(backend, waiting).age_s
    actual = oldest_s()
    after = harness.stored_call(backend, waiting).age_s
    require(
        before - MILLISECOND <= actual <= after + MILLISECOND,
        f"the oldest call must be {before} s old, not {actual}",
    )


# Backends


def requests_may_be_made_on_any_thread(harness: JournalHarness) -> None:
    """`select`, `depths`, `routes`, `retry` and `delete` may run while others run."""
    backend, worker = harness.new_backend(), harness.new_worker()
    total = 60
    delivered: list[int] = []

    def work() -> None:
        for number in range(total):
            harness.append(backend, harness.new_call(number), harness.new_call(target="other"))
            ids = [call.id for call in harness.take(backend, worker)]
            backend.renew(worker, HOUR_S)
            backend.report(worker, [Delivered(each) for each in ids])
            delivered.extend(ids)

    def look() -> None:
        while len(delivered) < total:
            backend.select(Filter(queue=harness.queue))
            backend.depths()
            backend.routes()
            backend.retry(Filter(queue=harness.queue, target="other"))
            backend.delete(Filter(queue=harness.queue, target="other"))

    on_threads(work, look, look)
    backend.release(worker)
    require(len(set(delivered)) == total, f"{total} calls must be delivered, not {len(delivered)}")


def a_forked_child_has_its_own_connection(harness: JournalHarness) -> None:
    """Requests of the parent and of the child succeed."""
    if not hasattr(os, "fork"):
        return
    backend = harness.new_backend()
    ids = harness.append(backend, harness.new_call(1))
    harness.stored_calls(backend)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads, since CPython 3.12
        child = os.fork()
    if child == 0:
        code = 1
        with suppress(BaseException):
            for number in range(3):
                backend.append([harness.new_call(number)])
                harness.stored_calls(backend)
            backend.close()
            code = 0
        os._exit(code)
    ids += harness.append(backend, harness.new_call(3))
    status: list[int] = []

    def look() -> bool:
        pid, code = os.waitpid(child, os.WNOHANG)
        if pid:
            status.append(os.waitstatus_to_exitcode(code))
        return bool(pid)

    wait(look, lambda: "requests in a forked child must end")
    require(status == [0], "append and select in a forked child must work")
    ids += harness.append(backend, harness.new_call(4))
    stored_ids = [call.id for call in harness.stored_calls(backend)]
    require(
        len(stored_ids) == 6 and set(ids) < set(stored_ids),  # noqa: PLR2004
        f"the journal must have 6 calls of parent and child, not {stored_ids}",
    )


def a_closed_backend_refuses_requests(harness: JournalHarness) -> None:
    """Requests raise `JournalUnavailable`. Closing twice is no error; taken calls stay taken."""
    backend, other, worker = harness.new_backend(), harness.new_backend(), harness.new_worker()
    (number,) = harness.append(backend, harness.new_call())
    harness.expect_taken(backend, worker, number)
    backend.close()
    backend.close()
    requests: dict[str, Callable[[], object]] = {
        "append": lambda: backend.append([harness.new_call()]),
        "take": lambda: harness.take(backend, worker),
        "renew": lambda: backend.renew(worker, HOUR_S),
        "report": lambda: backend.report(worker, [Delivered(number)]),
        "release": lambda: backend.release(worker),
        "routes": backend.routes,
        "depths": backend.depths,
        "select": lambda: backend.select(Filter()),
        "retry": lambda: backend.retry(Filter()),
        "delete": lambda: backend.delete(Filter(queue=harness.queue)),
    }
    for name, request in requests.items():
        try:
            request()
        except JournalUnavailable:
            continue
        raise AssertionError(f"{name} after close must raise JournalUnavailable")
    unused = harness.new_backend()
    unused.close()
    harness.expect_states(other, {number: TAKEN}, "after the backend of its worker was closed")
    require(
        other.report(worker, [Delivered(number)]) == [], "close must not end the lease of a worker"
    )


CHECKS: Final[Sequence[Callable[[JournalHarness], None]]] = (
    requests_agree_with_a_reference,
    appended_calls_are_kept_unchanged,
    what_not_every_engine_can_store_is_replaced,
    many_calls_are_appended_at_once,
    an_append_stores_all_or_nothing,
    concurrent_appends_are_all_stored,
    a_call_becomes_due,
    calls_due_at_the_same_time_are_taken_in_the_order_of_their_ids,
    concurrent_workers_take_each_call_once,
    calls_are_taken_over_when_a_lease_ends,
    a_take_without_routes_ends_leases,
    a_worker_keeps_its_calls_after_its_lease,
    a_renewed_lease_does_not_end,
    a_report_stores_all_or_nothing,
    a_call_that_is_taken_over_still_blocks,
    concurrent_workers_keep_the_order,
    select_finds_what_its_filter_says,
    wildcards_match_any_text,
    select_returns_pages,
    many_ids_can_be_selected,
    a_call_that_a_deletion_makes_ready_stays,
    dead_letters_are_retried_as_if_they_were_new,
    depths_have_the_age_of_the_oldest_call,
    requests_may_be_made_on_any_thread,
    a_forked_child_has_its_own_connection,
    a_closed_backend_refuses_requests,
)
