"""What was said last by those that are gone, in views that nobody has looked at."""

import pytest

from fixtures.seen_worlds import REGISTRY, SERVICE, Sight, records
from rpcwheel.registry.seen import Records


@pytest.fixture
def sight():
    """A registry that has lost contact and is back: what vanishes now is held."""
    return Sight().saw("abc").at(20).suspect().saw("abc")


def heard(sight, keys, last_words):
    sight.seen.saw(records(keys), int(sight.now_s * 10**9), last_words)
    return "".join(one.id for one in sight.snapshot.instances)


def test_who_said_draining_is_gone_at_once(sight):
    assert heard(sight, "ab", records(draining="c")) == "ab"


def test_who_said_nothing_of_the_kind_is_held(sight):
    assert heard(sight, "ab", records("c")) == "abc"
    assert heard(sight, "a", records(bad="b")) == "abc"


def test_who_is_held_already_and_was_there_in_between_is_gone_too(sight):
    assert heard(sight, "ab", {}) == "abc"
    assert heard(sight, "ab", records(draining="c")) == "ab"


def test_who_is_there_is_there_whatever_it_said_before(sight):
    assert heard(sight, "abc", records(draining="c")) == "abc"
    assert {one.status for one in sight.snapshot.instances} == {"UP"}


def test_who_was_never_known_stays_unknown(sight):
    assert heard(sight, "abc", records(draining="x")) == "abc"


def test_a_record_can_be_read_by_itself():
    skipped = []
    reader = Records(REGISTRY, SERVICE)
    assert reader.decoded("a", records("a")["a"], skipped).id == "a"
    assert reader.decoded("b", b"not ours", skipped) is None
    assert [one.key for one in skipped] == ["b"]
