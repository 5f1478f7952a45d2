"""One frame of `rpcwheel top`, from the JSON of a status."""

from dataclasses import asdict
from io import StringIO

import pytest
from rich.console import Console

from rpcwheel.cli.top_view import _shared, frame, seconds
from rpcwheel.status.sections import SECTIONS
from rpcwheel.status.snapshot import snapshot

METHOD = {
    "side": "client",
    "method": "/shop.Orders/Get",
    "kind": "unary",
    "started": 100,
    "in_flight": 2,
    "p50_s": 0.0025,
    "p99_s": 10.0,
    "failed": 0,
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
        (0.25, "250 ms"),
        (0.9996, "1,000 ms"),
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
    assert lines[1].strip() == "no problems"
    assert "no calls yet, no timers, no failback queues" in lines[2]


def test_calls_have_a_rate_after_the_second_status_of_the_same_process():
    before = status(methods=[METHOD])
    after = status(methods=[METHOD | {"started": 130}], now=102.0)
    row = text_of(after, [before]).splitlines()[4]
    assert row.split()[:7] == ["client", "/shop.Orders/Get", "15.0", "130", "2", "2.5", "ms"]
    assert "≥ 10 s" in row
    assert "OK 98" in row
    assert text_of(after | {"pid": 8}, [before]).splitlines()[4].split()[2] == "130"


def counted(now, ok, failed):
    """A status after so many calls of one method."""
    codes = [{"code": "OK", "count": ok}, {"code": "UNAVAILABLE", "count": failed}]
    return status(methods=[METHOD | {"failed": failed, "codes": codes}], now=now)


@pytest.mark.parametrize(
    ("history", "latest", "problem"),
    [
        ([], counted(0.0, 95, 5), ""),
        ([], counted(0.0, 94, 6), "6 of 100 failed"),
        ([counted(0.0, 1000, 0), counted(50.0, 1000, 0)], counted(60.0, 1009, 1), "1 of 10 failed"),
        ([counted(0.0, 0, 1000)], counted(60.0, 10, 1000), ""),
        ([counted(0.0, 0, 1000)], counted(2.0, 0, 1000), "1,000 of 1,000 failed"),  # none since
        ([counted(0.0, 0, 0), counted(50.0, 0, 9)], counted(61.0, 99, 9), ""),  # a minute later
    ],
)
def test_a_method_of_which_many_calls_failed_within_a_minute_has_a_problem(
    history, latest, problem
):
    text = text_of(latest, history)
    assert ("1 problem: Calls 1" if problem else "no problems") in text
    assert problem in text


def test_a_journal_that_fails_or_was_not_counted_has_a_row():
    depth = {"queue": "audit", "target": "a:1", "waiting": 2, "taken": 0, "dead": 0}
    depth |= {"oldest_s": 1.0, "problem": "2 calls wait"}
    journals = [
        {"url": "sqlite:///counted.db", "depths": [depth], "problem": ""},
        {"url": "sqlite:///failing.db", "depths": [depth], "problem": "it stores nothing"},
        {"url": "sqlite:///new.db", "depths": [], "problem": ""},
    ]
    lines = text_of(status(journals=journals)).splitlines()
    assert lines[1].strip() == "2 problems: Journals 2"
    counted, failing, new = (" ".join(line.split()) for line in lines[4:7])
    assert counted == "sqlite:///counted.db 2 calls wait audit a:1 2 0 0 1 s"
    assert failing == "sqlite:///failing.db it stores nothing audit a:1 2 0 0 1 s"
    assert new == "sqlite:///new.db"


def test_rows_with_a_problem_come_first_and_their_number_is_limited():
    rows = [
        {"target": f"shop-{number}", "state": "READY", "calls": 0, "subchannels": [], "problem": ""}
        for number in range(50)
    ]
    rows[40]["problem"] = "its servers cannot be reached"
    lines = text_of(status(channels=rows), height=20).splitlines()
    assert lines[3].startswith("Channels 14/50 ")
    assert lines[4].split()[0] == "shop-40"
    assert "its servers cannot be reached" in lines[4]
    assert len(lines) == 20
    assert lines[-1].startswith("36 rows are hidden; ")


@pytest.mark.parametrize("height", [1, 3, 5, 6, 7, 12, 20, 39])
def test_a_frame_fits_the_terminal_and_shows_tables_with_a_problem_first(height):
    names = "timers", "queues", "channels", "heartbeats", "connections", "publishers"
    rows = {name: [{"target": f"{name}-{index}"} for index in range(3)] for name in names}
    rows["heartbeats"][1]["problem"] = "dead"
    lines = text_of(status(**rows), height=height, width=80).splitlines()
    assert len(lines) <= max(height, 4)  # the head, the problems, what there is none of, a hint
    shown = sum(line.count("?") > 0 for line in lines)
    assert lines[-1].startswith(f"{18 - shown} row" if shown < 18 else "q: quit")
    assert any(line.startswith("heartbeats-1 ") for line in lines) is (height >= 6)


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
    other = status(timers=[{"name": "a-timer", "stats": {}}, 3], channels=7, errors=None)
    del other["queues"]
    lines = text_of(other).splitlines()
    assert any(line.split()[:3] == ["a-timer", "?", "?"] for line in lines)


def test_every_column_has_a_value_for_a_real_status():
    assert "?" not in text_of(asdict(snapshot()))


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.title)
def test_a_table_has_the_columns_of_its_section_but_those_of_the_page(section):
    outer, _, inner = section.path.partition(".")
    row = METHOD if section.path == "methods" else {inner: [{}], "problem": ""}
    heading = text_of(status(**{outer: [row]})).split(section.title)[1].splitlines()[0]
    shown = [column.heading for column in section.columns[1:] if not column.page_only]
    assert heading.split() == " ".join(shown).split()
