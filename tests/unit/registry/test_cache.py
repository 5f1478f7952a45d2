"""What vanishes, and when it is gone: each rule by itself. The model is in test_seen_model.py."""

import pytest

from fixtures.seen_worlds import (
    GARBAGE,
    HOLD,
    LEASE,
    REGISTRY,
    SERVICE,
    S,
    Sight,
    instance,
    instances,
    records,
)
from rpcwheel.durations import NEVER
from rpcwheel.observe.events import InstancesChanged, InstancesRetained, RecordSkipped
from rpcwheel.registry.cache import FILE_DELAY_NS, RecordDecoder


@pytest.fixture
def sight():
    return Sight()


# The plain rule


def test_nothing_is_known_before_the_registry_has_answered(sight):
    assert sight.keys is None
    assert sight.seen.next_wake_ns == NEVER


def test_a_service_that_never_had_instances_has_none(sight):
    assert sight.saw().keys == ""
    assert sight.snapshot.source == "live"


def test_what_comes_counts_at_once_in_the_order_of_the_ids(sight):
    assert sight.saw("b").saw("ba").keys == "ab"
    assert sight.snapshot.revision == 2


def test_what_has_changed_counts_at_once(sight):
    sight.saw("a").events += sight.seen.update({"a": instance("a", weight=7).encoded()}, 0)
    assert sight.snapshot.instances[0].weight == 7
    assert sight.snapshot.revision == 2


def test_the_same_again_is_no_change(sight):
    sight.saw("ab").told(InstancesChanged)
    before = sight.snapshot
    sight.saw("ab")
    assert sight.snapshot is before
    assert not sight.events


def test_one_of_two_that_vanishes_is_gone_at_once(sight):
    assert sight.saw("ab").saw("a").keys == "a"
    assert sight.snapshot.source == "live"


def test_what_a_registry_in_good_repute_takes_away_last_is_gone_too(sight):
    assert sight.saw("a").saw("").keys == ""


def test_a_change_is_told_with_its_numbers(sight):
    sight.saw("abc").saw("bcde")
    assert sight.told(InstancesChanged) == [
        InstancesChanged(REGISTRY, SERVICE, 3, added=3, removed=0, source="live"),
        InstancesChanged(REGISTRY, SERVICE, 4, added=2, removed=1, source="live"),
    ]


# Suspect


def test_what_vanishes_after_contact_was_lost_is_held_until_hold_after_contact(sight):
    sight.saw("ab").at(10).suspect().at(1000).saw("")
    assert (sight.keys, sight.held, sight.snapshot.source) == ("ab", "ab", "stale")
    assert sight.seen.next_wake_ns == (1000 + HOLD) * S
    assert sight.at(1000 + HOLD - 1).keys == "ab"
    assert sight.at(1000 + HOLD).keys == ""


def test_what_comes_back_is_held_no_more(sight):
    sight.saw("ab").suspect().saw("").saw("b")
    assert (sight.keys, sight.held) == ("ab", "a")
    sight.saw("ab")
    assert (sight.snapshot.source, sight.seen.next_wake_ns) == ("live", NEVER)


def test_what_comes_counts_at_once_even_then(sight):
    assert sight.saw("a").suspect().saw("b").keys == "ab"


def test_contact_lost_again_prolongs_the_hold(sight):
    sight.saw("a").suspect().saw("").at(HOLD - 1).suspect()
    assert sight.at(500).keys == "a"
    sight.saw("")
    assert sight.at(500 + HOLD - 1).keys == "a"
    assert sight.at(500 + HOLD).keys == ""


def test_what_contact_that_comes_and_goes_has_missed_for_twice_the_hold_in_all_is_gone(sight):
    sight.saw("ab").suspect().saw("a")
    for begun in range(0, 40, 20):
        sight.at(begun + 20).suspect().at(begun + 20).saw("a")
        assert sight.keys == "ab"
    sight.at(2 * HOLD).suspect()
    assert sight.at(3 * HOLD).keys == "ab", "never by a failure alone"
    sight.told(InstancesChanged)
    assert sight.saw("a").keys == "a"
    assert (sight.held, sight.snapshot.source) == ("", "live")
    assert sight.told(InstancesChanged) == [
        InstancesChanged(REGISTRY, SERVICE, 1, added=0, removed=1, source="live")
    ]


def test_what_was_there_meanwhile_is_held_anew(sight):
    sight.saw("ab").suspect().saw("a").at(20).suspect().saw("ab")
    for begun in range(20, 80, 20):
        sight.at(begun + 20).suspect().saw("a")
        assert sight.keys == "ab"
    assert sight.at(100).suspect().saw("a").keys == "a"


def test_time_without_contact_does_not_count_against_anybody(sight):
    sight.saw("ab").suspect().saw("a")
    for begun in range(0, 5000, 1000):
        sight.at(begun + 1).suspect().at(begun + 1000).saw("a")
    assert sight.keys == "ab"


def test_time_in_which_we_stood_still_counts_as_one_hold(sight):
    sight.saw("ab").suspect().saw("a")
    sight.now_s = 5000.0  # nothing that was due was done
    assert sight.suspect().saw("a").keys == "ab"


def test_what_vanishes_later_within_the_hold_is_gone_at_its_end_too(sight):
    sight.saw("ab").suspect().saw("ab").at(HOLD - 1).saw("a")
    assert sight.keys == "ab"
    assert sight.at(HOLD).keys == "a"


def test_what_vanishes_after_the_hold_is_gone_at_once(sight):
    assert sight.saw("ab").suspect().saw("ab").at(HOLD).saw("a").keys == "a"


def test_what_is_held_is_told_once_with_the_reason_and_not_as_a_change(sight):
    sight.saw("abc").told(InstancesChanged)
    sight.suspect("the lease was lost").saw("a").saw("a")
    assert sight.events == [InstancesRetained(REGISTRY, SERVICE, 2, "the lease was lost")]


def test_the_end_of_a_hold_is_a_change(sight):
    sight.saw("ab").suspect().saw("a").told(InstancesChanged)
    sight.at(HOLD)
    assert sight.told(InstancesChanged) == [
        InstancesChanged(REGISTRY, SERVICE, 1, added=0, removed=1, source="live")
    ]


def test_without_contact_the_snapshot_ages(sight):
    sight.saw("a").at(10)
    assert sight.snapshot.age_s == 0.0
    sight.suspect().at(15)
    assert (sight.snapshot.age_s, sight.snapshot.source) == (5.0, "live")
    assert sight.suspect().at(20).snapshot.age_s == 10.0
    assert sight.saw("a").snapshot.age_s == 0.0


def test_a_snapshot_with_held_instances_is_as_old_as_the_first_of_them(sight):
    sight.saw("ab").suspect().at(5).saw("a").at(9).saw("")
    assert sight.at(10).snapshot.age_s == 5.0


def test_without_protection_the_registry_is_believed():
    sight = Sight(self_preservation=False)
    assert sight.saw("abc").suspect().saw("").keys == ""
    assert not sight.told(InstancesRetained)


def test_after_we_stood_still_the_registry_is_heard_before_what_is_held_is_gone(sight):
    sight.saw("a").suspect().saw("")
    late_ns = (HOLD + 5) * S
    sight.events += sight.seen.step(late_ns)
    assert sight.keys == "a"
    assert sight.seen.next_wake_ns == late_ns + FILE_DELAY_NS
    sight.events += sight.seen.step(late_ns + FILE_DELAY_NS)
    assert sight.keys == ""


# More than half


def test_more_than_half_of_three_that_vanish_at_once_are_held(sight):
    sight.saw("abc").saw("a")
    assert (sight.keys, sight.held) == ("abc", "bc")
    assert (
        sight.told(InstancesRetained)[0].reason == "more than half of them disappeared within 15 s"
    )
    assert sight.at(HOLD).keys == "a"


def test_the_same_view_again_prolongs_no_hold(sight):
    sight.saw("abc").saw("a").at(5).saw("a")
    assert sight.at(HOLD).keys == "a"


def test_half_of_four_that_vanish_are_gone(sight):
    assert sight.saw("abcd").saw("ab").keys == "ab"


def test_those_that_vanish_one_by_one_within_a_lease_count_together(sight):
    sight.saw("abcde").at(1).saw("abcd").at(2).saw("abc")
    assert sight.keys == "abc"
    assert sight.at(LEASE - 1).saw("ab").keys == "abc"


def test_those_that_vanish_in_more_than_a_lease_do_not(sight):
    sight.saw("abcde").at(1).saw("abcd").at(2).saw("abc")
    assert sight.at(LEASE + 2).saw("ab").keys == "ab"


def test_one_that_comes_and_goes_counts_once(sight):
    sight.saw("abc")
    for second in range(1, 6):
        sight.at(second).saw("ab").at(second + 0.5).saw("abc")
    assert not sight.told(InstancesRetained)


def test_those_replaced_at_the_same_time_are_gone(sight):
    assert sight.saw("abc").saw("xyz").keys == "xyz"


# By its own word


def test_what_said_draining_is_gone_at_once_however_suspect_the_registry(sight):
    sight.saw("a", draining="b").suspect().saw("a")
    assert (sight.keys, sight.held) == ("a", "")


def test_all_that_said_draining_are_no_mass_that_vanishes(sight):
    assert sight.saw("abcd").saw("a", draining="bcd").saw("a").keys == "a"


# Foreign data


def test_a_bad_record_among_good_ones_is_skipped_and_told_once(sight):
    sight.saw("a", bad="x").saw("ab", bad="x")
    assert sight.keys == "ab"
    (told,) = sight.told(RecordSkipped)
    assert (told.key, type(told.error)) == ("x", ValueError)


def test_another_bad_content_of_the_same_key_is_told_again(sight):
    sight.saw("a", bad="x")
    sight.events += sight.seen.update({**records("a"), "x": b"{}"}, 0)
    assert len(sight.told(RecordSkipped)) == 2


def test_an_instance_whose_record_cannot_be_read_any_more_stays_as_it_was(sight):
    assert sight.saw("ab").saw("a", bad="b").keys == "ab"
    assert sight.held == ""
    assert sight.saw("a").keys == "a"


def test_what_vanishes_while_no_record_can_be_read_is_held(sight):
    sight.saw("ab").saw(bad="x")
    assert (sight.keys, sight.held) == ("ab", "ab")
    assert sight.told(InstancesRetained)[0].reason == "none of the registry's records can be read"
    assert sight.at(HOLD - 1).saw(bad="x").at(HOLD).keys == ""


def test_whatever_stands_in_a_record_it_harms_no_other():
    for data in (
        GARBAGE,
        b"",
        b"\xff\xfe",
        b"[1]",
        b"[" * 100_000,
        b'{"v": 1}',
        b'{"v": 1, "service": "shop.Orders", "host": "0.0.0.0", "port": 1, "id": "a"}',
        instance("b").encoded(),
        instance("a").changed(service="shop.Bills").encoded(),
    ):
        skipped = []
        assert RecordDecoder(REGISTRY, SERVICE).decode("a", data, skipped) is None, data
        assert [one.key for one in skipped] == ["a"]


def test_the_same_content_is_decoded_and_reported_once():
    decoder, skipped = RecordDecoder(REGISTRY, SERVICE), []
    first = decoder.decode("a", instance("a").encoded(), skipped)
    assert decoder.decode("a", instance("a").encoded(), skipped) is first
    assert decoder.decode("a", instance("a", weight=1).encoded(), skipped).weight == 1
    assert decoder.decode("b", GARBAGE, skipped) is decoder.decode("b", GARBAGE, skipped) is None
    assert [one.key for one in skipped] == ["b"]


def test_nothing_is_known_of_a_service_whose_first_records_can_not_be_read(sight):
    sight.events += sight.seen.update({"a": GARBAGE, "b": GARBAGE}, 0)
    assert sight.keys is None
    assert [one.key for one in sight.told(RecordSkipped)] == ["a", "b"]
    sight.events += sight.seen.update({"a": GARBAGE, **records("b")}, 0)
    assert sight.keys == "b"
    assert sight.told(RecordSkipped) == []


def test_without_protection_an_empty_list_is_shown_as_the_registry_has_it():
    sight = Sight(self_preservation=False)
    sight.seen.update({"a": GARBAGE}, 0)
    assert sight.keys == ""


def test_a_service_that_had_none_and_gets_what_can_not_be_read_still_has_none(sight):
    sight.saw()
    sight.seen.update({"a": GARBAGE}, 0)
    assert sight.keys == ""


# A file of an earlier run


def test_what_is_remembered_is_shown_once_the_registry_has_failed(sight):
    sight.remember("ab", age_s=60)
    assert sight.keys is None
    sight.suspect().at(5)
    assert sight.keys == "ab"
    assert (sight.snapshot.source, sight.snapshot.age_s) == ("cache", 65.0)
    assert sight.told(InstancesChanged) == [
        InstancesChanged(REGISTRY, SERVICE, 2, added=2, removed=0, source="cache")
    ]


def test_what_is_remembered_is_shown_after_a_second_without_an_answer(sight):
    assert sight.remember("a").at(0.9).keys is None
    assert sight.at(1.0).keys == "a"


def test_what_is_remembered_after_the_registry_has_failed_is_shown_at_once(sight):
    assert sight.suspect().remember("a").keys == "a"


def test_the_first_live_answer_takes_the_place_of_what_was_remembered_long_ago(sight):
    assert sight.remember("abc", age_s=3600).saw("x").keys == "x"
    assert sight.snapshot.source == "live"


def test_what_was_shown_after_a_failure_is_held_when_the_first_answer_misses_it(sight):
    sight.remember("abc", age_s=3600).suspect().at(60).saw("")
    assert (sight.keys, sight.snapshot.source) == ("abc", "stale")
    assert sight.saw("ab").held == "c"
    assert sight.at(60 + HOLD).keys == "ab"


def test_an_empty_first_answer_does_not_erase_what_a_young_file_remembers(sight):
    sight.remember("ab", age_s=HOLD - 1).saw("")
    assert (sight.keys, sight.held) == ("ab", "ab")
    assert sight.told(InstancesRetained)[0].reason == "the registry's first answer is empty"
    assert sight.at(HOLD).keys == ""


def test_an_empty_first_answer_erases_what_an_old_file_remembers_and_nobody_was_shown(sight):
    assert sight.remember("ab", age_s=HOLD + 1).saw("").keys == ""


def test_an_empty_first_answer_does_not_erase_what_was_shown_as_it_came_late(sight):
    sight.remember("ab", age_s=3600).at(2).saw("")
    assert (sight.keys, sight.held) == ("ab", "ab")


def test_what_comes_from_a_file_after_the_first_answer_is_ignored(sight):
    assert sight.saw("a").remember("b").suspect().keys == "a"


def test_a_file_that_remembers_nothing_makes_no_empty_list(sight):
    assert sight.remember("").suspect().at(10).keys is None


def test_the_same_instances_live_are_a_change_of_source(sight):
    sight.remember("a").suspect().told(InstancesChanged)
    sight.saw("a")
    assert (sight.snapshot.source, sight.snapshot.revision) == ("live", 2)
    assert sight.told(InstancesChanged) == [
        InstancesChanged(REGISTRY, SERVICE, 1, added=0, removed=0, source="live")
    ]


# Last words, in views that nobody has looked at


@pytest.fixture
def back():
    """A registry that has lost contact and is back: what vanishes now is held."""
    return Sight().saw("abc").at(20).suspect().saw("abc")


def heard(sight, keys, last_records):
    sight.seen.update(records(keys), int(sight.now_s * 10**9), last_records=last_records)
    return "".join(one.id for one in sight.snapshot.instances)


def test_who_said_draining_is_gone_at_once(back):
    assert heard(back, "ab", records(draining="c")) == "ab"


def test_who_said_nothing_of_the_kind_is_held(back):
    assert heard(back, "ab", records("c")) == "abc"
    assert heard(back, "a", records(bad="b")) == "abc"


def test_who_is_held_already_and_was_there_in_between_is_gone_too(back):
    assert heard(back, "ab", {}) == "abc"
    assert heard(back, "ab", records(draining="c")) == "ab"


def test_who_is_there_is_there_whatever_it_said_before(back):
    assert heard(back, "abc", records(draining="c")) == "abc"
    assert {one.status for one in back.snapshot.instances} == {"UP"}


def test_who_was_never_known_stays_unknown(back):
    assert heard(back, "abc", records(draining="x")) == "abc"


# Settings


def test_a_thousand_instances_of_a_registry_and_of_a_file_are_the_same(sight):
    many = [f"10.0.{n // 250}.{n % 250}:1" for n in range(1000)]
    sight.saw(many)
    assert sight.snapshot.instances == instances(*sorted(many))
