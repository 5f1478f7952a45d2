"""The differences between two snapshots, as `rpcwheel registry watch` prints them."""

from dataclasses import replace

from rpcwheel.cli.registry_view import change_as_json, changes_between
from rpcwheel.instance import ServiceInstance, Snapshot


def instance(name, **values):
    return ServiceInstance(
        **{"service": "shop.Orders", "host": "10.0.0.7", "port": 50051, "id": name, "epoch": "e"}
        | values
    )


A, B = instance("a"), instance("b")
BOTH = Snapshot("shop.Orders", (A, B))


def events(before, after):
    return [(change.event, change.instance.id) for change in changes_between(before, after)]


def test_instances_of_the_first_snapshot_are_present_and_later_ones_are_added() -> None:
    assert events(None, Snapshot("shop.Orders", (A,))) == [("present", "a")]
    assert events(Snapshot("shop.Orders", (A,)), BOTH) == [("added", "b")]
    assert events(Snapshot("shop.Orders"), BOTH) == [("added", "a"), ("added", "b")]


def test_equal_instances_are_no_change() -> None:
    assert events(BOTH, replace(BOTH, revision=2, age_s=3.0)) == []


def test_a_change_names_the_old_and_the_new_values() -> None:
    new = A.replace(weight=10, metadata={"k": "v"}, epoch="f", started_at=1.0)
    (change,) = changes_between(BOTH, Snapshot("shop.Orders", (new, B)))
    assert change.event == "changed"
    assert change.note == "weight 100 -> 10, metadata none -> k=v, restarted"


def test_an_instance_becomes_stale_and_is_live_again_or_removed() -> None:
    stale = replace(BOTH, stale=frozenset({"a"}), source="stale")
    assert events(BOTH, stale) == [("stale", "a")]
    assert events(stale, stale) == []
    assert events(stale, BOTH) == [("live", "a")]
    assert events(stale, Snapshot("shop.Orders", (B,))) == [("removed", "a")]


def test_control_characters_are_escaped() -> None:
    hostile = A.replace(metadata={"k": "\x1b[2J\n"})
    (change,) = changes_between(None, Snapshot("shop.Orders", (hostile,)))
    assert change.line().endswith(r"k=\x1b[2J\n")


def test_a_change_as_json_has_the_event_and_the_whole_instance() -> None:
    (change,) = changes_between(BOTH, Snapshot("shop.Orders", (A.replace(weight=1), B)))
    found = change_as_json(change)
    assert found["event"] == "changed"
    assert found["note"] == "weight 100 -> 1"
    assert (found["service"], found["id"]) == ("shop.Orders", "a")
    assert found["instance"]["address"] == "10.0.0.7:50051"
