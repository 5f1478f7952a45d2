"""The page of the live view in a browser: headless Chromium."""

import json
import re
import shutil
import subprocess
import urllib.request
from dataclasses import asdict
from html.parser import HTMLParser

import pytest

from fixtures.hostile_process import HOSTILE, VISIBLE, escaped_for_page, hostile_components
from fixtures.waiting import START_S, WAIT_S
from rpcwheel.status import server as server_module
from rpcwheel.status.sections import SECTIONS
from rpcwheel.status.server import StatusServer
from rpcwheel.status.snapshot import snapshot
from rpcwheel.telemetry import components
from rpcwheel.telemetry.call_counts import CallCounts

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")

TOKEN = "correct-horse-battery"

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="Debian's package chromium is missing")


VOID = {"input", "link", "meta"}
"""Elements without an end."""


class Page(HTMLParser):
    """The tables of a page by their titles: rows by their headings; and other texts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tables: dict[str, list[dict[str, str]]] = {}
        self.notice = self.problems = self.title = ""
        self.elements: list[str] = []
        self._heading = ""
        self._columns: list[str] = []
        self._cells: list[str] = []
        self._open: list[tuple[str, str | None]] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.elements.append(tag)
        if tag not in VOID:
            self._open.append((tag, dict(attrs).get("id")))
        if tag == "tr":
            self._cells = []
        elif tag in {"td", "th"}:
            self._cells.append("")

    def handle_endtag(self, tag):
        if tag == "thead":
            self._columns = self._cells
        elif tag == "tr" and ("tbody", None) in self._open:
            row = dict(zip(self._columns, self._cells, strict=True))
            self.tables[self._heading].append(row)
        self._open.pop()

    def handle_data(self, data):
        match self._open[-1] if self._open else None:
            case ("h2", _):
                self._heading = data.strip()
                self.tables[self._heading] = []
            case ("td" | "th", _):
                self._cells[-1] += data
            case (_, "notice"):
                self.notice += data
            case (_, "problems"):
                self.problems += data
            case ("title", _):
                self.title += data


@pytest.fixture
def dump(tmp_path):
    """A function that loads a URL and returns the page as it is after a second."""

    def dump(url: str, *options: str) -> str:
        return subprocess.run(
            [
                CHROMIUM,
                "--headless",
                "--no-sandbox",  # for root
                "--disable-gpu",
                f"--user-data-dir={tmp_path}",
                "--virtual-time-budget=1000",
                *options,
                "--dump-dom",
                url,
            ],
            capture_output=True,
            text=True,
            check=True,
            timeout=START_S,
        ).stdout

    return dump


def test_the_page_shows_the_figures_of_the_status(monkeypatch, dump):
    with hostile_components(monkeypatch) as kit:
        address = f"http://{kit.status_address}"
        with urllib.request.urlopen(f"{address}/status.json", timeout=WAIT_S) as answer:
            answered = json.loads(answer.read())
        publisher = {"services": ["a", "b"], "port": 50051, "state": "serving", "problem": ""}
        changed = {"publishers": [publisher], "now": 1.0}  # the wall clock was set back
        body = json.dumps(answered | changed).encode()
        fixed = server_module.Answer(server_module.HTTPStatus.OK, body, "application/json")
        monkeypatch.setitem(server_module.PATHS, "/status.json", lambda _: fixed)
        page = Page(dump(f"{address}/"))
    status, tables = json.loads(body), page.tables

    def inner(outer: str, name: str) -> list[dict]:
        return [row for one in status[outer] for row in one[name]]

    def column(title: str, name: str) -> list[str]:
        return sorted(row[name] for row in tables[title])

    counts = {
        "Calls": len(status["methods"]),
        "Timers": len(status["timers"]),
        "Failback queues": 1,
        "Queued calls": 3,
        "Journals": 1,
        "Channels": len(status["channels"]),
        "Subchannels": len(inner("channels", "subchannels")),
        "Heartbeats": len(status["heartbeats"]),
        "Server connections": len(status["connections"]),
        "Server limits": len(status["limits"]),
        "Refused calls": len(inner("limits", "refused")),
        "Client limits": len(status["admissions"]),
        "Attempts not sent": len(inner("admissions", "not_sent")),
        "Registries": len(status["registries"]),
        "Registered instances": len(inner("registries", "registrations")),
        "Followed services": len(inner("registries", "subscriptions")),
        "Published servers": len(status["publishers"]),
    }
    assert {title: len(rows) for title, rows in tables.items()} == {
        title: count for title, count in counts.items() if count
    }
    (queue,) = tables["Failback queues"]
    assert (queue["pending"], queue["problem"]) == ("3 of 100", "3 calls wait")
    assert column("Queued calls", "attempts") == ["1", "1", "1"]
    (depth,) = tables["Journals"]
    assert depth["queue"] == depth["target"] == escaped_for_page(HOSTILE)
    assert (depth["waiting"], depth["taken"], depth["dead"]) == ("1", "0", "0")
    (call,) = (row for row in tables["Calls"] if row["method"] == escaped_for_page(HOSTILE))
    assert (call["started"], call["in flight"]) == ("1", "0")
    assert call["ended"].startswith("OK 1 (")
    limits = [row for row in tables["Server limits"] if row["server"] == escaped_for_page(HOSTILE)]
    assert (limits[0]["limit"], limits[0]["running"], limits[0]["waiting"]) == ("7", "0", "0")
    refused = {tuple(row.values())[-3:] for row in tables["Refused calls"]}
    assert ("sheddable", "waited", "3") in refused
    for title, rows, name in (
        ("Channels", status["channels"], "state"),
        ("Subchannels", inner("channels", "subchannels"), "address"),
        ("Heartbeats", status["heartbeats"], "target"),
        ("Server connections", status["connections"], "peer"),
        ("Registered instances", inner("registries", "registrations"), "state"),
    ):
        assert rows
        assert column(title, name) == sorted(row[name] for row in rows)
    assert set(column("Server connections", "since")) == {"0"}
    for name in ("pending", "fired"):
        assert column("Timers", name) == sorted(
            f"{row['stats'][name]:,}" for row in status["timers"]
        )
    for section in SECTIONS:
        headings = [name for name in tables[section.title][0] if name != "problem"]
        assert headings == [column.heading for column in section.columns]
    assert page.notice == ""


def test_texts_of_peers_are_text(monkeypatch, dump):
    with hostile_components(monkeypatch) as kit:
        text = dump(f"http://{kit.status_address}/")
    page = Page(text)
    cells = [cell for rows in page.tables.values() for row in rows for cell in row.values()]
    assert sum(escaped_for_page(HOSTILE) in cell for cell in cells) >= 6
    assert any(VISIBLE in cell for cell in cells)
    assert "img" not in page.elements
    assert page.elements.count("script") == 1
    assert "\u202e" not in text
    assert "\x1b" not in text


def test_components_that_do_not_exist_are_named(monkeypatch, dump):
    monkeypatch.setattr(components._COMPONENTS, "_by_kind", {})
    monkeypatch.setattr(components._COMPONENTS, "counts", CallCounts())
    with StatusServer(0) as server:
        text = dump(f"http://{server.address}/")
    assert "<p>no calls yet, no timers, no failback queues, " in text
    page = Page(text)
    assert (page.tables, page.problems, page.notice) == ({}, "no problems", "")


def test_problems_are_summed_up_and_marked(monkeypatch, dump):
    monkeypatch.setattr(components._COMPONENTS, "_by_kind", {})
    codes = [
        {"code": code, "count": count, "mean_s": 0.1}
        for code, count in (("OK", 90), ("UNAVAILABLE", 10))
    ]
    method = {"side": "client", "method": "/shop.Orders/Get", "kind": "unary", "started": 100}
    method |= {"in_flight": 0, "p50_s": 0.25, "p99_s": 0.9996, "failed": 10, "codes": codes}
    depth = {"queue": "audit", "target": "a:1", "waiting": 2, "taken": 0, "dead": 0}
    depth |= {"oldest_s": 1.0, "problem": "2 calls wait"}
    journal = {"up": True, "unstored_results": 0, "problem": ""}
    changed = asdict(snapshot()) | {
        "methods": [method],
        "journals": [
            journal | {"url": "sqlite:///new.db", "depths": []},
            journal | {"url": "sqlite:///counted.db", "depths": [depth]},
        ],
    }
    answer = server_module.Answer(server_module.HTTPStatus.OK, json.dumps(changed).encode())
    with StatusServer(0) as server:
        monkeypatch.setitem(server_module.PATHS, "/status.json", lambda _: answer)
        page = Page(dump(f"http://{server.address}/"))
    assert page.problems == "2 problems: Calls 1, Journals 1"
    assert page.title == "(2) rpcwheel"
    (call,) = page.tables["Calls"]
    assert call["problem"] == "10 of 100 failed"
    assert (call["p50"], call["p99"]) == ("250 ms", "1000 ms")
    assert call["ended"] == "OK 90 (100 ms), UNAVAILABLE 10 (100 ms)"
    counted, new = page.tables["Journals"]
    assert (counted["problem"], counted["waiting"]) == ("2 calls wait", "2")
    assert (new["journal"], new["problem"], new["waiting"]) == ("sqlite:///new.db", "", "")


@pytest.fixture
def changed_page(monkeypatch):
    """A function that puts statements before those of the page."""

    def change(script: str) -> None:
        page = server_module.page_and_policy()[0].replace(
            b"<script>", f"<script>{script}\n".encode()
        )
        headers = {"Content-Security-Policy": "default-src * data: 'unsafe-inline'"}
        answer = server_module.Answer(server_module.HTTPStatus.OK, page, "text/html", headers)
        monkeypatch.setitem(server_module.PATHS, "/", lambda _: answer)

    return change


def test_a_phone_shows_whole_rows(monkeypatch, dump, changed_page):
    changed_page("""setInterval(() => {
      const cells = [...document.querySelectorAll("td")].filter((cell) => cell.textContent);
      document.body.dataset.cells = cells.length;
      document.body.dataset.cut = cells.filter(
        (cell) => cell.getBoundingClientRect().right > innerWidth).length;
    }, 100);""")
    with hostile_components(monkeypatch) as kit:
        text = dump(f"http://{kit.status_address}/", "--window-size=375,800")
    assert re.search(r'data-cells="[1-9]\d+"', text)
    assert 'data-cut="0"' in text


def test_the_page_takes_the_token_from_the_fragment(dump):
    with StatusServer(0, token=TOKEN) as server:
        asked = Page(dump(f"http://{server.address}/"))
        assert (asked.notice, asked.tables) == ("A token is needed", {})
        refused = Page(dump(f"http://{server.address}/#token=wrong-horse-battery"))
        assert (refused.notice, refused.tables) == ("The token is wrong", {})
        shown = Page(dump(f"http://{server.address}/#token={TOKEN}"))
        assert shown.notice == ""
        assert shown.problems


def test_the_page_says_that_the_process_fails_to_answer(dump, monkeypatch):
    with StatusServer(0) as server:
        monkeypatch.delitem(server_module.PATHS, "/status.json")
        page = Page(dump(f"http://{server.address}/"))
    assert page.notice == "The process answers with status 404"
    assert page.title == "(!) rpcwheel"


def test_the_page_says_at_once_that_the_process_is_frozen(dump, changed_page):
    changed_page("window.fetch = () => new Promise(() => {});")
    with StatusServer(0) as server:
        page = Page(dump(f"http://{server.address}/", "--virtual-time-budget=3000"))
    assert page.notice == "The process does not answer"


def test_the_page_says_that_the_process_is_gone(dump, monkeypatch):
    def close(_):
        """Answer nothing: the connection ends."""
        raise ConnectionResetError

    with StatusServer(0) as server:
        monkeypatch.setitem(server_module.PATHS, "/status.json", close)
        page = Page(dump(f"http://{server.address}/"))
    assert page.notice == "The process does not answer"
