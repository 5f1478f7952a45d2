"""The incremental subset of instances, compared with one that is computed from scratch."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rpcwheel.balancer.subset import SPARE_SHARE, InstanceSubset
from rpcwheel.instance import ServiceInstance

SIZE = 8
IDS = [f"10.0.0.{n}:1" for n in range(24)]


def instance(id_, zone="a", status="UP", weight=100, protocol="grpc"):
    settings = {"zone": zone, "status": status, "weight": weight, "protocol": protocol}
    return ServiceInstance(service="shop", host="10.0.0.1", port=1, id=id_, **settings)


INSTANCES = st.builds(
    instance,
    st.sampled_from(IDS),
    zone=st.sampled_from("aaaab"),
    status=st.sampled_from(["UP"] * 4 + ["DRAINING"]),
    weight=st.sampled_from([0] + [100] * 4),
    protocol=st.sampled_from(["grpc", "grpc", "grpcs"]),
)
UPDATES = st.lists(st.lists(INSTANCES, max_size=24), max_size=6)
"""Often more than `SIZE` are in the preferred zone."""


def expected(subset, instances, zone, protocol):
    """The ids of a subset that is computed from all instances at once."""
    usable = [one for one in instances.values() if protocol in {"", one.protocol}]
    if len(usable) <= SIZE:
        return {one.id for one in usable}

    def rank(one):
        avoided = one.status == "DRAINING" or not one.weight
        return avoided, bool(zone) and one.zone != zone, subset.hash_of(one.id), one.id

    ranked = sorted(usable, key=rank)
    chosen = ranked[:SIZE]
    if zone and all(one.zone == zone for one in chosen):
        others = [one for one in ranked if one.zone != zone and not rank(one)[0]]
        spare = others[: SIZE // SPARE_SHARE]
        chosen[SIZE - len(spare) :] = spare
    return {one.id for one in chosen}


@pytest.mark.parametrize(("zone", "protocol"), [("a", ""), ("", "grpcs")])
@given(updates=UPDATES)
def test_updates_in_any_order_lead_to_the_subset_of_all_instances(zone, protocol, updates):
    subset = InstanceSubset(size=SIZE, zone=zone, protocol=protocol, tag_of=lambda _: "")
    for update in updates:
        subset.update(update)
        last = {one.id: one for one in update}
        assert subset.by_id == last
        assert {one.id for one in subset.chosen()} == expected(subset, last, zone, protocol)
