"""Counts of calls: what is added up, on any thread, in finalizers and in forked processes."""

import pytest

from fixtures.forks import held_by_another_thread, holds_in_child
from fixtures.timers import run_threads
from rpcwheel.telemetry import call_counts
from rpcwheel.telemetry.call_counts import BOUNDS_S, OTHER, CallCounts, CallEnd, Side, quantile

GET = "/shop.Orders/Get"


@pytest.fixture
def side() -> Side:
    return CallCounts().client


@pytest.fixture
def counts(side):
    return side.method(GET, "unary")


@pytest.fixture
def clock(monkeypatch):
    """Sets the time that the counts read, in nanoseconds."""
    now = [0]
    monkeypatch.setattr(call_counts, "perf_counter_ns", lambda: now[0])
    return now


def codes(side: Side) -> dict[str, int]:
    (only,) = side.totals()
    return {code: number for code, (number, _, _) in only.ended.items()}


def test_a_call_is_counted_when_it_starts_and_when_it_ends(side, counts):
    began = counts.begin()
    counts.begin()
    assert [(one.method, one.kind, one.started, one.ended) for one in side.totals()] == [
        (GET, "unary", 2, {})
    ]
    counts.end(began, "OK")
    assert (side.totals()[0].started, codes(side)) == (2, {"OK": 1})


def test_durations_are_summed_and_put_into_the_bucket_of_the_next_bound(side, counts, clock):
    for duration_s in (BOUNDS_S[0], BOUNDS_S[0] + 1e-9, BOUNDS_S[-1], BOUNDS_S[-1] + 1):
        clock[0] = 5
        began = counts.begin()
        clock[0] += round(duration_s * 1e9)
        counts.end(began, "OK")
    number, sum_s, buckets = side.totals()[0].ended["OK"]
    assert (number, sum_s) == (4, pytest.approx(21.01))
    assert buckets == (1, 1, *[0] * (len(BOUNDS_S) - 3), 1, 1)
    assert len(buckets) == len(BOUNDS_S) + 1


def test_each_status_code_and_each_kind_is_counted_for_itself(side):
    for kind, code in (("unary", "OK"), ("unary", "ABORTED"), ("bidi_stream", "OK")):
        counts = side.method(GET, kind)
        counts.end(counts.begin(), code)
    assert [(one.kind, sorted(one.ended)) for one in side.totals()] == [
        ("bidi_stream", ["OK"]),
        ("unary", ["ABORTED", "OK"]),
    ]


def test_methods_beyond_the_limit_are_counted_together(side, monkeypatch):
    monkeypatch.setattr(call_counts, "MAX_METHODS", 2)
    for number in range(5):
        side.method(f"/shop.Orders/Get{number}", "unary").begin()
    side.method("/shop.Orders/Watch", "server_stream").begin()
    assert [(one.method, one.kind, one.started) for one in side.totals()] == [
        ("/shop.Orders/Get0", "unary", 1),
        ("/shop.Orders/Get1", "unary", 1),
        (OTHER, "server_stream", 1),
        (OTHER, "unary", 3),
    ]
    side.method("/shop.Orders/Get0", "unary").begin()
    assert side.totals()[0].started == 2


def test_the_queue_is_added_up_before_it_becomes_long(side, counts):
    for _ in range(10 * call_counts.MAX_QUEUED):
        counts.end(counts.begin(), "OK")
    assert len(side.queue) <= call_counts.MAX_QUEUED + 1


def test_a_listener_gets_each_end_with_its_duration(side, counts, clock):
    heard = []
    side.listeners = (lambda *end: heard.append(end),)
    began = counts.begin()
    clock[0] += 7
    counts.end(began, "NOT_FOUND")
    assert heard == [(counts, "NOT_FOUND", 7)]


class CountingCode(str):  # noqa: SLOT000
    """A status code that counts a call when it is dropped, as the finalizer of a call does."""

    counts: call_counts.MethodCounts

    def __del__(self) -> None:
        self.counts.end(self.counts.begin(), "CANCELLED")


def test_a_finalizer_may_count_a_call_while_the_counts_are_added_up(side, counts, monkeypatch):
    CountingCode.counts = counts
    for _ in range(3):  # the first code becomes a key, the others are dropped
        counts.end(counts.begin(), CountingCode("OK"))
    monkeypatch.setattr(call_counts, "MAX_QUEUED", 0)  # each end tries to add up
    run_threads(side.totals)
    assert (side.totals()[0].started, codes(side)) == (5, {"OK": 3, "CANCELLED": 2})


def test_threads_count_while_others_read(side, counts):
    threads, calls = 4, 3_000
    seen = []

    def count():
        for _ in range(calls):
            counts.end(counts.begin(), "OK")

    def read():
        for _ in range(50):
            totals = side.totals()[0]
            seen.append((totals.started, totals.ended.get("OK", (0,))[0]))

    run_threads(*[count] * threads, read, read)
    assert (side.totals()[0].started, codes(side)) == (threads * calls, {"OK": threads * calls})
    assert all(started >= ended for started, ended in seen)


def test_the_end_of_a_call_is_counted_once(side, counts):
    end = CallEnd(counts, counts.begin())
    end.end("NOT_FOUND")
    end.end("OK")
    del end
    assert codes(side) == {"NOT_FOUND": 1}


def test_the_end_of_a_call_that_is_dropped_is_canceled(side, counts):
    end = CallEnd(counts, counts.begin())
    assert codes(side) == {}
    del end
    assert codes(side) == {"CANCELLED": 1}


# --- Quantiles ---


def buckets(**counts: int) -> list[int]:
    """Buckets with these counts, by index."""
    return [counts.get(f"b{index}", 0) for index in range(len(BOUNDS_S) + 1)]


def test_without_calls_there_is_no_quantile():
    assert quantile([], 0.5) is None
    assert quantile(buckets(), 0.5) is None


@pytest.mark.parametrize(
    ("counts", "share", "expected"),
    [
        ({"b0": 10}, 0.5, 0.0025),  # half way into the first bucket, which ends at 0.005
        ({"b1": 10}, 0.5, 0.0075),  # from 0.005 to 0.01
        ({"b0": 99, "b13": 1}, 0.99, 0.005),
        ({"b0": 98, "b13": 2}, 0.99, 8.75),
        ({"b14": 1}, 0.5, 10.0),  # the last bucket has no upper bound
    ],
)
def test_a_quantile_is_interpolated_in_its_bucket(counts, share, expected):
    assert quantile(buckets(**counts), share) == pytest.approx(expected)


# --- Forked processes ---


def test_a_forked_process_counts_although_a_thread_added_up_at_the_fork():
    all_counts = CallCounts()
    sides = (all_counts.client, all_counts.attempts, all_counts.server)
    counts = [side.method(GET, "unary") for side in sides]
    for each in counts:
        each.end(each.begin(), "NOT_FOUND")

    def counts_anew():
        for each in counts:
            each.end(each.begin(), "OK")
        return [codes(side) for side in sides] == [{"OK": 1}] * len(sides)

    with held_by_another_thread(*(side._lock for side in sides)):
        assert holds_in_child(counts_anew)
