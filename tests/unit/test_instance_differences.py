"""`differences` of two tuples of instances."""

from hypothesis import given
from hypothesis import strategies as st

from rpcwheel.instance import ServiceInstance, differences

POOL = [ServiceInstance(service="shop", host="10.0.0.1", port=n, epoch="e") for n in range(1, 9)]
ORDERED = st.sets(st.sampled_from(range(8))).map(
    lambda found: tuple(POOL[n] for n in sorted(found))
)


@given(before=ORDERED, after=ORDERED)
def test_differences_contain_all_removed_and_added_instances(before, after):
    removed, added = differences(before, after)
    assert set(map(id, before)) - set(map(id, removed)) == set(map(id, after)) - set(map(id, added))
    if before == after:
        assert (removed, added) == ((), ())


def test_differences_of_one_change_contain_one_instance():
    many = tuple(POOL[0].replace(port=port) for port in range(1, 2001))
    changed = many[700].replace(weight=7)
    assert differences(many, (*many[:700], changed, *many[701:])) == ((many[700],), (changed,))
    assert differences(many, (*many[:700], *many[701:])) == ((many[700],), ())
    assert differences(many[1:], many) == ((), (many[0],))
