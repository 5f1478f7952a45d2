"""A ring made of another by its changes is the one made anew; who stays keeps its keys."""

from bisect import bisect_left
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from rpcwheel.cluster._ring import LEAST_NODES, MOST_NODES, Ring, nodes_of, point_of

NODES = st.dictionaries(
    st.sampled_from("abcdefgh"), st.sampled_from([8, 16, 160, 400]), min_size=1, max_size=8
)
KEYS = [point_of(f"user-{number}") for number in range(60)]


def owner(ring, key, names):
    """Whose the key is, if only these are there."""
    at = bisect_left(ring.points, key)
    turn = (ring.owners[place] for place in ring.points[at:] + ring.points[:at])
    return next(name for name in turn if name in names)


@settings(max_examples=20)
@given(st.lists(NODES, min_size=1, max_size=4))
def test_a_ring_made_of_another_is_the_one_made_anew(steps):
    ring = None
    for nodes in steps:
        ring = Ring(nodes, ring)
        fresh = Ring(nodes)
        assert (ring.points, ring.owners) == (fresh.points, fresh.owners)
        assert Counter(ring.owners.values()) == nodes


@settings(max_examples=20)
@given(st.lists(NODES, min_size=1, max_size=5))
def test_whom_a_key_belongs_to_does_not_depend_on_what_went_before(steps):
    ring = Ring({})
    for nodes in steps:
        ring = ring.turned(nodes)
        fresh = Ring(nodes)
        assert all(owner(ring, key, nodes) == owner(fresh, key, nodes) for key in KEYS)
        assert len(ring.points) <= sum(nodes.values()) + 400 * len(nodes)


@settings(max_examples=20)
@given(NODES)
def test_a_ring_does_for_those_who_are_on_it(nodes):
    ring = Ring(nodes)
    assert ring.turned(nodes) is ring
    most = dict(list(nodes.items())[: (len(nodes) + 1) // 2])
    assert ring.turned(most) is ring


def test_a_member_has_places_by_its_weight():
    nodes = {1: LEAST_NODES, 5: 8, 100: 160, 105: 168, 300: 480, 10**9: MOST_NODES}
    assert {weight: nodes_of(weight) for weight in nodes} == nodes


def test_a_key_is_at_one_place_in_every_process():
    assert point_of("user-1") == point_of(b"user-1") == 11145382709976293768
    assert point_of(7) == point_of("7")
    assert point_of("\ud800") != point_of("?")
