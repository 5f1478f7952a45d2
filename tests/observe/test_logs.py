"""How each event reads in the log."""

import logging

import pytest

from rpcwheel.observe import events, log_event, logs

BOOM = ValueError("no\nsuch   shop")


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
            "ipv4:10.0.0.1:5: connection idle for 180 s, neither read nor written, "
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


def test_two_events_of_a_kind_have_the_same_template(caplog):
    caplog.set_level(logging.DEBUG)
    log_event(events.CallDelivered("audit", "push", 2, 1.0))
    log_event(events.CallDelivered("bills", "pull", 3, 2.0))
    one, other = caplog.records
    assert one.msg == other.msg


def test_a_lost_call_is_logged_with_its_traceback_and_a_parked_one_without(caplog):
    log_event(events.CallParked("audit", "push", BOOM, 5.0, 1))
    log_event(events.CallAbandoned("audit", "push", 4, 1.0, BOOM, "no retries left"))
    parked, abandoned = caplog.records
    assert not parked.exc_info
    assert abandoned.exc_info[1] is BOOM


def test_a_failback_named_after_its_function_is_named_once(caplog):
    log_event(events.CallDropped("shop.push", "shop.push", BOOM, pending=100))
    assert caplog.messages[0].startswith("shop.push dropped, ")


def test_dropped_calls_are_logged_once_a_second_for_each_queue_with_their_number(
    caplog, monkeypatch
):
    seconds = iter([0.0, 0.1, 0.2, 0.9, 1.5, 2.6])
    monkeypatch.setattr(logs.time, "monotonic", lambda: next(seconds))
    for name in ("a", "a", "b", "a", "a", "a"):
        log_event(events.CallDropped(name, "push", BOOM, pending=100))
    said = "push dropped, the queue is full, 100 pending: ValueError: no such shop"
    more = "; 2 more since the last such line"
    assert caplog.messages == [f"a: {said}", f"b: {said}", f"a: {said}{more}", f"a: {said}"]


def test_a_long_error_is_cut(caplog):
    log_event(events.HandOffRefused("wheel", "push", ValueError("x" * 10_000)))
    assert len(caplog.records[0].getMessage()) < 300


def test_an_error_that_cannot_be_printed_is_still_reported(caplog):
    class Mute(Exception):
        def __str__(self):
            raise ZeroDivisionError

    log_event(events.HandOffRefused("wheel", "push", Mute()))
    assert caplog.messages == ["wheel: task push was not taken: Mute: (its text cannot be had)"]


def test_an_error_without_a_text_is_named_by_its_class(caplog):
    log_event(events.HandOffRefused("wheel", "push", TimeoutError()))
    assert caplog.messages == ["wheel: task push was not taken: TimeoutError"]


def test_a_level_that_is_switched_off_costs_no_formatting(caplog):
    class Loud(Exception):
        def __str__(self):
            raise AssertionError("formatted in vain")

    caplog.set_level(logging.ERROR, logger="rpcwheel.failback")
    log_event(events.CallParked("audit", "push", Loud(), 5.0, 1))
    assert not caplog.records


def test_an_event_of_an_unknown_kind_is_told_at_level_debug(caplog):
    caplog.set_level(logging.DEBUG)
    log_event("something new")
    (record,) = caplog.records
    assert (record.name, record.levelno) == ("rpcwheel", logging.DEBUG)
    assert record.getMessage() == "'something new'"


def test_what_is_said_of_a_target_is_said_once_a_minute_each_kind_of_event_by_itself(
    caplog, monkeypatch
):
    caplog.set_level("INFO")
    seconds = iter([0.0, 1.0, 59.0, 61.0])
    monkeypatch.setattr(logs.time, "monotonic", lambda: next(seconds))
    dead = events.ConnectionDead("shop:1", silent_s=180.0, misses=3, calls=0)
    for event in (dead, events.ConnectionReplaced("shop:1", 2, "it is dead", calls=0), dead, dead):
        log_event(event)
    assert [message.split(",")[0] for message in caplog.messages] == [
        "shop:1: connection dead",
        "shop:1: connection 2 in the place of the last",
        "shop:1: connection dead",
    ]
    assert caplog.messages[-1].endswith("; 1 more since the last such line")


def test_that_a_connection_lives_again_is_always_said_after_it_was_said_to_be_dead(
    caplog, monkeypatch
):
    caplog.set_level("INFO")
    seconds = iter([0.0, 5.0, 10.0, 12.0, 14.0, 70.0, 71.0])
    monkeypatch.setattr(logs.time, "monotonic", lambda: next(seconds))
    dead = events.ConnectionDead("shop:1", silent_s=3.0, misses=3, calls=0)
    alive = events.ConnectionAlive("shop:1", after_s=4.0, rtt_s=None)
    for event in (alive, dead, alive, dead, alive, dead, alive):
        log_event(event)
    said = [message.split()[2] for message in caplog.messages]
    assert said == ["alive", "dead,", "alive", "dead,", "alive"]


def test_what_was_said_of_names_long_gone_is_forgotten(monkeypatch):
    monkeypatch.setattr(logs, "MOST_SAID", 3)
    for port in range(10):
        log_event(events.ConnectionKept(f"ipv4:127.0.0.1:{port}", "it is busy"))
    assert len(logs._SAID) <= 3
