"""Each picker is as fair as it says, whatever the weights, and moves no more keys than it must."""

import random
import threading
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fixtures.timers import run_threads
from rpcwheel.cluster import (
    ConsistentHash,
    LeastActive,
    Picker,
    RoundRobin,
    WeightedRandom,
)
from rpcwheel.cluster.pickers import checked_picker
from rpcwheel.errors import ConfigurationError


class One:
    """A member as a picker sees it."""

    def __init__(self, name, calls=0):
        self.id = name
        self.calls = calls

    def __repr__(self):
        return self.id


def ones(count):
    return [One(f"10.0.0.{number}:50051") for number in range(count)]


def tally(pick, times, key=None):
    return Counter(pick("/m", None, key or ()).id for _ in range(times))


WEIGHTS = st.lists(st.integers(1, 40), min_size=1, max_size=8)


# Round robin


@given(st.integers(1, 12), st.integers(1, 5), st.integers(0, 99))
def test_in_turn_each_is_picked_equally_often_in_any_round(count, rounds, seed):
    members = ones(count)
    pick = RoundRobin(random.Random(seed)).prepare(members, [100] * count)
    assert tally(pick, count * rounds) == {one.id: rounds for one in members}


@settings(max_examples=50)
@given(WEIGHTS, st.integers(0, 99))
def test_in_turn_by_weight_each_is_picked_exactly_as_often_as_its_weight_says(weights, seed):
    members = ones(len(weights))
    pick = RoundRobin(random.Random(seed)).prepare(members, weights)
    if min(weights) == max(weights):
        weights = [1] * len(weights)
    got = tally(pick, 3 * sum(weights))
    for one, weight in zip(members, weights, strict=True):
        assert abs(got[one.id] - 3 * weight) <= 1  # it may begin amid a round


def test_a_light_one_is_not_picked_several_times_in_a_row():
    heavy, light = ones(2)
    pick = RoundRobin().prepare([heavy, light], [9, 3])
    got = [pick("/m", None, ()) for _ in range(120)]
    assert not any(got[place] is light is got[place + 1] for place in range(119))


class Weight(int):
    """Knows how often any was looked at to pick somebody."""

    looks = 0

    def __mul__(self, other):
        Weight.looks += 1
        return int(self) * other


FAR_APART = [[100, *[1] * 999], [*[1] * 300, 10_000], [1] * 500 + [100] * 500, [10**9, 7, 7, 10**9]]


@pytest.mark.parametrize("weights", FAR_APART, ids=lambda weights: f"{max(weights)}")
def test_weights_far_apart_are_met_and_few_of_them_looked_at_for_a_pick(weights):
    members, size = ones(len(weights)), len(weights)
    pick = RoundRobin().prepare(members, [Weight(one) for one in weights])
    Weight.looks = 0
    got = tally(pick, 20_000)
    assert Weight.looks <= 8 * 20_000 + 2 * size
    for one, weight in zip(members, weights, strict=True):
        assert abs(got[one.id] - 20_000 * weight / sum(weights)) <= 5


def test_one_that_is_much_heavier_is_picked_at_even_distances():
    heavy, *light = ones(1000)
    pick = RoundRobin().prepare([heavy, *light], [100] + [1] * 999)
    at = [turn for turn in range(4000) if pick("/m", None, ()) is heavy]
    distances = [later - sooner for sooner, later in pairwise(at)]
    assert max(distances) <= 22  # on average it is 11


def test_clients_that_start_together_do_not_all_begin_with_the_same_member():
    members = ones(10)
    firsts = {RoundRobin().prepare(members, [1] * 10)("/m", None, ()).id for _ in range(100)}
    assert len(firsts) > 3


@pytest.mark.parametrize("weights", [[1, 1, 1], [1, 2, 3]])
def test_threads_at_once_take_nobodys_turn_twice(weights):
    pick = RoundRobin().prepare(ones(3), weights)
    got, lock = Counter(), threading.Lock()

    def work():
        mine = tally(pick, 600)
        with lock:
            got.update(mine)

    run_threads(*[work] * 4)
    assert sum(got.values()) == 2400
    for weight, one in zip(weights, ones(3), strict=True):
        assert abs(got[one.id] - 2400 * weight / sum(weights)) <= 1


# Weighted random


@settings(max_examples=50)
@given(WEIGHTS)
def test_at_random_every_place_of_chance_belongs_to_one_by_its_weight(weights):
    members = ones(len(weights))
    places = iter([(place + 0.5) / sum(weights) for place in range(sum(weights))])

    class Chance:
        random = staticmethod(lambda: next(places))

    got = tally(WeightedRandom(Chance()).prepare(members, weights), sum(weights))
    assert got == {one.id: weight for one, weight in zip(members, weights, strict=True)}


def test_chance_at_its_ends_stays_inside():
    for chance in (0.0, 0.9999999999999999):
        rng = random.Random()
        rng.random = lambda: chance  # noqa: B023
        assert WeightedRandom(rng).prepare(ones(3), [5, 1, 7])("/m", None, ()) is not None


# Least active


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 4)), min_size=1, max_size=8))
def test_who_has_the_fewest_calls_is_picked(states):
    members = [One(f"m{number}", calls) for number, (_, calls) in enumerate(states)]
    pick = LeastActive().prepare(members, [weight for weight, _ in states])
    fewest = min(calls for _, calls in states)
    assert all(pick("/m", None, ()).calls == fewest for _ in range(10))


def test_what_counts_is_how_many_calls_there_are_now():
    members = ones(2)
    pick = LeastActive().prepare(members, [1, 1])
    members[0].calls = 1
    assert pick("/m", None, ()) is members[1]
    members[1].calls = 2
    assert pick("/m", None, ()) is members[0]


def test_of_those_with_equally_few_the_heavy_are_picked_more_often():
    members = ones(3)
    members[2].calls = 1
    got = tally(LeastActive(random.Random(1)).prepare(members, [300, 100, 900]), 1000)
    assert 650 < got[members[0].id] < 850
    assert got[members[2].id] == 0


def test_idle_members_of_one_weight_share_the_calls():
    got = tally(LeastActive(random.Random(1)).prepare(ones(4), [1] * 4), 1000)
    assert all(200 < count < 300 for count in got.values())


@pytest.mark.parametrize("weights", [[1] * 32, range(1, 33)])
def test_up_to_32_members_are_all_compared(weights):
    members = ones(32)
    for each in members[:31]:
        each.calls = 1
    pick = LeastActive(random.Random(1)).prepare(members, list(weights))
    assert {pick("/m", None, ()) for _ in range(50)} == {members[31]}


class Watched:
    """A member that notes how often it is looked at."""

    def __init__(self, number):
        self.id = f"m{number}"
        self.looks = 0
        self.now = 1

    @property
    def calls(self):
        self.looks += 1
        return self.now


@pytest.mark.parametrize("weights", [[1] * 33, range(1, 34)])
def test_of_more_members_16_are_looked_at(weights):
    members = [Watched(number) for number in range(33)]
    LeastActive().prepare(members, list(weights))("/m", None, ())
    assert sum(each.looks for each in members) == 16


def test_of_more_members_the_first_that_is_seen_idle_is_picked_by_weight():
    members = [Watched(number) for number in range(100)]
    for each in members:
        each.now = 0
    pick = LeastActive(random.Random(1)).prepare(members, [1] * 50 + [3] * 50)
    heavy = sum(pick("/m", None, ()) in members[50:] for _ in range(1000))
    assert 700 < heavy < 800
    assert sum(each.looks for each in members) == 1000


def test_of_more_members_the_busy_are_spared():
    members = ones(200)
    for each in members[:150]:
        each.calls = 9
    got = tally(LeastActive(random.Random(1)).prepare(members, [1] * 200), 1000)
    assert sum(got[each.id] for each in members[:150]) < 50


# Consistent hash

KEYS = [f"user-{number}" for number in range(200)]


def owners(picker, members, weights=None):
    pick = picker.prepare(members, weights or [100] * len(members))
    return {key: pick("/m", None, (("x-user", key),)).id for key in KEYS}


@settings(max_examples=20)
@given(st.integers(2, 9), st.data())
def test_if_one_leaves_only_its_keys_move_and_if_it_returns_they_come_back(count, data):
    members, picker = ones(count), ConsistentHash("x-user")
    before = owners(picker, members)
    gone = members[data.draw(st.integers(0, count - 1))]
    after = owners(picker, [one for one in members if one is not gone])
    assert {key for key in KEYS if before[key] != after[key]} == {
        key for key in KEYS if before[key] == gone.id
    }
    assert owners(picker, members) == before


@settings(max_examples=10)
@given(st.sets(st.integers(0, 30), min_size=1, max_size=12), st.integers(0, 5))
def test_what_went_before_makes_no_difference(numbers, seed):
    every = ones(31)
    used = ConsistentHash("x-user")
    rng = random.Random(seed)
    for _ in range(3):
        owners(used, rng.sample(every, rng.randint(1, 31)))
    members = [every[number] for number in numbers]
    assert owners(used, members) == owners(ConsistentHash("x-user"), members)


def test_every_process_finds_the_same_member():
    got = owners(ConsistentHash("x-user"), ones(5))
    assert "".join(got[f"user-{number}"][-7] for number in range(12)) == "011440443302"


def test_keys_are_spread_over_all_members_and_by_weight():
    got = Counter(owners(ConsistentHash("x-user"), ones(4)).values())
    assert all(25 < count < 90 for count in got.values())
    heavy = Counter(owners(ConsistentHash("x-user"), ones(2), [300, 100]).values())
    assert heavy["10.0.0.0:50051"] > 2 * heavy["10.0.0.1:50051"]


def test_keys_of_others_stay_where_they_are_when_a_weight_changes():
    before = owners(ConsistentHash("x-user"), ones(4))
    after = owners(ConsistentHash("x-user"), ones(4), [100, 100, 100, 200])
    moved = {key for key in KEYS if before[key] != after[key]}
    assert {after[key] for key in moved} == {"10.0.0.3:50051"}


def test_a_key_may_be_anything_with_a_text():
    for key in ("é", b"\xff", 7, "\ud800"):
        pick = ConsistentHash(lambda *_, key=key: key).prepare(ones(3), [1] * 3)
        assert len({pick("/m", None, ()).id for _ in range(9)}) == 1


def test_the_key_may_be_found_in_the_request_and_the_method():
    seen = []
    pick = ConsistentHash(lambda *call: seen.append(call) or "k").prepare(ones(3), [1] * 3)
    pick("/shop.Orders/Get", b"request", (("a", "b"),))
    assert seen == [("/shop.Orders/Get", b"request", (("a", "b"),))]


def test_calls_without_a_key_go_in_turn():
    for metadata in (None, (), (("other", "x"),)):
        pick = ConsistentHash("X-User").prepare(ones(3), [100] * 3)
        assert set(tally(pick, 6, metadata).values()) == {2}


def test_the_header_is_found_whatever_its_case_was_given_in():
    pick = ConsistentHash("X-User").prepare(ones(3), [100] * 3)
    assert len(tally(pick, 9, (("x-user", "7"),))) == 1


def test_what_changes_one_weight_of_many_finds_no_places_anew_for_the_others():
    picker, members = ConsistentHash("x-user"), ones(6)
    owners(picker, members)
    ring = picker._ring
    owners(picker, members, [100] * 5 + [300])
    now = picker._ring
    kept = [one.id for one in members if now._places[one.id] is ring._places[one.id]]
    assert kept == [one.id for one in members[:5]]


def test_a_ring_is_not_made_anew_for_each_member_that_is_away():
    picker, members = ConsistentHash("x-user"), ones(6)
    owners(picker, members)
    ring = picker._ring
    owners(picker, members[1:])
    assert picker._ring is ring
    owners(picker, members[4:])
    assert picker._ring is not ring


# Names


def test_names_of_pickers():
    names = {
        "round_robin": RoundRobin,
        "weighted_random": WeightedRandom,
        "least_active": LeastActive,
        "consistent_hash:x-user": ConsistentHash,
    }
    assert {name: type(checked_picker(name)) for name in names} == names


def test_a_picker_may_be_the_users_own():
    class First(Picker):
        def prepare(self, members, weights):
            return lambda *_: members[0]

    first = First()
    assert checked_picker(first) is first


def test_wrong_arguments_are_refused():
    rows = [
        (lambda: checked_picker("round-robin"), ConfigurationError, "did you mean 'round_robin'"),
        (lambda: checked_picker("nonsense"), ConfigurationError, "round_robin, weighted_random"),
        (lambda: checked_picker("consistent_hash"), ConfigurationError, "needs a key"),
        (lambda: checked_picker("round_robin:x"), ConfigurationError, "there is no"),
        (lambda: checked_picker("consistent_hash: x"), ConfigurationError, "name of a header"),
        (lambda: checked_picker(None), TypeError, "balance"),
        (lambda: checked_picker(5), TypeError, "balance"),
        (lambda: checked_picker(RoundRobin), TypeError, "balance"),
        (lambda: ConsistentHash(5), TypeError, "key must be"),
    ]
    for make, error, message in rows:
        with pytest.raises(error, match=message):
            make()


def test_repr_names_the_class():
    for picker in (RoundRobin(), WeightedRandom(), LeastActive(), ConsistentHash("x")):
        assert repr(picker).startswith(type(picker).__name__ + "(")
