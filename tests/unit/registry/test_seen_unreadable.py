"""Records of which none can be read, and nothing was: that is not a service without instances."""

import pytest

from fixtures.seen_worlds import GARBAGE, Sight, records
from rpcwheel.observe.events import RecordSkipped


@pytest.fixture
def sight():
    return Sight()


def test_nothing_is_known_of_a_service_whose_first_records_can_not_be_read(sight):
    sight.events += sight.seen.saw({"a": GARBAGE, "b": GARBAGE}, 0)
    assert sight.keys is None
    assert [one.key for one in sight.told(RecordSkipped)] == ["a", "b"]
    sight.events += sight.seen.saw({"a": GARBAGE, **records("b")}, 0)
    assert sight.keys == "b"
    assert sight.told(RecordSkipped) == []


def test_without_protection_an_empty_list_is_shown_as_the_registry_has_it():
    sight = Sight(protect=False)
    sight.seen.saw({"a": GARBAGE}, 0)
    assert sight.keys == ""


def test_a_service_that_had_none_and_gets_what_can_not_be_read_still_has_none(sight):
    sight.saw()
    sight.seen.saw({"a": GARBAGE}, 0)
    assert sight.keys == ""
