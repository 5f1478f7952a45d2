"""When a list of gRPC's own is made anew, and of whom."""

import pytest

from rpcwheel.durations import NEVER
from rpcwheel.instance import ServiceInstance
from rpcwheel.registry.listing import (
    LATER_NS,
    PLAIN,
    SOON_NS,
    LeftOut,
    Listing,
    one_protocol,
    wanted_of,
)

A, B, C = ("10.0.0.1", 1), ("10.0.0.2", 1), ("10.0.0.3", 1)


def instance(place, **told):
    host, port = place
    return ServiceInstance(service="shop.Orders", host=host, port=port, **told)


@pytest.fixture
def listing():
    made = Listing()
    made.saw(frozenset({A, B}), (), 0)
    assert made.step(0) == {A, B}
    return made


def test_changes_are_gathered_for_a_while(listing):
    listing.saw(frozenset({A, B, C}), (), 10)
    assert listing.next_wake_ns == 10 + SOON_NS
    assert listing.step(10 + SOON_NS - 1) is None
    listing.saw(frozenset({B, C}), (), 50)
    assert listing.next_wake_ns == 10 + SOON_NS
    assert listing.step(10 + SOON_NS) == {B, C}
    assert listing.step(10 + SOON_NS) is None


def test_who_is_only_missed_is_kept_longer_than_who_comes_is_waited_for(listing):
    listing.saw(frozenset({A}), (), 0)
    assert listing.next_wake_ns == LATER_NS
    listing.saw(frozenset({A, C}), (), 50)
    assert listing.next_wake_ns == 50 + SOON_NS


def test_who_drains_or_has_no_weight_is_called_only_if_all_do():
    up, light = instance(A), instance(B, weight=0)
    draining = instance(C, status="DRAINING")
    assert wanted_of([up, light, draining]) == ({A}, {B, C})
    assert wanted_of([light, draining]) == ({B}, {C})
    assert wanted_of([draining]) == ({C}, frozenset())
    assert wanted_of([]) == (frozenset(), frozenset())


def test_a_list_is_of_one_protocol():
    plain, over_tls = instance(A), instance(B, protocol="grpcs")
    assert one_protocol([plain, over_tls], credentials=False) == ([plain], {B})
    assert one_protocol([plain, over_tls], credentials=True) == ([plain, over_tls], frozenset())
    assert one_protocol([over_tls], credentials=False) == ([over_tls], frozenset())


def test_another_protocol_is_another_list_soon(listing):
    assert listing.protocol == "grpc"
    listing.saw(frozenset({A, B}), (), 0, "grpcs")
    assert listing.next_wake_ns == SOON_NS
    listing.saw(frozenset({A}), (), 50)  # still so
    assert listing.next_wake_ns == SOON_NS
    assert (listing.step(SOON_NS), listing.protocol) == ({A}, "grpcs")
    listing.saw(frozenset({A}), (), 0, "grpcs")
    assert listing.next_wake_ns == NEVER


def test_who_is_left_out_is_told_of_once_as_long_as_it_is():
    left_out = LeftOut("memory://a", "shop.Orders")
    assert [one.key for one in left_out.news([B, A], PLAIN)] == ["10.0.0.1:1", "10.0.0.2:1"]
    assert left_out.news([A, B], PLAIN) == []
    assert [one.key for one in left_out.news([A], "no address")] == ["10.0.0.1:1"]
    assert left_out.news([], PLAIN) == []
    (again,) = left_out.news([A], PLAIN)
    assert (again.registry, again.service, str(again.error)) == ("memory://a", "shop.Orders", PLAIN)
