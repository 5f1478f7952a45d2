"""One frame of `rpcwheel top`, from the JSON of a status."""

from dataclasses import asdict
from io import StringIO

import pytest
from rich.console import Console

from rpcwheel.cli.top_view import SECTIONS, _shared, frame, seconds
from rpcwheel.status.snapshot import snapshot

METHOD = {
    "side": "client",
    "method": "/shop.Orders/Get",
    "kind": "unary",
    "started": 100,
    "in_flight": 2,
    "p50_s": 0.0025,
    "p99_s": 10.0,
    "codes": [{"code": "OK", "count": 98, "mean_s": 0.003}],
}


def status(**tables):
    """A status with nothing but these tables."""
    empty = {name: [] for name, value in asdict(snapshot()).items() if isinstance(value, tuple)}
    return {"pid": 7, "version": "1", "now": 100.0, "started": 40.0} | empty | tables


def text_of(*args, width=200, **options) -> str:
    console = Console(file=StringIO(), width=width)
    console.print(frame("127.0.0.1:9090", *args, **options))
    return console.file.getvalue()


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, ""),
        (0.0, "0"),
        (0.0000123, "12.3 µs"),
        (0.00123, "1.23 ms"),
        (1.0, "1 s"),
        (99.94, "99.9 s"),
        (180.0, "3 min"),
        (7200.0, "2 h"),
        (200_000.0, "2.3 d"),
    ],
)
def test_a_time_has_three_digits(value, shown):
    assert seconds(value) == shown


def test_an_empty_status_names_what_there_is_none_of():
    lines = text_of(status()).splitlines()
    assert lines[0].strip() == "rpcwheel 1 at 127.0.0.1:9090, process 7, up for 60 s"
    assert "no calls, no timers, no failback queues" in lines[1]


def test_calls_have_a_rate_after_the_second_status():
    before = status(methods=[METHOD])
    after = status(methods=[METHOD | {"started": 130}], now=102.0)
    row = text_of(after, before).splitlines()[3]
    assert row.split()[:7] == ["client", "/shop.Orders/Get", "15.0", "130", "2", "2.5", "ms"]
    assert "≥ 10 s" in row
    assert "OK 98" in row


def test_a_restarted_process_has_no_rate():
    before = status(methods=[METHOD])
    after = status(methods=[METHOD], now=102.0, pid=8)
    assert text_of(after, before).splitlines()[3].split()[2] == "100"


def test_rows_with_a_problem_come_first_and_their_number_is_limited():
    rows = [
        {"target": f"shop-{number}", "state": "READY", "calls": 0, "subchannels": [], "problem": ""}
        for number in range(50)
    ]
    rows[40]["problem"] = "its servers cannot be reached"
    lines = text_of(status(channels=rows), height=20).splitlines()
    assert lines[2].startswith("Channels (50) ")
    assert lines[3].split()[0] == "shop-40"
    assert "its servers cannot be reached" in lines[3]
    assert len(lines) <= 20


@pytest.mark.parametrize(
    ("lines", "wanted", "shared"),
    [
        (0, [3, 0, 1], [1, 0, 1]),
        (5, [3, 1, 9], [2, 1, 2]),
        (100, [3, 1, 9], [3, 1, 9]),
        (5, [], []),
    ],
)
def test_tables_share_the_lines_of_a_screen(lines, wanted, shared):
    assert _shared(lines, wanted) == shared


def test_on_a_narrow_screen_long_texts_are_cut_first():
    call = {"function": "/shop.Audit/Push", "age_s": 1.0, "attempts": 1, "next_attempt_s": 29.0}
    queue = {"name": "audit", "entries": [call | {"error": "UNAVAILABLE: " + "x" * 100}]}
    (row,) = [
        line for line in text_of(status(queues=[queue]), width=80).splitlines() if "/s" in line
    ]
    assert row.split()[:7] == ["audit", "/shop.Audit/Push", "1", "s", "1", "29", "s"]
    assert row.rstrip().endswith("…")
    assert len(row) <= 80


def test_a_failure_is_shown_with_the_time_of_the_figures():
    assert "Connection refused (the figures are of " in text_of(
        status(), None, "Connection refused"
    )


def test_errors_of_components_are_shown():
    assert "not shown: timer: RuntimeError" in text_of(status(errors=["timer: RuntimeError"]))


def test_the_status_of_another_version_is_shown_as_far_as_possible():
    other = status(timers=[{"name": "a-timer", "stats": {}}, 3], channels=7)
    del other["queues"]
    lines = text_of(other).splitlines()
    assert any(line.split()[:3] == ["a-timer", "?", "?"] for line in lines)


def test_every_column_has_a_value_for_a_real_status():
    assert "?" not in text_of(asdict(snapshot()))
    assert len({section.title for section in SECTIONS}) == len(SECTIONS)
