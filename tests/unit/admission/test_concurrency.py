"""The limit of attempts that run at the same time, fixed and adaptive."""

import heapq

import pytest

from rpcwheel.admission import ConcurrencyPolicy
from rpcwheel.admission.concurrency import Concurrency

MS = 1_000_000


def taken(limit):
    """Take what the limit allows, which is at most 1000; returns how many."""
    return next(number for number in range(1001) if not limit.take())


def test_a_fixed_limit_allows_its_number_of_attempts():
    limit = Concurrency(ConcurrencyPolicy(max_calls=3))
    assert taken(limit) == 3
    limit.release(0, 0, "UNAVAILABLE")
    assert taken(limit) == 1
    assert (limit.limit, limit.running) == (3, 3)


def test_an_adaptive_limit_begins_at_20_or_at_its_highest():
    assert taken(Concurrency(ConcurrencyPolicy())) == 20
    assert taken(Concurrency(ConcurrencyPolicy(highest=7))) == 7


def answer_all(limit, now_ns):
    """Let as many attempts succeed as the limit allows."""
    for _ in range(taken(limit)):
        limit.release(now_ns, now_ns, "NOT_FOUND")


def test_an_adaptive_limit_grows_with_each_success_until_it_was_lowered():
    limit = Concurrency(ConcurrencyPolicy())
    taken(limit)
    for now_ns in range(5):
        limit.release(now_ns, 0, "NOT_FOUND")
        limit.take()
    assert limit.limit == 25
    for now_ns in range(6, 12):
        limit.release(now_ns, 0, "UNAVAILABLE")
    assert limit.limit == 22.5
    for now_ns in range(12, 12 + 18):
        taken(limit)
        limit.release(now_ns, now_ns, "OK")
    assert 23 < limit.limit < 23.5


def test_after_an_outage_an_adaptive_limit_soon_is_what_it_was():
    limit = Concurrency(ConcurrencyPolicy(highest=100))
    for now_ns in range(10):
        answer_all(limit, now_ns)
    for now_ns in range(10, 400):
        limit.take()
        limit.release(now_ns, now_ns, "UNAVAILABLE")
    assert limit.limit < 8
    for now_ns in range(400, 412):
        answer_all(limit, now_ns)
    assert 80 < limit.limit < 92


def test_a_limit_of_which_less_than_half_is_in_use_does_not_grow():
    limit = Concurrency(ConcurrencyPolicy())
    for _ in range(9):
        limit.take()
    for _ in range(100):
        limit.release(0, 0, "OK")
        limit.take()
    assert limit.limit == 20


@pytest.mark.parametrize("code", ["CANCELLED", ""])
def test_an_attempt_without_a_result_does_not_change_the_limit(code):
    limit = Concurrency(ConcurrencyPolicy())
    taken(limit)
    limit.release(0, 0, code)
    assert (limit.limit, limit.running) == (20, 19)


def test_attempts_that_are_refused_together_lower_the_limit_once():
    limit = Concurrency(ConcurrencyPolicy())
    taken(limit)
    for now_ns in range(10, 15):
        limit.release(now_ns, 5, "RESOURCE_EXHAUSTED")
    assert limit.limit == 18
    limit.take()
    limit.release(20, 15, "RESOURCE_EXHAUSTED")  # it began after the limit was lowered
    assert limit.limit == 18 * 0.9


@pytest.mark.parametrize(("code", "too_many"), [("UNAVAILABLE", 5), ("DEADLINE_EXCEEDED", 2)])
def test_failures_lower_the_limit_if_they_are_a_part_of_the_attempts(code, too_many):
    limit = Concurrency(ConcurrencyPolicy())
    taken(limit)
    for number in range(1, too_many + 2):
        limit.release(10 + number, 5, code)
        assert limit.limit == (20 if number < too_many else 18)


@pytest.mark.parametrize(("code", "one_in"), [("UNAVAILABLE", 10), ("DEADLINE_EXCEEDED", 50)])
def test_failures_that_do_not_depend_on_the_limit_do_not_keep_it_low(code, one_in):
    """Of a server that can execute any number of calls at a time."""
    limit, now_ns = Concurrency(ConcurrencyPolicy()), 0
    for _ in range(400):
        began_ns, count = now_ns, taken(limit)
        for _ in range(count):
            now_ns += 1
            limit.release(now_ns, began_ns, code if now_ns % one_in == 5 else "OK")
    assert limit.limit > 190


def test_an_adaptive_limit_remains_between_one_and_its_highest():
    limit = Concurrency(ConcurrencyPolicy(highest=30))
    for now_ns in range(1, 100):
        assert limit.take()
        limit.release(now_ns, now_ns, "UNAVAILABLE")
    assert limit.limit == 1
    for now_ns in range(100, 2000):
        taken(limit)
        for _ in range(limit.running):
            limit.release(now_ns, now_ns, "OK")
    assert limit.limit == 30


@pytest.mark.parametrize("slots", [4, 60])
def test_an_adaptive_limit_finds_how_many_calls_a_server_accepts(slots):
    """A server with calls of 50 ms that refuses those above its slots after 1 ms; 2,000 calls/s."""
    limit, running, limits = Concurrency(ConcurrencyPolicy()), [], []
    accepted = 0
    for now_ns in range(0, 60_000 * MS, MS // 2):
        while running and running[0][0] <= now_ns:
            end_ns, began_ns, code = heapq.heappop(running)
            accepted -= code == "OK"
            limit.release(end_ns, began_ns, code)
        if limit.take():
            ok = accepted < slots
            accepted += ok
            end = (now_ns + 50 * MS, now_ns, "OK") if ok else (now_ns + MS, now_ns, "UNAVAILABLE")
            heapq.heappush(running, end)
        limits.append(limit.limit)
    recent = limits[len(limits) // 2 :]
    assert 0.85 * slots <= sum(recent) / len(recent) <= slots + 1
    assert max(recent) < slots + 4
