"""What is shown where: plain lines in a pipe, rich on a terminal."""

import io

import pytest

from rpcwheel.cli.checks import Check
from rpcwheel.cli.rich_view import RichView
from rpcwheel.cli.view import PlainView, choose

GOOD = Check("every event arrived", "60 of 60", passed=True)
BAD = Check("queue drained to 0", "24 still wait", passed=False)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_the_rich_view(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    assert isinstance(choose(plain=False, stream=Terminal()), RichView)


def test_plain_lines_where_colours_would_be_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    for plain, stream, term in [
        (True, Terminal(), "xterm"),
        (False, io.StringIO(), "xterm"),
        (False, Terminal(), "dumb"),
    ]:
        monkeypatch.setenv("TERM", term)
        assert isinstance(choose(plain=plain, stream=stream), PlainView)


def test_plain_lines_hold_the_story_and_the_table() -> None:
    stream = io.StringIO()
    with PlainView(stream) as view:
        view.title("what this is")
        view.say("The server is started. " * 6)
        view.queue(3, 24, 0.0012)
        view.queue(4, 24, 0.0012)  # at once: not another line
        view.verdict([GOOD, BAD])
    lines = stream.getvalue().splitlines()
    assert max(map(len, lines)) < 80
    assert lines[0] == "what this is"
    assert lines[1].startswith("- The server is started.")
    assert [line for line in lines if "queue:" in line] == [
        "    queue: 3 of 24 waiting, last caller answered in 1.2 ms"
    ]
    assert lines[-4:] == [
        "ok    every event arrived  60 of 60",
        "FAIL  queue drained to 0   24 still wait",
        "",
        "FAILED, 1 of 2 checks: queue drained to 0.",
    ]


def test_plain_lines_suit_any_encoding() -> None:
    raw = io.BytesIO()
    view = PlainView(io.TextIOWrapper(raw, encoding="ascii"))
    view.verdict([Check("no caller saw an error", "event 3: 注文", passed=False)])
    assert rb"event 3: \u6ce8\u6587" in raw.getvalue()
