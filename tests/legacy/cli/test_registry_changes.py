"""What two looks at a service have between them."""

from dataclasses import replace

from rpcwheel.cli.registry_changes import as_facts, changes
from rpcwheel.instance import ServiceInstance, Snapshot


def instance(name, **values):
    return ServiceInstance(
        **{"service": "shop.Orders", "host": "10.0.0.7", "port": 50051, "id": name, "epoch": "e"}
        | values
    )


A, B = instance("a"), instance("b")
BOTH = Snapshot("shop.Orders", (A, B))


def events(before, after):
    return [(change.event, change.instance.id) for change in changes(before, after)]


def test_those_of_the_first_look_are_there_and_later_ones_come() -> None:
    assert events(None, Snapshot("shop.Orders", (A,))) == [("there", "a")]
    assert events(Snapshot("shop.Orders", (A,)), BOTH) == [("came", "b")]
    assert events(Snapshot("shop.Orders"), BOTH) == [("came", "a"), ("came", "b")]


def test_the_same_twice_is_no_news() -> None:
    assert events(BOTH, replace(BOTH, revision=2, age_s=3.0)) == []


def test_a_change_says_of_what_to_what() -> None:
    new = A.changed(weight=10, metadata={"k": "v"}, epoch="f", started_at=1.0)
    (change,) = changes(BOTH, Snapshot("shop.Orders", (new, B)))
    assert change.event == "changed"
    assert change.note == "weight 100 -> 10, metadata none -> k=v, restarted"


def test_one_that_is_held_is_told_when_that_begins_and_ends() -> None:
    held = replace(BOTH, stale=frozenset({"a"}), source="stale")
    assert events(BOTH, held) == [("stale", "a")]
    assert events(held, held) == []
    assert events(held, BOTH) == [("back", "a")]
    assert events(held, Snapshot("shop.Orders", (B,))) == [("gone", "a")]


def test_what_others_have_published_has_no_power_over_a_terminal() -> None:
    evil = A.changed(metadata={"k": "\x1b[2J\n"})
    (change,) = changes(None, Snapshot("shop.Orders", (evil,)))
    assert change.line().endswith(r"k=\x1b[2J\n")


def test_machines_are_told_the_event_and_the_whole_instance() -> None:
    (change,) = changes(BOTH, Snapshot("shop.Orders", (A.changed(weight=1), B)))
    told = as_facts(change)
    assert told["event"] == "changed"
    assert told["note"] == "weight 100 -> 1"
    assert (told["service"], told["id"]) == ("shop.Orders", "a")
    assert told["instance"]["address"] == "10.0.0.7:50051"
