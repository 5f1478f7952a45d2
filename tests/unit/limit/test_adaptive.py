"""The adaptive limit, with simulated servers in simulated time."""

import random
from collections import Counter

import pytest

from fixtures.limits import SECOND_NS, Server
from rpcwheel.limit.adaptive import AdaptiveLimit
from rpcwheel.rpc import Criticality

WAITING = {"slots": 4, "duration_s": 0.05}
"""A server with four connections to a database: 80 calls/s."""

BURNING = {"slots": 1, "duration_s": 0.01, "computes_s": 0.01}
"""A server whose handlers compute for 10 ms: 100 calls/s, and none is faster if others run."""


@pytest.mark.parametrize("server", [WAITING, BURNING], ids=["waiting", "computing"])
@pytest.mark.parametrize("load", [2, 10])
def test_an_overloaded_server_answers_as_many_calls_as_it_can(server, load):
    server = Server(**server)
    server.offer(0.7 * server.capacity, seconds=5)
    done = server.offer(load * server.capacity, seconds=10)
    assert done.answered >= 0.9 * 10 * server.capacity
    # Four handlers at a time would be enough, and a few more do no harm.
    assert server.limit <= 2 * server.slots + 1


def test_open_streams_take_threads_and_the_limit_adapts_to_the_others():
    server = Server(slots=2, duration_s=0.05)
    server.open_streams(3, threads=10)
    server.offer(0.7 * server.capacity, seconds=5)
    server.offer(2 * server.capacity, seconds=10)
    assert server.limit <= 5


def test_handlers_that_compute_from_the_start_are_limited_although_no_call_waits_for_them():
    """Calls wait in gRPC, which accepts none while four handlers compute."""
    limit, now_ns, work_ns, limits = AdaptiveLimit(), SECOND_NS, 0, []
    for _ in range(1000):
        now_ns += SECOND_NS // 100
        work_ns += min(limit.limit, 4) * SECOND_NS // 100
        took_ns, waits = min(limit.limit, 4) * SECOND_NS // 100, limit.limit < 4
        if limit.ended(took_ns, now_ns, has_waited=waits, is_answered=True):
            limit.measure(now_ns, now_ns, work_ns)
        limits.append(limit.limit)
    assert max(limits[300:]) <= 2
    assert limits[300:].count(1) > 400


@pytest.mark.parametrize("rate", [400, 800, 1000])
def test_a_busy_interpreter_limits_no_handlers_that_mostly_wait(rate):
    """Each computes for 1 ms and waits for 49 ms; `rate` is a thousandth of the processor."""
    server = Server(slots=10**6, duration_s=0.05, computes_s=0.001)
    server.offer(rate, seconds=5)  # the limit begins with 8
    assert server.offer(rate, seconds=60).refused <= 0.005 * 60 * rate


def bimodal(pattern):
    """One of ten takes 10 times as long as the others."""
    return 10 / 1.9 if pattern.random() < 0.1 else 1 / 1.9


VARIES = {
    "uniform": lambda pattern: pattern.uniform(0.5, 1.5),
    "exponential": lambda pattern: pattern.expovariate(1.0),
    "lognormal": lambda pattern: pattern.lognormvariate(-0.5, 1.0),
    "bimodal": bimodal,
}


@pytest.mark.parametrize("load", [0.9, 2])
@pytest.mark.parametrize("varies", VARIES.values(), ids=VARIES)
def test_handlers_with_different_durations_get_the_whole_capacity(varies, load):
    server = Server(slots=32, duration_s=0.05, varies=varies)
    server.offer(load * server.capacity, seconds=8)
    done = server.offer(load * server.capacity, seconds=5)
    assert done.answered >= 0.8 * min(load, 1) * 5 * server.capacity


@pytest.mark.parametrize(
    "varies", [VARIES["uniform"], VARIES["exponential"]], ids=["uniform", "exponential"]
)
def test_handlers_that_take_long_are_limited_as_others_are_but_later(varies):
    server = Server(slots=32, duration_s=8.0, varies=varies)
    server.offer(2 * server.capacity, seconds=400)
    done = server.offer(2 * server.capacity, seconds=400)
    assert done.answered >= 0.6 * 400 * server.capacity


def test_a_window_with_rare_calls_that_take_long_is_longer():
    """Nearly half of the handlers' time is that of one call of a hundred."""
    rare = {"varies": lambda pattern: (100 if pattern.random() < 0.01 else 1) / 1.99}
    server = Server(slots=8, duration_s=0.01, **rare)
    load = 0.7 * server.capacity
    server.offer(load, seconds=5)
    assert server.offer(load, seconds=20).refused <= 0.1 * 20 * load


def test_handlers_that_take_long_do_not_keep_others_from_running():
    """Eight long polls take all of the first limit."""
    server = Server(slots=10**6, duration_s=0.01, slow=(0.02, 30.0))
    done = server.offer(20, seconds=120)
    assert done.refused <= 0.01 * (done.answered + done.refused)


@pytest.mark.parametrize("slow_s", [0.2, 2.0])
def test_a_second_in_which_handlers_are_slow_is_forgotten_soon(slow_s):
    server = Server(**WAITING)
    load = 0.9 * server.capacity
    server.offer(load, seconds=8)
    server.duration_s = slow_s
    server.offer(load, seconds=1)
    server.duration_s = 0.05
    server.offer(load, seconds=slow_s)  # until the slow handlers have ended
    assert server.offer(load, seconds=3).answered >= 0.7 * 3 * load


def test_handlers_that_take_no_time_are_measured_too():
    limit = AdaptiveLimit()
    for second in range(1, 200):
        now_ns = second * SECOND_NS // 10
        if limit.ended(0, now_ns, has_waited=second % 50 > 5, is_answered=True):
            limit.measure(now_ns, 0, 0)
    assert limit.limit >= 1


def test_calls_whose_answers_come_too_late_do_not_count_for_the_throughput():
    server = Server(**WAITING)
    server.answers_in_time = False
    server.offer(2 * server.capacity, seconds=2)
    assert server.limit == 1


def test_an_overload_from_the_start_is_limited_within_two_seconds():
    server = Server(**WAITING)
    server.offer(2 * server.capacity, seconds=2)
    assert server.limit <= 3 * server.slots


def test_a_limit_that_is_too_high_falls_before_more_handlers_are_tried():
    """All calls of the time before that would take longer."""
    server = Server(**WAITING)
    server.offer(0.7 * server.capacity, seconds=2)
    server.offer(2 * server.capacity, seconds=0.7)
    assert server.limit <= server.slots + 1


@pytest.mark.parametrize(("load", "most"), [(0.7, 0.002), (0.8, 0.03), (0.9, 0.06)])
@pytest.mark.parametrize("slots", [1, 4])
def test_a_server_that_is_not_overloaded_refuses_few_calls(load, most, slots):
    """Calls of different durations arrive at random times, so some wait without an overload."""
    computes_s = 0.015 if slots == 1 else 0.0
    server = Server(slots, 0.015, computes_s=computes_s, varies=VARIES["exponential"])
    server.offer(load * server.capacity, seconds=20)
    done = server.offer(load * server.capacity, seconds=60)
    assert done.refused <= most * (done.answered + done.refused)


def test_a_server_that_becomes_faster_gets_more_calls():
    server = Server(**WAITING)
    server.offer(2 * server.capacity, seconds=10)
    server.slots = 40
    server.offer(2 * server.capacity, seconds=5)
    done = server.offer(2 * server.capacity, seconds=5)
    assert done.answered >= 0.9 * 5 * server.capacity


@pytest.mark.parametrize("halved", [{"slots": 2}, {"duration_s": 0.1}], ids=str)
def test_a_server_that_becomes_slower_is_at_its_new_capacity_within_three_seconds(halved):
    server = Server(**WAITING)
    server.offer(1.2 * server.capacity, seconds=10)
    vars(server).update(halved)
    server.offer(2.4 * server.capacity, seconds=3)
    done = server.offer(2.4 * server.capacity, seconds=5)
    assert done.answered >= 0.9 * 5 * server.capacity


def test_the_throughput_does_not_seem_to_rise_with_handlers_that_wait_for_each_other():
    server = Server(slots=4, duration_s=0.02)
    server.offer(140, seconds=6)
    server.duration_s = 0.2
    limits = set()
    for _ in range(120):
        server.offer(140, seconds=0.1)
        limits.add(server.limit)
    assert max(limits) <= 2 * server.slots  # a try with more handlers has at most twice as many


def test_after_the_load_all_calls_are_answered_again():
    server = Server(**WAITING)
    server.offer(10 * server.capacity, seconds=10)
    server.offer(0.7 * server.capacity, seconds=1)
    done = server.offer(0.7 * server.capacity, seconds=10)
    assert done.refused == 0


def test_the_limit_rises_again_if_the_load_ends_while_fewer_handlers_run():
    server = Server(**WAITING)
    while server.limit >= server.slots:
        server.offer(2 * server.capacity, seconds=0.1)
    server.offer(3, seconds=3)
    assert server.limit >= server.slots


@pytest.mark.parametrize("pause", [0.3, 2, 9])
def test_a_pause_after_the_load_is_not_taken_for_a_low_throughput(pause):
    for seconds in (5.1, 5.3, 5.5, 5.7, 5.8, 6.0):  # up to any time in a window
        each = Server(**WAITING)
        each.offer(3 * each.capacity, seconds=seconds)
        each.offer(0.001, seconds=pause)
        assert each.offer(0.6 * each.capacity, seconds=3).refused == 0


def test_no_call_is_refused_below_half_of_the_capacity_in_a_mixed_hour():
    """Slow and fast methods, bursts, pauses, and a load that changes each second."""
    server = Server(slots=8, duration_s=0.02, slow=(0.1, 0.2))
    pattern, done = random.Random(1), Counter()
    for _ in range(3600):
        load = pattern.choice([0, 0.05, 0.2, 0.4, 0.5])
        done.update(vars(server.offer(load * server.capacity, seconds=1)))
    assert done["answered"] > 100_000
    assert done["refused"] == 0


def test_critical_calls_are_answered_in_a_spike_of_sheddable_ones():
    server = Server(**WAITING)
    server.offer(0.5 * server.capacity, seconds=5)
    server.offer(
        12 * server.capacity, seconds=10, criticality=Criticality.SHEDDABLE, beside=0.5 * 80
    )
    done = server.beside
    assert done.answered >= 0.994 * (done.answered + done.refused)
