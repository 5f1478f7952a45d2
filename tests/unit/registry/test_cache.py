"""When an instance is added, stale and removed: each rule by itself; see test_cache_model.py."""

import pytest

from fixtures.cache_worlds import (
    LEASE_S,
    REGISTRY,
    SERVICE,
    STALE_S,
    UNREADABLE,
    CacheDriver,
    S,
    instance,
    records,
)
from rpcwheel.events.events import InstancesChanged, InstancesRetained, RecordSkipped
from rpcwheel.registry.cache import FILE_DELAY_NS


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


def test_stale_instances_are_one_event_with_the_reason_and_no_change(driver):
    driver.update("abc").take_events(InstancesChanged)
    driver.lose_contact("the lease was lost").update("a").update("a")
    assert driver.events == [InstancesRetained(REGISTRY, SERVICE, 2, "the lease was lost")]


def test_the_age_of_a_snapshot_grows_without_contact(driver):
    driver.update("a").advance_to(10)
    assert driver.snapshot.age_s == 0.0
    driver.lose_contact().advance_to(15)
    assert (driver.snapshot.age_s, driver.snapshot.source) == (5.0, "live")
    assert driver.lose_contact().advance_to(20).snapshot.age_s == 10.0
    assert driver.update("a").snapshot.age_s == 0.0


def test_the_age_of_a_snapshot_is_that_of_its_first_stale_instance(driver):
    driver.update("ab").lose_contact().advance_to(5).update("a").advance_to(9).update("")
    assert driver.advance_to(10).snapshot.age_s == 5.0


def test_without_self_preservation_instances_are_removed_at_once():
    driver = CacheDriver(self_preservation=False)
    assert driver.update("abc").lose_contact().update("").ids == ""
    assert not driver.take_events(InstancesRetained)


def test_a_late_step_lets_a_view_come_before_stale_instances_are_removed(driver):
    driver.update("a").lose_contact().update("")
    late_ns = (STALE_S + 5) * S
    driver.events += driver.cache.step(late_ns)
    assert driver.ids == "a"
    assert driver.cache.next_wake_ns == late_ns + FILE_DELAY_NS
    driver.events += driver.cache.step(late_ns + FILE_DELAY_NS)
    assert driver.ids == ""


def test_an_instance_is_stale_for_at_most_two_stale_timeouts_of_contact(driver):
    driver.update("ab").lose_contact().update("a")
    shown = []
    for number in (1, 2, 3):
        driver.advance_to(number * (STALE_S - 1)).lose_contact().update("a")
        shown.append(driver.ids)
    assert shown == ["ab", "ab", "a"]


# More than half disappear


def test_instances_that_disappear_within_a_lease_count_together(driver):
    driver.update("abcde").advance_to(1).update("abcd").advance_to(2).update("abc")
    assert driver.ids == "abc"
    driver.advance_to(LEASE_S - 1).update("ab")
    assert (driver.ids, driver.stale) == ("abcde", "cde")
    (retained,) = driver.take_events(InstancesRetained)
    assert retained.reason == "more than half of them disappeared within 15 s"
    driver.advance_to(LEASE_S - 1 + STALE_S)
    assert (driver.ids, driver.snapshot.expired) == ("ab", {"c", "d", "e"})
    assert driver.take_events(InstancesRetained) == []
    assert driver.update("abc").update("abcd").update("abd").snapshot.expired == {"e"}


# Unreadable records


def test_an_unreadable_record_with_other_content_is_reported_again(driver):
    driver.update("a", unreadable="x")
    driver.events += driver.cache.update({**records("a"), "x": b"{}"}, 0)
    assert len(driver.take_events(RecordSkipped)) == 2


def test_instances_that_disappear_while_no_record_is_readable_are_stale(driver):
    driver.update("ab").update(unreadable="x")
    assert (driver.ids, driver.stale) == ("ab", "ab")
    assert (
        driver.take_events(InstancesRetained)[0].reason
        == "none of the registry's records can be read"
    )
    assert driver.advance_to(STALE_S - 1).update(unreadable="x").advance_to(STALE_S).ids == ""


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


def test_there_is_no_snapshot_if_no_record_of_the_first_view_is_readable(driver):
    driver.events += driver.cache.update({"a": UNREADABLE, "b": UNREADABLE}, 0)
    assert driver.ids is None
    assert [one.key for one in driver.take_events(RecordSkipped)] == ["a", "b"]
    driver.events += driver.cache.update({"a": UNREADABLE, **records("b")}, 0)
    assert driver.ids == "b"
    assert driver.take_events(RecordSkipped) == []


def test_without_self_preservation_unreadable_records_are_an_empty_snapshot():
    driver = CacheDriver(self_preservation=False)
    driver.cache.update({"a": UNREADABLE}, 0)
    assert driver.ids == ""


# The snapshot file of an earlier run


def test_the_file_is_used_after_a_loss_of_contact(driver):
    driver.remember("ab", age_s=60)
    assert driver.ids is None
    driver.lose_contact().advance_to(5)
    assert driver.ids == "ab"
    assert (driver.snapshot.source, driver.snapshot.age_s) == ("cache", 65.0)
    assert driver.take_events(InstancesChanged) == [
        InstancesChanged(REGISTRY, SERVICE, 2, added=2, removed=0, source="cache")
    ]


def test_the_file_is_used_after_a_second_without_a_view(driver):
    assert driver.remember("a").advance_to(0.9).ids is None
    assert driver.advance_to(1.0).ids == "a"


def test_a_file_read_after_a_loss_of_contact_is_used_at_once(driver):
    assert driver.lose_contact().remember("a").ids == "a"


def test_an_empty_first_view_makes_the_instances_of_a_young_file_stale(driver):
    driver.remember("ab", age_s=STALE_S - 1).update("")
    assert (driver.ids, driver.stale) == ("ab", "ab")
    assert driver.take_events(InstancesRetained)[0].reason == "the registry's first answer is empty"
    assert driver.advance_to(STALE_S).ids == ""


def test_a_file_read_after_the_first_view_is_ignored(driver):
    assert driver.update("a").remember("b").lose_contact().ids == "a"


def test_an_instance_that_was_draining_between_two_views_does_not_come_back(driver):
    driver.update("abcde").update("abcd")
    assert ids_after(driver, "abcd", records(draining="e")) == "abcd"
    assert ids_after(driver, "abc", {}) == "abc"
    assert ids_after(driver, "a", {}) == "abcd"


# Last records: of instances that came and went in views that were merged


@pytest.fixture
def reconnected():
    """A cache whose contact was lost and is back: what disappears now is stale."""
    return CacheDriver().update("abc").advance_to(20).lose_contact().update("abc")


def ids_after(driver, ids, last_records):
    driver.cache.update(records(ids), int(driver.now_s * S), last_records=last_records)
    return driver.ids


@pytest.mark.parametrize(
    ("view", "last_records", "left"),
    [
        ("ab", records(draining="c"), "ab"),
        ("ab", records("c"), "abc"),
        ("a", records(unreadable="b"), "abc"),
        ("abc", records(draining="c"), "abc"),  # the view counts
        ("abc", records(draining="x"), "abc"),  # it is unknown
    ],
)
def test_an_instance_that_disappears_is_stale_unless_its_last_record_was_draining(
    reconnected, view, last_records, left
):
    assert ids_after(reconnected, view, last_records) == left
    assert {one.status for one in reconnected.snapshot.instances} == {"UP"}


def test_a_stale_instance_whose_last_record_was_draining_is_removed_at_once(reconnected):
    assert ids_after(reconnected, "ab", {}) == "abc"
    assert ids_after(reconnected, "ab", records(draining="c")) == "ab"
