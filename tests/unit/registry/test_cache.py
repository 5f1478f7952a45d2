"""When an instance is added, stale and removed: what `test_cache_model.py` does not show."""

import pytest

from fixtures.cache_worlds import REGISTRY, SERVICE, UNREADABLE, CacheDriver, instance, records
from rpcwheel.events.events import InstancesChanged, RecordSkipped


@pytest.fixture
def driver():
    return CacheDriver()


# Views


def test_a_changed_instance_is_replaced_at_once(driver):
    driver.update("a").events += driver.cache.update({"a": instance("a", weight=7).encoded()}, 0)
    assert driver.snapshot.instances[0].weight == 7
    assert driver.snapshot.revision == 2


def test_an_equal_view_changes_nothing(driver):
    driver.update("ab").take_events(InstancesChanged)
    before = driver.snapshot
    driver.update("ab")
    assert driver.snapshot is before
    assert not driver.events


def test_a_snapshot_is_hashable(driver):
    before = driver.update("ab").snapshot
    assert {before: 1, driver.update("abc").snapshot: 2}[before] == 1


def test_a_change_is_an_event_with_its_numbers(driver):
    driver.update("abc").update("bcde")
    assert driver.take_events(InstancesChanged) == [
        InstancesChanged(REGISTRY, SERVICE, 3, added=3, removed=0, source="live"),
        InstancesChanged(REGISTRY, SERVICE, 4, added=2, removed=1, source="live"),
    ]


# Loss of contact


def test_time_in_which_the_process_stood_still_counts_as_one_stale_timeout(driver):
    driver.update("ab").lose_contact().update("a")
    driver.now_s = 5000.0  # nothing that was due was done
    assert driver.lose_contact().update("a").ids == "ab"


# Unreadable records


def test_an_unreadable_record_with_other_content_is_reported_again(driver):
    driver.update("a", unreadable="x")
    driver.events += driver.cache.update({**records("a"), "x": b"{}"}, 0)
    assert len(driver.take_events(RecordSkipped)) == 2


def test_no_content_of_a_record_raises():
    for data in (
        UNREADABLE,
        b"",
        b"\xff\xfe",
        b"[1]",
        b"[" * 100_000,
        b'{"v": 1}',
        b'{"v": 1, "service": "shop.Orders", "host": "0.0.0.0", "port": 1, "id": "a"}',
        instance("b").encoded(),
        instance("a").replace(service="shop.Bills").encoded(),
    ):
        driver = CacheDriver()
        driver.events += driver.cache.update({"a": data}, 0)
        assert driver.ids is None, data
        assert [one.key for one in driver.take_events(RecordSkipped)] == ["a"]


def test_the_same_content_is_decoded_and_reported_once(driver):
    before = {**records("a"), "b": UNREADABLE}
    driver.events += driver.cache.update(before, 0)
    (first,) = driver.snapshot.instances
    driver.events += driver.cache.update({**before, **records("c")}, 1, changed=frozenset("abc"))
    assert driver.snapshot.instances[0] is first
    assert [one.key for one in driver.take_events(RecordSkipped)] == ["b"]


def test_without_self_preservation_unreadable_records_are_an_empty_snapshot():
    driver = CacheDriver(self_preservation=False)
    driver.cache.update({"a": UNREADABLE}, 0)
    assert driver.ids == ""


# The snapshot file of an earlier run


def test_the_file_is_used_after_a_second_without_a_view(driver):
    assert driver.remember("a").advance_to(0.9).ids is None
    assert driver.advance_to(1.0).ids == "a"
    assert driver.take_events(InstancesChanged) == [
        InstancesChanged(REGISTRY, SERVICE, 1, added=1, removed=0, source="cache")
    ]
