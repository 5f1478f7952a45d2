"""The line of each kind of event."""

import logging

import pytest

from rpcwheel.observe import events, log_event, logs

BOOM = ValueError("no\nsuch   shop")
REGISTRY = "etcd://10.0.0.1:2379"


@pytest.fixture(autouse=True)
def nothing_said_before(monkeypatch):
    monkeypatch.setattr(logs, "_SAID", {})


READS = [
    (
        events.TaskSlow("wheel", "push", 0.25),
        "rpcwheel.timer",
        logging.WARNING,
        (
            "wheel: task push held the timer's thread for 0.250 s; "
            "what may block belongs on an executor"
        ),
    ),
    (
        events.TaskFailed("wheel", "push", BOOM),
        "rpcwheel.timer",
        logging.ERROR,
        "wheel: task push raised ValueError: no such shop",
    ),
    (
        events.HandOffRefused("wheel", "push", BOOM),
        "rpcwheel.timer",
        logging.WARNING,
        "wheel: task push was not taken: ValueError: no such shop",
    ),
    (
        events.TimersTooMany(65, 64),
        "rpcwheel.timer",
        logging.WARNING,
        (
            "65 timers are live, more than 64; use one for all (rpcwheel.timer.shared_timer), "
            "and stop those that are done with"
        ),
    ),
    (
        events.CallParked("audit", "shop.push", BOOM, delay_s=5.0, pending=1),
        "rpcwheel.failback",
        logging.WARNING,
        "audit: shop.push failed, next try in 5 s, 1 pending: ValueError: no such shop",
    ),
    (
        events.CallRetried("audit", "shop.push", 2, 5.25, BOOM, delay_s=0.5),
        "rpcwheel.failback",
        logging.INFO,
        "audit: shop.push failed 2 times in 5.25 s, next try in 0.5 s: ValueError: no such shop",
    ),
    (
        events.CallDelivered("audit", "shop.push", 3, 10.5),
        "rpcwheel.failback",
        logging.INFO,
        "audit: shop.push delivered at try 3, after 10.5 s",
    ),
    (
        events.CallAbandoned("audit", "shop.push", 4, 15.0, BOOM, "no retries left"),
        "rpcwheel.failback",
        logging.ERROR,
        (
            "audit: shop.push abandoned after 4 tries in 15 s, no retries left: "
            "ValueError: no such shop"
        ),
    ),
    (
        events.CallDropped("audit", "shop.push", BOOM, pending=100),
        "rpcwheel.failback",
        logging.ERROR,
        "audit: shop.push dropped, the queue is full, 100 pending: ValueError: no such shop",
    ),
    (
        events.CallsUndelivered("audit", ("shop.push", "shop.pull"), 3, 9.0, "closed"),
        "rpcwheel.failback",
        logging.ERROR,
        "audit: 3 call(s) not delivered, closed; the oldest waited 9 s: shop.push, shop.pull",
    ),
    (
        events.DeadLetterFailed("audit", "shop.push", BOOM),
        "rpcwheel.failback",
        logging.ERROR,
        "audit: shop.push: the dead_letter hook raised: ValueError: no such shop",
    ),
    (
        events.CallSlow("/shop.Orders/Get", "client", 1.5),
        "rpcwheel.call",
        logging.WARNING,
        "/shop.Orders/Get (client) still runs after 1.5 s",
    ),
    (
        events.CallRetrying("/shop.Orders/Get", 1, "UNAVAILABLE", 0.25),
        "rpcwheel.call",
        logging.INFO,
        "/shop.Orders/Get failed with UNAVAILABLE at try 1, next try in 0.25 s",
    ),
    (
        events.CallNotRetried("/shop.Orders/Get", 2, "UNAVAILABLE", "no attempts left"),
        "rpcwheel.call",
        logging.INFO,
        ("/shop.Orders/Get failed with UNAVAILABLE at try 2, no other follows: no attempts left"),
    ),
    (
        events.CallExcused("/shop.Orders/Get", BOOM),
        "rpcwheel.call",
        logging.WARNING,
        "/shop.Orders/Get failed, answered with its default: ValueError: no such shop",
    ),
    (
        events.StreamSilent("/shop.Orders/Watch", 30.0),
        "rpcwheel.call",
        logging.WARNING,
        "/shop.Orders/Watch cancelled, no message for 30 s",
    ),
    (
        events.CallLate("/shop.Orders/Get", 0.5),
        "rpcwheel.call",
        logging.WARNING,
        "/shop.Orders/Get refused, its deadline passed 0.5 s before its turn came",
    ),
    (
        events.HookFailed("/shop.Orders/Get", "done callback", BOOM),
        "rpcwheel.call",
        logging.ERROR,
        "/shop.Orders/Get: a done callback raised ValueError: no such shop",
    ),
    (
        events.ListenerFailed("shop:1", "page_me", BOOM),
        "rpcwheel.connection",
        logging.ERROR,
        "shop:1: listener page_me raised ValueError: no such shop",
    ),
    (
        events.HeartbeatMissed("shop:1", misses=2, silent_s=140.0, answer="DEADLINE_EXCEEDED"),
        "rpcwheel.connection",
        logging.INFO,
        ("shop:1: heartbeat missed, 2 in a row, nothing read for 140 s (DEADLINE_EXCEEDED)"),
    ),
    (
        events.ConnectionDead("shop:1", silent_s=180.0, misses=3, calls=1),
        "rpcwheel.connection",
        logging.WARNING,
        (
            "shop:1: connection dead, nothing read for 180 s, 3 heartbeat(s) missed, "
            "1 call(s) in flight"
        ),
    ),
    (
        events.ConnectionReplaced("shop:1", 2, "no answer to heartbeats for 180 s", calls=1),
        "rpcwheel.connection",
        logging.INFO,
        (
            "shop:1: connection 2 in the place of the last, no answer to heartbeats for 180 s, "
            "which had 1 call(s) in flight"
        ),
    ),
    (
        events.ConnectionAlive("shop:1", after_s=181.0, rtt_s=0.001),
        "rpcwheel.connection",
        logging.INFO,
        "shop:1: connection alive after 181 s of silence",
    ),
    (
        events.ConnectionIdle("ipv4:10.0.0.1:5", "neither read nor written", 180.0, 0, 1),
        "rpcwheel.connection",
        logging.INFO,
        (
            "ipv4:10.0.0.1:5: unused for 180 s, neither read nor written, "
            "0 call(s) and 1 stream(s) open"
        ),
    ),
    (
        events.ConnectionClosed("ipv4:10.0.0.1:5", "neither read nor written", 180.0, "shutdown"),
        "rpcwheel.connection",
        logging.INFO,
        ("ipv4:10.0.0.1:5: connection closed (shutdown) after 180 s, neither read nor written"),
    ),
    (
        events.ConnectionKept("ipv4:10.0.0.1:5", "it is in use again"),
        "rpcwheel.connection",
        logging.INFO,
        "ipv4:10.0.0.1:5: connection not closed, it is in use again",
    ),
    (
        events.IdleLimited("Unix sockets do not tell their peers"),
        "rpcwheel.connection",
        logging.WARNING,
        "idle connections: Unix sockets do not tell their peers",
    ),
    (
        events.AnswerLate("orders", "7", "timed out", 0.25),
        "rpcwheel.call",
        logging.WARNING,
        "orders: the answer to 7 came 0.25 s after the call had timed out",
    ),
    (
        events.AnswerUnknown("orders", "7"),
        "rpcwheel.call",
        logging.WARNING,
        "orders: an answer came to 7, which no call waits for",
    ),
    (
        events.InstancePublished(REGISTRY, "shop.Orders", "10.0.0.7:1", "lease", away_s=16.5),
        "rpcwheel.registry",
        logging.INFO,
        (
            "etcd://10.0.0.1:2379: shop.Orders at 10.0.0.7:1 is published again (lease), "
            "away for up to 16.5 s"
        ),
    ),
    (
        events.InstanceWithdrawn(REGISTRY, "shop.Orders", "10.0.0.7:1"),
        "rpcwheel.registry",
        logging.INFO,
        "etcd://10.0.0.1:2379: shop.Orders at 10.0.0.7:1 is withdrawn",
    ),
    (
        events.RegistryFailed(REGISTRY, "renew", BOOM, delay_s=0.25, items=3),
        "rpcwheel.registry",
        logging.WARNING,
        (
            "etcd://10.0.0.1:2379: renew failed, 3 item(s), next try in 0.25 s: "
            "ValueError: no such shop"
        ),
    ),
    (
        events.RegistryRecovered(REGISTRY, after_s=12.5),
        "rpcwheel.registry",
        logging.INFO,
        "etcd://10.0.0.1:2379: the registry answers again, after 12.5 s",
    ),
    (
        events.InstancesChanged(REGISTRY, "shop.Orders", 3, added=1, removed=2, source="live"),
        "rpcwheel.registry",
        logging.INFO,
        ("etcd://10.0.0.1:2379: shop.Orders has 3 instance(s) (live), 1 more and 2 gone"),
    ),
    (
        events.InstancesHeld(REGISTRY, "shop.Orders", 2, "the connection was lost"),
        "rpcwheel.registry",
        logging.WARNING,
        (
            "etcd://10.0.0.1:2379: shop.Orders keeps 2 instance(s) that the registry has lost, "
            "the connection was lost"
        ),
    ),
    (
        events.RecordSkipped(REGISTRY, "shop.Orders", "lock", BOOM),
        "rpcwheel.registry",
        logging.WARNING,
        ("etcd://10.0.0.1:2379: shop.Orders: the record lock is skipped: ValueError: no such shop"),
    ),
    (
        events.SnapshotFailed(REGISTRY, "orders.json", BOOM),
        "rpcwheel.registry",
        logging.WARNING,
        (
            "etcd://10.0.0.1:2379: the file orders.json can't be used, which harms only a start "
            "while the registry is down: ValueError: no such shop"
        ),
    ),
    (
        events.MemberDown("shop.Orders", "10.0.0.7:1", "its connection was refused"),
        "rpcwheel.connection",
        logging.WARNING,
        (
            "shop.Orders: 10.0.0.7:1 is down, and not called until it answers a probe: "
            "its connection was refused"
        ),
    ),
    (
        events.MemberUp("shop.Orders", "10.0.0.7:1", after_s=1.5),
        "rpcwheel.connection",
        logging.INFO,
        "shop.Orders: 10.0.0.7:1 is up again, after 1.5 s",
    ),
    (
        events.ServingEnds("shop.Orders", "withdraw", "SIGTERM"),
        "rpcwheel.registry",
        logging.INFO,
        "shop.Orders ends, withdraw: SIGTERM",
    ),
]


@pytest.mark.parametrize(
    ("event", "logger", "level", "text"), READS, ids=lambda value: type(value).__name__
)
def test_an_event_reads_as_one_line_of_its_logger_and_level(event, logger, level, text, caplog):
    caplog.set_level(logging.DEBUG)
    log_event(event)
    (record,) = caplog.records
    assert (record.name, record.levelno, record.getMessage()) == (logger, level, text)
    assert record.event is event


def test_every_kind_of_event_has_its_line():
    kinds = {kind for kind in vars(events).values() if isinstance(kind, type)}
    assert {type(event) for event, *_ in READS} == kinds
