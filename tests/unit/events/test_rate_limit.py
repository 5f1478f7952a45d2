"""The rate limit of log lines: bursts, counts of suppressed events, and a bound on subjects."""

import pytest

from fixtures.timers import run_threads
from rpcwheel.events import CallSlow, ConnectionAlive, ConnectionDead, DefaultResponseUsed
from rpcwheel.events.rate_limit import OTHERS, RateLimiter, Suppressed

TEN_IN_TEN = {"burst": 10, "period_s": 10.0}
ONCE_A_MINUTE = {"burst": 1, "period_s": 60.0}


@pytest.fixture
def limiter(set_limit):
    set_limit("events.rate_limit.MAX_SUBJECTS", 100)
    return RateLimiter()


def admitted(limiter, number, now_s, kind=CallSlow, subject="/a/b", **rate):
    """Return what `admit` returns for `number` events at one time."""
    return [limiter.admit(kind, subject, now_s, **(rate or TEN_IN_TEN)) for _ in range(number)]


def test_events_beyond_the_burst_are_suppressed_and_counted_until_the_period_ends(limiter):
    assert admitted(limiter, 300, now_s=5.0) == [0] * 10 + [None] * 290
    assert admitted(limiter, 1, now_s=14.9) == [None]
    assert admitted(limiter, 12, now_s=15.0) == [291, *[0] * 9, None, None]


def test_each_event_class_and_each_subject_has_its_own_burst(limiter):
    admitted(limiter, 300, now_s=0.0)
    assert admitted(limiter, 10, now_s=0.0, subject="/a/c") == [0] * 10
    assert admitted(limiter, 10, now_s=0.0, kind=DefaultResponseUsed) == [0] * 10


def test_a_count_is_returned_once_by_sweep_or_by_admit(limiter):
    admitted(limiter, 300, now_s=5.0)
    assert limiter.sweep(14.0) == []
    assert limiter.sweep(15.5) == [Suppressed(CallSlow, "/a/b", 290, 10.0)]
    assert limiter.sweep(99.0) == []
    assert admitted(limiter, 300, now_s=99.0)[0] == 0
    assert admitted(limiter, 1, now_s=109.0) == [290]  # then it is not returned again
    assert limiter.sweep(199.0) == []


def test_flush_returns_all_counts(limiter):
    admitted(limiter, 15, now_s=0.0)
    admitted(limiter, 12, now_s=1.0, subject="/a/c")
    admitted(limiter, 3, now_s=1.0, subject="/a/d")
    assert [(count.subject, count.number) for count in limiter.flush()] == [
        ("/a/b", 5),
        ("/a/c", 2),
    ]
    assert limiter.flush() == []


def test_subjects_beyond_the_limit_share_one_burst(limiter):
    lines = [limiter.admit(CallSlow, f"/{n}/x", 0.0, **TEN_IN_TEN) for n in range(15_000)]
    assert lines.count(0) == 110
    assert limiter.sweep(10.0) == [Suppressed(CallSlow, OTHERS, 14_890, 10.0)]


def test_subjects_whose_period_is_over_do_not_count_for_the_limit(limiter):
    for second in range(0, 10_000, 20):
        for number in range(100):
            assert limiter.admit(CallSlow, f"/{second}/{number}", second, **TEN_IN_TEN) == 0
        limiter.sweep(second + 10.0)


def test_always_after_admits_an_event_that_follows_a_logged_event_of_that_class(limiter):
    def admit(kind, now_s):
        always_after = ConnectionDead if kind is ConnectionAlive else None
        return limiter.admit(kind, "shop:1", now_s, **ONCE_A_MINUTE, always_after=always_after)

    alive, dead = ConnectionAlive, ConnectionDead
    events = [(alive, 0), (dead, 5), (alive, 10), (dead, 12), (alive, 14), (dead, 70), (alive, 71)]
    assert [admit(kind, now_s) for kind, now_s in events] == [0, 0, 0, None, None, 1, 1]


def test_concurrent_threads_lose_no_count(limiter):
    def count():
        for _ in range(2_000):
            limiter.admit(CallSlow, "/a/b", 0.0, **TEN_IN_TEN)

    run_threads(*[count] * 4)
    assert [count.number for count in limiter.flush()] == [8_000 - 10]


def test_reset_forgets_all_counts_and_periods(limiter):
    admitted(limiter, 300, now_s=0.0)
    limiter.reset()
    assert limiter.flush() == []
    assert admitted(limiter, 1, now_s=0.0) == [0]
