"""What `rpcwheel registry` prints: changes between two snapshots, and consumers."""

import io
import json
from dataclasses import replace

from rpcwheel.cli.registry_view import (
    as_document,
    change_as_json,
    changes_between,
    changes_of_consumers,
    show,
)
from rpcwheel.instance import ServiceInstance, Snapshot
from rpcwheel.registry.backend import Consumer


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


# Consumers

WEB = Consumer("shop.Orders", "web", "10.0.0.9", version="1.2", started_at=1.0)
JOB = Consumer("shop.Stock", "job", "10.0.0.8")


def lines(services, consumers):
    stream = io.StringIO()
    show("dubbo+zookeeper://zk", services, consumers, stream, plain=True)
    return stream.getvalue().splitlines()


def test_consumers_are_a_table_of_their_own_below_that_of_instances():
    head, instance, _, of_consumers, web, job, _, summary = lines({"shop.Orders": [A]}, [WEB, JOB])
    assert head.split()[:2] == ["SERVICE", "ID"]
    assert instance.split()[0] == "shop.Orders"
    assert of_consumers.split() == [
        *("CONSUMER", "OF", "APPLICATION", "HOST", "VERSION", "UP", "SINCE"),
    ]
    assert web.split()[:4] == ["shop.Orders", "web", "10.0.0.9", "1.2"]
    assert job.split() == ["shop.Stock", "job", "10.0.0.8"]
    assert summary == "1 instance of 1 service and 2 consumers at dubbo+zookeeper://zk"


def test_consumers_without_an_instance_are_counted():
    assert lines({}, [WEB])[-1] == "no service and 1 consumer at dubbo+zookeeper://zk"
    assert lines({"shop.Orders": []}, [WEB])[-1] == (
        "no instance of shop.Orders and 1 consumer at dubbo+zookeeper://zk"
    )


def test_the_document_has_all_values_of_consumers():
    document = json.loads(as_document("dubbo+zookeeper://zk", {}, [WEB]))
    assert document["services"] == {}
    assert [Consumer(**values) for values in document["consumers"]] == [WEB]


def test_consumers_are_present_at_first_and_then_added_or_removed():
    def changes(before, after):
        return [change.line() for change in changes_of_consumers(before, after)]

    assert changes(None, [WEB]) == ["= shop.Orders consumer web at 10.0.0.9 present: version 1.2"]
    assert changes([WEB], [WEB]) == []
    assert changes([WEB], [JOB, WEB, WEB]) == [
        "+ shop.Stock consumer job at 10.0.0.8 added",
        "+ shop.Orders consumer web at 10.0.0.9 added: version 1.2",
    ]
    assert changes([WEB, WEB], [WEB]) == [
        "- shop.Orders consumer web at 10.0.0.9 removed: version 1.2"
    ]
    (change,) = changes_of_consumers([], [WEB])
    assert Consumer(**change.as_json()["consumer"]) == WEB
