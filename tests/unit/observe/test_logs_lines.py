"""The log line of each kind of event, in log_lines.golden.txt: class, logger, level, text."""

import logging
from pathlib import Path

import pytest

from rpcwheel.observe import events, log_event, logs

GOLDEN = Path(__file__).parent / "log_lines.golden.txt"
BOOM = ValueError("no\nsuch   shop")
REGISTRY = "etcd://10.0.0.1:2379"


@pytest.fixture(autouse=True)
def nothing_said_before(monkeypatch):
    monkeypatch.setattr(logs, "_SAID", {})


EVENTS = [
    events.TaskSlow("wheel", "push", 0.25),
    events.TaskFailed("wheel", "push", BOOM),
    events.HandOffRefused("wheel", "push", BOOM),
    events.TimersTooMany(65, 64),
    events.CallParked("audit", "shop.push", BOOM, delay_s=5.0, pending=1),
    events.CallRetried("audit", "shop.push", 2, 5.25, BOOM, delay_s=0.5),
    events.CallDelivered("audit", "shop.push", 3, 10.5),
    events.CallAbandoned("audit", "shop.push", 4, 15.0, BOOM, "no retries left"),
    events.CallDropped("audit", "shop.push", BOOM, pending=100),
    events.CallsUndelivered("audit", ("shop.push", "shop.pull"), 3, 9.0, "closed"),
    events.DeadLetterFailed("audit", "shop.push", BOOM),
    events.CallSlow("/shop.Orders/Get", "client", 1.5),
    events.CallRetrying("/shop.Orders/Get", 1, "UNAVAILABLE", 0.25),
    events.CallNotRetried("/shop.Orders/Get", 2, "UNAVAILABLE", "no attempts left"),
    events.CallExcused("/shop.Orders/Get", BOOM),
    events.StreamSilent("/shop.Orders/Watch", 30.0),
    events.CallLate("/shop.Orders/Get", 0.5),
    events.HookFailed("/shop.Orders/Get", "done callback", BOOM),
    events.ListenerFailed("shop:1", "page_me", BOOM),
    events.HeartbeatMissed("shop:1", misses=2, silent_s=140.0, answer="DEADLINE_EXCEEDED"),
    events.ConnectionDead("shop:1", silent_s=180.0, misses=3, calls=1),
    events.ConnectionReplaced("shop:1", 2, "no answer to heartbeats for 180 s", calls=1),
    events.ConnectionAlive("shop:1", after_s=181.0, rtt_s=0.001),
    events.ConnectionIdle("ipv4:10.0.0.1:5", "neither read nor written", 180.0, 0, 1),
    events.ConnectionClosed("ipv4:10.0.0.1:5", "neither read nor written", 180.0, "shutdown"),
    events.ConnectionKept("ipv4:10.0.0.1:5", "it is in use again"),
    events.IdleLimited("Unix sockets do not tell their peers"),
    events.AnswerLate("orders", "7", "timed out", 0.25),
    events.AnswerUnknown("orders", "7"),
    events.InstancePublished(REGISTRY, "shop.Orders", "10.0.0.7:1", "lease", away_s=16.5),
    events.InstanceWithdrawn(REGISTRY, "shop.Orders", "10.0.0.7:1"),
    events.RegistryFailed(REGISTRY, "renew", BOOM, delay_s=0.25, items=3),
    events.RegistryRecovered(REGISTRY, after_s=12.5),
    events.InstancesChanged(REGISTRY, "shop.Orders", 3, added=1, removed=2, source="live"),
    events.InstancesHeld(REGISTRY, "shop.Orders", 2, "the connection was lost"),
    events.RecordSkipped(REGISTRY, "shop.Orders", "lock", BOOM),
    events.SnapshotFailed(REGISTRY, "orders.json", BOOM),
    events.MemberDown("shop.Orders", "10.0.0.7:1", "its connection was refused"),
    events.MemberUp("shop.Orders", "10.0.0.7:1", after_s=1.5),
    events.ServingEnds("shop.Orders", "withdraw", "SIGTERM"),
]


def test_each_event_is_logged_as_one_line_of_its_logger_and_level(caplog):
    caplog.set_level(logging.DEBUG)
    for event in EVENTS:
        log_event(event)
    ours = [
        record for record in caplog.records if getattr(record, "event", None) in EVENTS
    ]  # others may log too
    assert [record.event for record in ours] == EVENTS
    lines = [
        f"{type(record.event).__name__} {record.name} {record.levelname} {record.getMessage()}"
        for record in ours
    ]
    assert lines == GOLDEN.read_text().splitlines()


def test_every_kind_of_event_has_its_line():
    kinds = {kind for kind in vars(events).values() if isinstance(kind, type)}
    assert {type(event) for event in EVENTS} == kinds
