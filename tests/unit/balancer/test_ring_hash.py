"""The same key goes to the same subchannel, and only the keys of those that change move."""

from collections import Counter
from unittest.mock import patch

import pytest
from grpc import ChannelConnectivity
from hypothesis import given, settings
from hypothesis import strategies as st

from fixtures.candidates import count_picks, subchannels
from fixtures.subchannel_pools import CONNECTING, FAILING, IDLE, READY, SHUTDOWN
from rpcwheel.balancer import ring_hash
from rpcwheel.balancer.ring_hash import MAX_POINTS, Ring, RingHash, hash_of, point_count

KEYS = [f"user-{number}" for number in range(200)]
FAILED = [FAILING, SHUTDOWN]
COUNTS = st.dictionaries(
    st.sampled_from("abcdefgh"), st.sampled_from([8, 16, 160, 400]), min_size=1, max_size=8
)


def owners_of_keys(pick):
    return {key: pick("/m", None, (("x-user", key),)) for key in KEYS}


def owners(ours, weights=None, picker=None):
    """The id of the owner of each key."""
    picker = picker or RingHash("x-user")
    pick = picker.prepare(ours, weights or [100] * len(ours))
    return {key: one.id for key, one in owners_of_keys(pick).items()}


# Which keys move


@settings(max_examples=20)
@given(st.integers(2, 9), st.data())
def test_when_a_subchannel_leaves_only_its_keys_move_and_when_it_returns_they_come_back(
    count, data
):
    ours, picker = subchannels(count), RingHash("x-user")
    before = owners(ours, picker=picker)
    gone = ours[data.draw(st.integers(0, count - 1))]
    after = owners([one for one in ours if one is not gone], picker=picker)
    moved = {key for key in KEYS if before[key] != after[key]}
    assert moved == {key for key in KEYS if before[key] == gone.id}
    assert owners(ours, picker=picker) == before


def test_when_a_weight_grows_only_its_subchannel_gets_keys():
    before = owners(subchannels(4))
    after = owners(subchannels(4), [100, 100, 100, 200])
    assert {after[key] for key in KEYS if before[key] != after[key]} == {"10.0.0.3:50051"}


def test_every_process_finds_the_same_owner():
    got = owners(subchannels(5))
    assert "".join(got[f"user-{number}"][-7] for number in range(12)) == "321004402243"


def test_keys_are_spread_over_all_subchannels_by_weight():
    got = Counter(owners(subchannels(4)).values())
    assert len(got) == 4
    assert all(25 < count < 90 for count in got.values())
    heavy = Counter(owners(subchannels(2), [300, 100]).values())
    assert heavy["10.0.0.0:50051"] > 2 * heavy["10.0.0.1:50051"]


# States


@settings(max_examples=60)
@given(st.lists(st.sampled_from(list(ChannelConnectivity)), min_size=1, max_size=24))
def test_the_owner_is_the_one_of_the_ring_without_those_that_failed(states):
    ours = subchannels(len(states))
    pick = RingHash("x-user").prepare(ours, [100] * len(ours))
    for one, state in zip(ours, states, strict=True):
        one.now_state = state
    rest = [one for one in ours if one.now_state not in FAILED]
    got = {key: one.id for key, one in owners_of_keys(pick).items()}
    assert got == owners(rest or ours)


def test_a_pick_reads_one_state_if_the_owner_has_not_failed():
    ours = subchannels(50)
    pick = RingHash("x-user").prepare(ours, [100] * 50)
    owners_of_keys(pick)
    assert sum(one.reads for one in ours) == len(KEYS)


def test_if_all_failed_the_owner_is_returned_and_each_state_is_read_about_once():
    ours = subchannels(50)
    pick = RingHash("x-user").prepare(ours, [100] * 50)
    before = owners_of_keys(pick)
    for one in ours:
        one.now_state, one.reads = FAILING, 0
    assert owners_of_keys(pick) == before
    assert sum(one.reads for one in ours) <= 60 * len(KEYS)


# Keys


@pytest.mark.parametrize("key", ["é", b"\xff", 7, "\ud800", ""])
def test_a_key_can_be_text_bytes_or_a_number(key):
    pick = RingHash(lambda *_: key).prepare(subchannels(3), [100] * 3)
    assert len(count_picks(pick, 9)) == 1


def test_the_same_key_as_text_bytes_or_number_has_the_same_place():
    assert hash_of("user-1") == hash_of(b"user-1") == 821713318706677162
    assert hash_of(7) == hash_of("7")
    assert hash_of("\ud800") != hash_of("?")


def test_a_function_for_the_key_is_given_method_request_and_metadata():
    seen = []
    pick = RingHash(lambda *call: seen.append(call) or "k").prepare(subchannels(3), [100] * 3)
    pick("/shop.Orders/Get", b"request", (("a", "b"),))
    assert seen == [("/shop.Orders/Get", b"request", (("a", "b"),))]


def test_the_name_of_the_header_is_given_in_any_case():
    pick = RingHash("X-User").prepare(subchannels(9), [100] * 9)
    metadata = (("other", "1"), ("x-user", "7"))
    assert len(count_picks(pick, 9, metadata)) == 1


@pytest.mark.parametrize("metadata", [None, (), (("other", "x"),)])
def test_calls_without_a_key_go_in_turn(metadata):
    pick = RingHash("x-user").prepare(subchannels(3), [100, 300, 7])
    assert set(count_picks(pick, 6, metadata).values()) == {2}


@pytest.mark.parametrize("state", [READY, IDLE, CONNECTING])
@pytest.mark.parametrize("failed", [1, 8, 9, 30])
def test_calls_without_a_key_go_in_turn_among_those_that_have_not_failed(failed, state):
    ours = subchannels(failed + 3)
    pick = RingHash("x-user").prepare(ours, [100] * len(ours))
    for one in ours:
        one.now_state = FAILING
    assert pick("/m", None, ()).now_state is FAILING
    for one in ours[-3:]:
        one.now_state = state
    assert count_picks(pick, 15) == {one.id: 5 for one in ours[-3:]}


# The ring


@settings(max_examples=20)
@given(st.lists(COUNTS, min_size=1, max_size=4), st.sampled_from([0, 2, 32]))
def test_an_updated_ring_equals_a_new_one_and_the_ring_before_it_does_not_change(
    steps, max_updates
):
    ring, kept = Ring(), []
    with patch.object(ring_hash, "MAX_UPDATES", max_updates):
        for counts in steps:
            ring = ring.updated(counts)
            kept.append((ring, ring.points[:], ring.owner_ids[:]))
            new = Ring().updated(counts)
            assert (ring.points, ring.owner_ids) == (new.points, new.owner_ids)
            assert Counter(ring.owner_ids) == counts
    for ring, points, owner_ids in kept:
        assert (ring.points, ring.owner_ids) == (points, owner_ids)


@given(COUNTS)
def test_a_ring_is_kept_while_nothing_changes(counts):
    ring = Ring().updated(counts)
    assert ring.updated(dict(reversed(counts.items()))) is ring


def test_the_number_of_points_follows_the_weight():
    counts = {1: 8, 5: 8, 10: 16, 100: 160, 105: 168, 300: 480, 10**9: MAX_POINTS}
    assert {weight: point_count(weight) for weight in counts} == counts
