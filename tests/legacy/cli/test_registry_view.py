"""The table: which columns there are, and what stands in them."""

import io
import sys

from rpcwheel.cli.registry_view import as_text, show
from rpcwheel.instance import ServiceInstance

PLACE = "sqlite:///run/shop.db"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def instance(**values):
    return ServiceInstance(**{"service": "shop.Orders", "host": "10.0.0.7", "port": 50051} | values)


def shown(found, stream, *, plain=False):
    show(PLACE, found, stream, plain=plain)
    return stream.getvalue()


def test_columns_that_all_leave_empty_are_left_out() -> None:
    head, row = as_text({"shop.Orders": [instance()]}).splitlines()
    assert head.split() == ["SERVICE", "ID", "ADDRESS", "WEIGHT", "STATUS", "UP", "SINCE"]
    assert row.split() == ["shop.Orders", "10.0.0.7:50051", "10.0.0.7:50051", "100", "UP"]


def test_columns_stand_under_each_other() -> None:
    found = {"a": [instance(zone="z", id="longer-than-the-others")], "b": [instance(version="v2")]}
    head, *rows = as_text(found).splitlines()
    assert {row.index("10.0.0.7:50051", 30) for row in rows} == {head.index("ADDRESS")}
    assert rows[0][head.index("ZONE")] == "z"
    assert rows[1][head.index("VERSION") :].startswith("v2")


def test_tls_a_time_and_metadata_are_told() -> None:
    one = instance(protocol="grpcs", started_at=86400.0, metadata={"b": "2", "a": "1"})
    text = as_text({"shop.Orders": [one]})
    assert "grpcs://10.0.0.7:50051" in text
    assert "1970-01-0" in text
    assert text.endswith("a=1 b=2")


def test_a_time_that_no_calendar_has_does_no_harm() -> None:
    assert "?" in as_text({"shop.Orders": [instance(started_at=1e300)]})


def test_a_terminal_gets_the_rich_table_and_a_pipe_plain_text(monkeypatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "120")
    found = {"shop.Orders": [instance()]}
    assert "\N{BOX DRAWINGS LIGHT HORIZONTAL}" in shown(found, Terminal())
    assert "SERVICE" in shown(found, Terminal(), plain=True)
    assert "SERVICE" in shown(found, io.StringIO())


def test_a_terminal_without_rich_gets_plain_text(monkeypatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delitem(sys.modules, "rpcwheel.cli.registry_rich", raising=False)
    monkeypatch.delattr("rpcwheel.cli.registry_rich", raising=False)
    for name in [name for name in sys.modules if name.partition(".")[0] == "rich"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "rich", None)
    assert "SERVICE" in shown({"shop.Orders": [instance()]}, Terminal())


def test_a_pipe_that_is_narrow_gets_its_letters_escaped() -> None:
    pipe = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    show(PLACE, {"shop.Orders": [instance(zone="Zürich")]}, pipe, plain=False)
    assert rb"Z\xfcrich" in pipe.buffer.getvalue()
