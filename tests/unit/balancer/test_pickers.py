"""The pickers: how often each subchannel is picked."""

import random
import threading
from collections import Counter
from itertools import pairwise
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fixtures.candidates import FakeSubchannel, count_picks, subchannels
from fixtures.timers import run_threads
from rpcwheel.balancer.pickers import LeastRequest, RoundRobin, WeightedRandom, WeightedRoundRobin
from rpcwheel.balancer.ring_hash import RingHash

WEIGHTS = st.lists(st.integers(1, 40), min_size=1, max_size=8)
FAR_APART = [[100, *[1] * 999], [*[1] * 300, 10_000], [1] * 500 + [100] * 500, [10**9, 7, 7, 10**9]]


@pytest.fixture(autouse=True)
def same_random_numbers_each_time():
    random.seed(1)


def random_parts(*parts):
    """Replace random numbers by these parts of the sum of all weights."""
    return patch.object(random, "random", side_effect=parts)


@pytest.mark.parametrize(
    "picker",
    [RoundRobin(), WeightedRoundRobin(), WeightedRandom(), LeastRequest(), RingHash("x-user")],
    ids=repr,
)
def test_one_picker_can_serve_several_channels(picker):
    ours, others = subchannels(3), [FakeSubchannel("10.0.1.0:50051")]
    pick, pick_other = picker.prepare(ours, [1, 2, 3]), picker.prepare(others, [5])
    assert count_picks(pick, 30, (("x-user", "7"),)).keys() <= {one.id for one in ours}
    assert count_picks(pick_other, 3) == {others[0].id: 3}


# Round robin


@given(st.integers(1, 12), st.integers(1, 5))
def test_round_robin_picks_each_equally_often_in_every_round(count, rounds):
    ours = subchannels(count)
    pick = RoundRobin().prepare(ours, range(1, count + 1))
    assert count_picks(pick, count * rounds) == {one.id: rounds for one in ours}


@pytest.mark.parametrize("picker", [RoundRobin, WeightedRoundRobin])
@pytest.mark.parametrize("weights", [[1] * 10, range(1, 11)])
def test_round_robin_begins_at_a_random_subchannel(picker, weights):
    ours = subchannels(10)
    firsts = {picker().prepare(ours, weights)("/m", None, ()) for _ in range(100)}
    assert len(firsts) > 3


def test_threads_that_pick_at_once_do_not_take_the_same_turn():
    weights = [1, 2, 3]
    rows = [(RoundRobin(), [800, 800, 800], 0), (WeightedRoundRobin(), [400, 800, 1200], 4)]
    for picker, expected, error in rows:
        pick = picker.prepare(subchannels(3), weights)
        got, lock = Counter(), threading.Lock()

        def work(pick=pick, got=got, lock=lock):
            mine = count_picks(pick, 600)
            with lock:
                got.update(mine)

        run_threads(*[work] * 4)
        assert sum(got.values()) == 2400
        for one, count in zip(subchannels(3), expected, strict=True):
            assert abs(got[one.id] - count) <= error


# Weighted round robin


@given(st.integers(1, 12), st.integers(1, 200), st.integers(1, 5))
def test_weighted_round_robin_with_equal_weights_picks_each_in_every_round(count, weight, rounds):
    ours = subchannels(count)
    pick = WeightedRoundRobin().prepare(ours, [weight] * count)
    assert count_picks(pick, count * rounds) == {one.id: rounds for one in ours}


@settings(max_examples=50)
@given(WEIGHTS)
def test_weighted_round_robin_is_within_five_picks_of_the_share_at_all_times(weights):
    ours = subchannels(len(weights))
    pick = WeightedRoundRobin().prepare(ours, weights)
    got, total = dict.fromkeys(ours, 0), sum(weights)
    for picks in range(1, 500):
        got[pick("/m", None, ())] += 1
        for count, weight in zip(got.values(), weights, strict=True):
            assert abs(count - picks * weight / total) <= 5


@pytest.mark.parametrize("weights", FAR_APART, ids=lambda weights: f"{max(weights)}")
def test_weighted_round_robin_keeps_shares_that_are_far_apart(weights):
    ours = subchannels(len(weights))
    got = count_picks(WeightedRoundRobin().prepare(ours, weights), 20_000)
    for one, weight in zip(ours, weights, strict=True):
        assert abs(got[one.id] - 20_000 * weight / sum(weights)) <= 5


def test_weighted_round_robin_picks_a_heavy_subchannel_at_even_distances():
    heavy, *light = subchannels(1000)
    pick = WeightedRoundRobin().prepare([heavy, *light], [100] + [1] * 999)
    turns = [turn for turn in range(4000) if pick("/m", None, ()) is heavy]
    assert max(later - earlier for earlier, later in pairwise(turns)) <= 22  # 11 on average


def test_weighted_round_robin_does_not_pick_a_light_subchannel_twice_in_a_row():
    heavy, light = subchannels(2)
    pick = WeightedRoundRobin().prepare([heavy, light], [9, 3])
    picked = [pick("/m", None, ()) for _ in range(120)]
    assert (light, light) not in pairwise(picked)


# Weighted random


@settings(max_examples=50)
@given(WEIGHTS)
def test_weighted_random_gives_each_a_part_of_all_random_numbers_by_its_weight(weights):
    ours, total = subchannels(len(weights)), sum(weights)
    pick = WeightedRandom().prepare(ours, weights)
    with random_parts(*[(place + 0.5) / total for place in range(total)]):
        got = count_picks(pick, total)
    assert got == {one.id: weight for one, weight in zip(ours, weights, strict=True)}


def test_weighted_random_uses_the_least_and_the_greatest_random_number():
    ours = subchannels(3)
    pick = WeightedRandom().prepare(ours, [5, 1, 7])
    with random_parts(0.0, 1 - 2**-53):
        assert [pick("/m", None, ()), pick("/m", None, ())] == [ours[0], ours[2]]


# Least request


@given(st.lists(st.integers(1, 5), min_size=8, max_size=8))
def test_least_request_picks_the_fewest_calls_of_eight_that_it_draws(calls):
    ours = [FakeSubchannel(f"{number}", each) for number, each in enumerate(calls)]
    pick = LeastRequest().prepare(ours, [1] * 8)
    with random_parts(*[(place + 0.5) / 8 for place in range(8)]):
        assert pick("/m", None, ()).now_calls == min(calls)


def test_least_request_takes_the_first_subchannel_without_a_call():
    ours = subchannels(8)
    ours[0].now_calls = 1
    pick = LeastRequest().prepare(ours, [1] * 8)
    with random_parts(*[(place + 0.5) / 8 for place in range(8)]):
        assert pick("/m", None, ()) is ours[1]
    assert sum(one.reads for one in ours) == 2


def test_least_request_counts_calls_that_failed_a_moment_ago():
    ours = subchannels(2)
    ours[0].now_errors, ours[1].now_calls = 1.5, 1
    pick = LeastRequest().prepare(ours, [1, 1])
    for failed, picked in ((1.5, 1), (0.5, 0)):
        ours[0].now_errors = failed
        with random_parts(*[0.25, 0.75] * 4):
            assert pick("/m", None, ()) is ours[picked]


@pytest.mark.parametrize("calls", [0, 3])
def test_least_request_draws_equally_busy_subchannels_by_weight(calls):
    ours = subchannels(3)
    for one in ours:
        one.now_calls = calls
    got = count_picks(LeastRequest().prepare(ours, [300, 100, 100]), 1000)
    assert 550 < got[ours[0].id] < 650
    assert 150 < got[ours[1].id] < 250
