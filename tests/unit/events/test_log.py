"""The log: one line for each event, in log_lines.golden.txt, and how often each is written."""

import dataclasses
import json
import logging
import math
import pickle
import re
import traceback
from pathlib import Path

import grpc
import pytest
import structlog
from pythonjsonlogger.json import JsonFormatter

from fixtures.programs import run_program
from rpcwheel.errors import FailbackFull, InstanceIdConflict
from rpcwheel.events import Suppressed, events, log, log_event

GOLDEN = Path(__file__).parent / "log_lines.golden.txt"
"""Of each event its class, logger, level and text, and rate limits other than the general one."""

BOOM = ValueError("no\nsuch   shop")


def raised(error):
    """The error, with a traceback."""
    try:
        raise error
    except type(error) as caught:
        return caught


class Failed(grpc.RpcError):
    """As the errors of grpc's own calls, which have a text of many lines."""

    def code(self):
        return grpc.StatusCode.UNAVAILABLE

    def details(self):
        return "the shop is closed"

    def __str__(self):
        return "<Failed of RPC that terminated with:\n\tstatus = ...\n>"


class Full(FailbackFull, Failed):
    """An error of rpcwheel with a status."""

    __str__ = FailbackFull.__str__


class Mute(Exception):
    """An error without a text."""

    def __str__(self):
        raise ZeroDivisionError


def of_aio(details):
    return grpc.aio.AioRpcError(
        grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata(), details, "debug"
    )


FAILURES = [Failed(), of_aio("the shop is closed")]
HOSTILE = "a\r\n2026-01-01 ERROR forged\x1b[31m\x00\x7f\x85\u202e\u2028\ud800z"
REGISTRY = "etcd://10.0.0.1:2379"
JOURNAL = "sqlite:///var/lib/shop/failback.db"


EVENTS = [
    events.TaskSlow("wheel", "push", 0.25),
    events.TaskFailed("wheel", "push", BOOM),
    events.ExecutorRejected("wheel", "push", BOOM),
    events.TooManyTimers(65, 64),
    events.FailbackQueued("audit", "shop.push", BOOM, delay_s=5.0, pending=1),
    events.FailbackAttemptFailed("audit", "shop.push", 2, 5.25, BOOM, delay_s=0.5),
    events.FailbackDelivered("audit", "shop.push", 3, 10.5),
    events.FailbackGaveUp("audit", "shop.push", 4, 86_500.0, BOOM, "no attempts left"),
    events.FailbackDropped("audit", "shop.push", BOOM, pending=100),
    events.FailbackRejected("audit", "shop.push", BOOM, "the queue is full"),
    events.FailbackLost("audit", ("shop.push", "shop.pull"), 3, 9.0, "closed"),
    events.FailbackLeaseLost("audit", JOURNAL, 3),
    events.JournalFailed(JOURNAL, BOOM, results=2),
    events.JournalRecovered(JOURNAL, after_s=12.5),
    events.DeadLetterFailed("audit", "shop.push", BOOM),
    events.CallSlow("/shop.Orders/Get", "client", 1.5),
    events.RetryScheduled("/shop.Orders/Get", 1, "UNAVAILABLE", 0.25),
    events.HedgeSent("/shop.Orders/Get", 2),
    events.RetryStopped("/shop.Orders/Get", 2, "UNAVAILABLE", "no attempts left"),
    events.DefaultResponseUsed("/shop.Orders/Get", BOOM),
    events.StreamStalled("/shop.Orders/Watch", 30.0),
    events.DeadlineExceededBeforeStart("/shop.Orders/Get", 0.5),
    events.OverloadBegan("server", 4, 1),
    events.OverloadEnded("server", 120, 2.5),
    events.LimitIneffective("server"),
    events.BreakerOpened("shop:1", "/shop.Orders/Get", "12 of 20 calls failed: UNAVAILABLE", 1.0),
    events.BreakerClosed("shop:1", "/shop.Orders/Get", 2.5),
    events.ThrottleBegan("shop:1", "/shop.Orders/Get"),
    events.ThrottleEnded("shop:1", "/shop.Orders/Get", 120, 2.5),
    events.CriticalityUnknown("/shop.Orders/Get", "urgent", "it names no criticality"),
    events.CallbackFailed("/shop.Orders/Get", "done callback", BOOM),
    events.CallbackFailed("shop:1", "page_me", BOOM),
    events.HeartbeatMissed("shop:1", misses=2, silent_s=140.0, answer="DEADLINE_EXCEEDED"),
    events.ConnectionDead("shop:1", silent_s=180.0, misses=3, calls=1),
    events.ConnectionReplaced("shop:1", 2, "no answer to heartbeats for 180 s", calls=1),
    events.ConnectionAlive("shop:1", after_s=181.0, rtt_s=0.001),
    events.ConnectionIdle("ipv4:10.0.0.1:5", "neither read nor written", 180.0, 0, 1),
    events.ConnectionClosed("ipv4:10.0.0.1:5", "connection idle for 180 s", 181.0),
    events.IdleCloseSkipped("ipv4:10.0.0.1:5", "it is in use again"),
    events.IdleDetectionLimited("Unix sockets do not tell their peers"),
    events.LateResponse("orders", "7", "timed out", 0.25),
    events.UnmatchedResponse("orders", "7"),
    events.InstancePublished(REGISTRY, "shop.Orders", "10.0.0.7:1", "lease", away_s=16.5),
    events.InstanceWithdrawn(REGISTRY, "shop.Orders", "10.0.0.7:1"),
    events.RegistryFailed(REGISTRY, "renew", BOOM, delay_s=0.25, items=3),
    events.RegistryRecovered(REGISTRY, after_s=12.5),
    events.InstancesChanged(REGISTRY, "shop.Orders", 3, added=1, removed=2, source="live"),
    events.InstancesRetained(REGISTRY, "shop.Orders", 2, "the connection was lost"),
    events.RecordSkipped(REGISTRY, "shop.Orders", "lock", BOOM),
    events.SnapshotFailed(REGISTRY, "orders.json", BOOM),
    events.SubchannelUnhealthy("shop.Orders", "10.0.0.7:1", "5 calls failed: UNAVAILABLE"),
    events.SubchannelHealthy("shop.Orders", "10.0.0.7:1", after_s=1.5),
    events.StaleInstancesKept("shop.Orders", ("10.0.0.7:1", "10.0.0.8:1")),
    events.ShutdownStep("shop.Orders", "withdraw", "SIGTERM"),
    events.WithdrawalFailed("shop.Orders", REGISTRY, BOOM),
]

CONFLICT = InstanceIdConflict("shop.Orders/a: another process")
VARIANTS = [
    events.InstancePublished(REGISTRY, "shop.Orders", "10.0.0.7:1"),
    events.InstancePublished(REGISTRY, "shop.Orders", "10.0.0.7:1", status="DRAINING"),
    events.InstancePublished(REGISTRY, "shop.Orders", "10.0.0.7:1", "wiped", away_s=2.0),
    events.RegistryFailed("etcd://1", "publish", BOOM, delay_s=0.25),
    events.RegistryFailed("etcd://2", "lookup", BOOM, delay_s=None),
    events.RegistryFailed("etcd://3", "watch", BOOM, delay_s=0.0),
    events.RegistryFailed("etcd://4", "close", BOOM, delay_s=None),
    events.RegistryFailed("etcd://5", "renew", CONFLICT, delay_s=3.0),
    *(events.FailbackGaveUp("audit", "push", 4, 1.0, e, "no attempts left") for e in FAILURES),
    events.FailbackGaveUp("audit", "push", 4, 1.0, BOOM, "its channel was closed"),
    events.FailbackQueued("audit", "push", BOOM, delay_s=math.inf, pending=1),
    events.FailbackDropped("shop.push", "shop.push", BOOM, pending=100),
    events.BreakerOpened("function", "shop.price", "by hand", math.inf),
    events.DefaultResponseUsed("/shop.Orders/Get", Full("100 calls are queued")),
    events.DefaultResponseUsed("/shop.Orders/List", of_aio(HOSTILE)),
    events.DefaultResponseUsed("/shop.Orders/Watch", ValueError(HOSTILE)),
    events.WithdrawalFailed("shop.Orders", REGISTRY, None),
    events.ExecutorRejected("wheel", "push", Mute()),
    events.ExecutorRejected("wheel", "push", TimeoutError()),
]
"""Events whose text depends on the values of their fields."""


def test_each_event_is_logged_as_in_the_golden_file(caplog):
    caplog.set_level(logging.DEBUG)
    for event in [*EVENTS, *VARIANTS]:
        log_event(event)
    lines = [
        f"{record.rpcwheel_event} {record.name} {record.levelname} {record.getMessage()}"
        for record in caplog.records
    ]
    for event in EVENTS:
        line, name = event.log_line, type(event).__name__
        if line.interval_s:
            lines.append(f"{name}: once in {line.interval_s} s")
        if line.always_after:
            lines.append(f"{name}: always after {line.always_after.__name__}")
    assert lines == GOLDEN.read_text().splitlines()


def test_every_event_class_is_in_the_golden_file():
    kinds = {kind for kind in vars(events).values() if dataclasses.is_dataclass(kind)}
    assert {type(event) for event in EVENTS} == kinds


def test_events_of_one_class_have_the_same_record_msg(caplog):
    caplog.set_level(logging.DEBUG)
    log_event(events.FailbackDelivered("audit", "push", 2, 1.0))
    log_event(events.FailbackDelivered("bills", "pull", 3, 2.0))
    one, other = caplog.records
    assert one.msg == other.msg


def test_an_error_without_a_status_is_logged_with_its_traceback_if_the_call_is_lost(caplog):
    error = raised(ValueError("no\nsuch   shop"))
    log_event(events.FailbackQueued("audit", "push", error, 5.0, 1))
    log_event(events.FailbackGaveUp("audit", "push", 4, 1.0, error, "no attempts left"))
    queued, given_up = caplog.records
    assert not queued.exc_text
    assert given_up.exc_text.startswith("  Traceback (most recent call last):\n")
    assert given_up.exc_text.endswith("\n  such   shop")


def with_text(event, text):
    """The event with `text` in each field with a text or an error."""
    replaced = {}
    for name, value in fields_of(event).items():
        if isinstance(value, str):
            replaced[name] = text
        elif isinstance(value, tuple):
            replaced[name] = (text,)
        elif isinstance(value, BaseException):
            replaced[name] = ValueError(text)
    return dataclasses.replace(event, **replaced)


def test_the_lines_of_a_traceback_are_escaped_indented_and_cut(caplog):
    log_event(events.TaskFailed("wheel", "push", raised(ValueError(HOSTILE))))
    text = logging.Formatter("%(message)s").format(caplog.records[0])
    first, *others = text.split("\n")
    assert first.startswith("wheel: task push raised ValueError: ")
    assert any("2026-01-01 ERROR forged" in line for line in others)
    assert all(line.startswith("  ") and line.isprintable() for line in others)
    log_event(events.TaskFailed("wheel", "push", raised(ValueError("y" * 10**6))))
    text = logging.Formatter("%(message)s").format(caplog.records[1])
    assert len(text) < 1000
    assert text.endswith("yyy...")


def test_a_long_traceback_has_its_first_and_last_lines(caplog):
    number = 10**4
    for line, most in (("y", 110), ("y" * 400, 60), ("\x00" * 100, 60)):
        error = ValueError("\n".join([line] * number) + "\nthe end")
        log_event(events.TaskFailed("wheel", "push", raised(error)))
        complete = "".join(traceback.format_exception(error)).split("\n")[:-1]
        text = caplog.records[-1].exc_text
        lines = text.split("\n")
        assert len(text) < 20_000
        assert len(lines) < most
        assert lines[0] == "  Traceback (most recent call last):"
        (cut,) = [line for line in lines if "lines are left out" in line]
        assert cut == f"  ... {len(complete) - (len(lines) - 1):,} lines are left out ..."
        assert lines[-1] == "  the end"


def test_a_traceback_of_up_to_100_lines_is_complete(caplog):
    for number in (1, 46, 47, 48, 60, 96):
        text = "\n".join(f"line {line}" for line in range(number))
        log_event(events.TaskFailed("wheel", f"push {number}", raised(ValueError(text))))
        lines = caplog.records[-1].exc_text.split("\n")
        assert lines[0] == "  Traceback (most recent call last):"
        assert lines[-number:] == [
            "  ValueError: line 0",
            *(f"  line {line}" for line in range(1, number)),
        ]


def test_a_line_has_at_most_600_characters(caplog):
    caplog.set_level(logging.DEBUG)
    for event in EVENTS:
        log_event(with_text(event, "x" * 10_000))
    assert len(caplog.messages) == len(EVENTS)
    assert [message for message in caplog.messages if len(message) > 600] == []


def test_a_line_with_a_count_has_at_most_600_characters(caplog, monkeypatch):
    caplog.set_level("INFO")
    monkeypatch.setattr(log.time, "monotonic", lambda: 0.0)
    for _ in range(12):
        log_event(events.InstanceWithdrawn("x" * 1_000, "y" * 1_000, "z" * 1_000))
    monkeypatch.setattr(log.time, "monotonic", lambda: 100.0)
    log_event(events.TooManyTimers(65, 64))
    assert "2 more InstanceWithdrawn not logged" in caplog.messages[-1]
    assert [message for message in caplog.messages if len(message) > 600] == []


# The attributes of a record


def fields_of(event):
    return {field.name: getattr(event, field.name) for field in dataclasses.fields(event)}


def attributes(record):
    """What the record has beyond the attributes of `logging`."""
    known = {*vars(logging.makeLogRecord({})), "message", "asctime"}
    return {name: value for name, value in vars(record).items() if name not in known}


def test_each_field_of_an_event_is_an_attribute_of_its_record(caplog):
    caplog.set_level(logging.DEBUG)
    for event in EVENTS:
        log_event(event)
        expected = {"event": type(event).__name__, "suppressed": 0} | fields_of(event)
        for name, value in list(expected.items()):
            if isinstance(value, tuple):
                expected[name] = ", ".join(value)
            elif name == "error":
                expected |= {"error": "ValueError: no such shop", "error_type": "ValueError"}
        assert attributes(caplog.records[-1]) == {f"rpcwheel_{k}": v for k, v in expected.items()}


def test_an_error_with_a_status_has_its_code_as_error_type_and_no_traceback(caplog):
    for error in FAILURES:
        log_event(events.FailbackGaveUp("audit", "push", 4, 1.0, error, "no attempts left"))
        (record,) = caplog.records
        assert record.rpcwheel_error == "UNAVAILABLE: the shop is closed"
        assert record.rpcwheel_error_type == "UNAVAILABLE"
        assert (record.exc_text, record.exc_info) == (None, None)
        caplog.clear()


def test_a_missing_error_and_an_infinite_time_are_none_as_attributes(caplog):
    log_event(events.WithdrawalFailed("shop.Orders", REGISTRY, None))
    log_event(events.FailbackQueued("audit", "push", BOOM, delay_s=math.inf, pending=1))
    withdrawn, queued = caplog.records
    assert (withdrawn.rpcwheel_error, queued.rpcwheel_delay_s) == (None, None)


def test_texts_of_attributes_are_cut_independently_of_each_other(caplog):
    log_event(events.ExecutorRejected("wheel" * 100, "x" * 1000, ValueError("y" * 1000)))
    (record,) = caplog.records
    assert record.rpcwheel_timer == "wheel" * 100
    assert record.rpcwheel_task == "x" * 500 + "..."
    assert record.rpcwheel_error == ("ValueError: " + "y" * 1000)[:240] + "..."


def test_the_record_factory_may_set_any_attribute(caplog, monkeypatch):
    made = logging.getLogRecordFactory()

    def factory(*args, **more):
        record = made(*args, **more)
        record.service = record.method = record.event = "orders"
        return record

    monkeypatch.setattr(logging, "_logRecordFactory", factory)
    log_event(EVENTS[0])
    assert caplog.records[0].service == "orders"


def test_a_record_can_be_pickled(caplog):
    log_event(events.DefaultResponseUsed("/shop.Orders/Get", FAILURES[0]))
    (record,) = caplog.records
    assert vars(pickle.loads(pickle.dumps(record))) == vars(record)


FORGED = HOSTILE + '", "level": "error" \\" level=error x="'


LOGFMT = structlog.stdlib.ProcessorFormatter(
    foreign_pre_chain=[structlog.stdlib.ExtraAdder()],
    processors=[
        structlog.stdlib.ProcessorFormatter.remove_processors_meta,
        structlog.processors.LogfmtRenderer(),
    ],
)


def test_texts_cannot_forge_fields_of_a_line_in_json_or_logfmt(caplog):
    """These formatters escape quotes and backslashes; others write texts as they are."""
    caplog.set_level(logging.DEBUG)
    for event in EVENTS:
        log_event(with_text(event, FORGED))
    assert len(caplog.records) == len(EVENTS)
    for record in caplog.records:
        fields = {"message": record.getMessage()} | attributes(record)
        assert [text for text in map(str, fields.values()) if not text.isprintable()] == []
        assert json.loads(JsonFormatter("%(message)s").format(record)) == fields
        line = LOGFMT.format(record)
        read = re.findall(r'(\w+)=("(?:\\.|[^"\\])*"|[^" ]*)(?: |$)', line)
        texts = {name: re.sub(r'^"|"$|\\(.)', r"\1", value) for name, value in read}
        expected = {"event": record.getMessage()} | fields
        assert texts == {name: str(value) for name, value in expected.items()}


PAGE = Path(__file__).parents[3].joinpath("docs", "events.md").read_text()
CONFIGURATIONS = re.findall(r"^```python\n(import logging.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("configuration", CONFIGURATIONS, ids=["python-json-logger", "structlog"])
def test_the_documented_configurations_write_json_lines_with_the_fields(configuration):
    code = """
from rpcwheel.events import RetryScheduled, TaskFailed, emit

emit(RetryScheduled("/shop.Orders/Get", 1, "UNAVAILABLE", 0.25))
try:
    raise ValueError("no such shop")
except ValueError as error:
    emit(TaskFailed("wheel", "push", error))
"""
    _, errors = run_program(configuration + code)
    scheduled, failed = (json.loads(line) for line in errors.splitlines())
    shown = json.loads(re.search(r"```json\n(.*?)```", PAGE, re.DOTALL)[1])
    assert shown["message"] in scheduled.values()
    assert {name: scheduled.get(name) for name in shown if name.startswith("rpcwheel_")} == {
        name: value for name, value in shown.items() if name.startswith("rpcwheel_")
    }
    assert (failed["rpcwheel_task"], failed["rpcwheel_error_type"]) == ("push", "ValueError")
    assert any("Traceback" in str(value) for value in failed.values())


def test_the_documented_attributes_exist(caplog):
    caplog.set_level(logging.DEBUG)
    for event in EVENTS:
        log_event(event)
    log._report(Suppressed(events.CallSlow, "/shop.Orders/Get", 290, 10.0))
    names = {name for record in caplog.records for name in attributes(record)}
    assert {*re.findall(r"`(rpcwheel_\w+)`", PAGE)} <= names


# The rate


def test_300_failing_calls_of_a_method_are_logged_as_10_lines_and_a_count(caplog, monkeypatch):
    now_s = 100.0
    monkeypatch.setattr(log.time, "monotonic", lambda: now_s)
    event = events.DefaultResponseUsed("/shop.Orders/Get", FAILURES[0])
    for _ in range(300):
        log_event(event)
    assert len(caplog.messages) == 10
    now_s += 10.0
    log_event(event)
    assert caplog.messages[10:] == [
        (
            "/shop.Orders/Get failed, the default response was returned: "
            "UNAVAILABLE: the shop is closed; 290 more suppressed since the last such line"
        )
    ]
    assert caplog.records[10].rpcwheel_suppressed == 290


def test_suppressed_lines_are_counted_in_a_line_at_the_next_event_after_the_period(
    caplog, monkeypatch
):
    now_s = 0.0
    monkeypatch.setattr(log.time, "monotonic", lambda: now_s)
    for _ in range(300):
        log_event(events.DefaultResponseUsed("/shop.Orders/Get", BOOM))
    caplog.clear()
    now_s = 30.0
    log_event(events.TooManyTimers(65, 64))
    (_, record) = caplog.records
    assert record.getMessage() == (
        "/shop.Orders/Get ValueError: 290 more DefaultResponseUsed not logged within 10 s"
    )
    assert (record.name, record.levelname) == ("rpcwheel.call", "WARNING")
    assert attributes(record) == {
        "rpcwheel_event": "Suppressed",
        "rpcwheel_kind": "DefaultResponseUsed",
        "rpcwheel_subject": "/shop.Orders/Get ValueError",
        "rpcwheel_number": 290,
        "rpcwheel_period_s": 10.0,
    }


def test_suppressed_lines_are_counted_in_a_line_at_exit_and_not_by_a_forked_child():
    code = """if True:
        import logging, os, sys, time
        time.monotonic = lambda: 0.0
        from rpcwheel.events import DefaultResponseUsed, log_event

        logging.basicConfig(format="%(name)s %(levelname)s %(message)s")
        for _ in range(50_000):
            log_event(DefaultResponseUsed("/shop.Orders/Get", ValueError("no")))
        if (child := os.fork()) == 0:
            logging.basicConfig(stream=sys.stdout, force=True)
            sys.exit()
        os.waitpid(child, 0)
    """
    output, errors = run_program(code)
    *lines, last = errors.splitlines()
    assert (len(lines), output) == (10, "")
    assert last == (
        "rpcwheel.call WARNING /shop.Orders/Get ValueError: 49990 more DefaultResponseUsed "
        "not logged within 10 s"
    )


def test_an_event_of_a_disabled_level_is_not_formatted(caplog):
    caplog.set_level(logging.ERROR, logger="rpcwheel.failback")
    log_event(events.FailbackQueued("audit", "push", Mute(), 5.0, 1))
    assert not caplog.records


def test_an_event_without_a_log_line_is_logged_at_level_debug(caplog):
    caplog.set_level(logging.DEBUG)
    log_event("something new")
    (record,) = caplog.records
    assert (record.name, record.levelno) == ("rpcwheel", logging.DEBUG)
    assert record.getMessage() == "'something new'"
    assert attributes(record) == {"rpcwheel_event": "str"}


def test_an_instance_id_conflict_has_a_rate_limit_apart_from_other_registry_failures(
    caplog, monkeypatch
):
    monkeypatch.setattr(log.time, "monotonic", lambda: 0.0)
    conflict = events.RegistryFailed(REGISTRY, "renew", InstanceIdConflict("a"), delay_s=1.0)
    failed = events.RegistryFailed(REGISTRY, "renew", BOOM, delay_s=1.0)
    for event in (failed, conflict, failed, conflict):
        log_event(event)
    kinds = [record.rpcwheel_error_type for record in caplog.records]
    assert kinds == ["ValueError", "InstanceIdConflict"]
