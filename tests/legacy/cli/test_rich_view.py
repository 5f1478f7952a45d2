"""The rich view, on a stream that says it is a terminal."""

import io

import pytest

from rpcwheel.cli.checks import Check
from rpcwheel.cli.rich_view import RichView

CHECKS = [
    Check("callers answered within 250 ms", "40 of 40, median 0.4, slowest 3.9 ms", passed=True),
    Check("queue drained to 0, twice", "24 still wait", passed=False),
]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("NO_COLOR", raising=False)
    return Terminal()


def test_the_story_the_bar_and_the_table_are_shown(terminal: Terminal) -> None:
    with RichView(terminal) as view:
        view.say("SIGKILL between two calls.")
        view.queue(18, 24, 0.0004)
        view.verdict(CHECKS)
    shown = terminal.getvalue()
    assert "SIGKILL between two calls." in shown
    assert "18 waiting" in shown
    assert "answered in 0.4 ms" in shown
    assert "40 of 40, median 0.4, slowest 3.9 ms" in shown  # on one line of 80 columns
    assert "\N{CHECK MARK}" in shown
    assert "\N{BALLOT X}" in shown
    assert "FAILED, 1 of 2 checks: queue drained to 0, twice." in shown
    assert "\x1b[" in shown


def test_what_is_quoted_is_not_taken_for_markup(terminal: Terminal) -> None:
    with RichView(terminal) as view:
        view.say("it said [red]stop[/]")
        view.verdict([Check("nothing else went wrong", "[/nonsense]", passed=False)])
    assert "[red]stop[/]" in terminal.getvalue()
    assert "[/nonsense]" in terminal.getvalue()


def test_the_bar_is_gone_after_the_demo(terminal: Terminal) -> None:
    with RichView(terminal) as view:
        view.queue(18, 24, 0.0004)
    assert terminal.getvalue().rstrip("\n").endswith("\x1b[2K")  # the line is erased
