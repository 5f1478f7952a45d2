"""`current_criticality`, and how a server reads the criticality of a call."""

import itertools

import pytest

from rpcwheel.call import current_criticality
from rpcwheel.call.criticality import MAX_REPORTED, MAX_VALUE, read_criticality
from rpcwheel.events import CriticalityUnknown
from rpcwheel.rpc import CRITICALITY_KEY, Criticality

_NUMBERS = itertools.count()


@pytest.fixture
def method():
    """The name of a method that no other test uses: an event is emitted once for each method."""
    return f"/shop.Orders/Get{next(_NUMBERS)}"


def test_without_a_served_call_there_is_no_criticality():
    assert current_criticality() is None


@pytest.mark.parametrize("metadata", [None, (), (("user-agent", "grpc"), ("x", "critical"))])
def test_a_call_without_the_metadata_has_no_criticality(metadata, method, events):
    assert read_criticality(metadata, method) is None
    assert not events


@pytest.mark.parametrize("level", Criticality)
def test_a_server_reads_the_label(level, method, events):
    metadata = (("a", "b"), (CRITICALITY_KEY, level.label), ("c", "critical"))
    assert read_criticality(metadata, method) is level
    assert read_criticality([(CRITICALITY_KEY, level.name.replace("_", "-"))], method) is level
    assert not events


@pytest.mark.parametrize(
    ("values", "value", "reason"),
    [
        (["urgent"], "urgent", "it names no criticality"),
        ([""], "", "it names no criticality"),
        (["critical\0"], "critical\0", "it names no criticality"),
        (["\xe9" * 500], "\xe9" * MAX_VALUE, "it names no criticality"),
        ([b"critical"], "critical", "it is not a text"),
        ([b"\xff"], "\\xff", "it is not a text"),
        (["critical", "critical"], "critical, critical", "the call has several"),
        (["critical", b"\xff"], "critical, \\xff", "the call has several"),
    ],
)
def test_an_invalid_value_is_ignored_with_one_event_for_each_reason(
    values, value, reason, method, events
):
    metadata = [(CRITICALITY_KEY, each) for each in values]
    assert [read_criticality(metadata, method) for _ in range(3)] == [None] * 3
    assert events == [CriticalityUnknown(method, value, reason)]


def test_the_methods_that_were_reported_are_bounded(method, events):
    metadata = [(CRITICALITY_KEY, "urgent")]
    for number in range(MAX_REPORTED + 1):
        read_criticality(metadata, f"{method}.{number}")
    read_criticality(metadata, f"{method}.{MAX_REPORTED}")
    read_criticality(metadata, f"{method}.0")  # forgotten meanwhile
    assert len(events) == MAX_REPORTED + 2
