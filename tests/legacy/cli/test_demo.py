"""The demo, whole and as a program: what it shows, that it can fail, and that nothing is left."""

import io
import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fixtures.waiting import WAIT_S
from rpcwheel.cli import demo, main
from rpcwheel.cli.demo import Settings, run
from rpcwheel.cli.server_process import ServerProcess
from rpcwheel.cli.view import PlainView

SHORT = ("demo", "--events", "20", "--outage", "0.4")
QUICK = Settings(events=10, outage=0.1, answer_within=WAIT_S, drain_within=WAIT_S)
PATIENT = f"""
import functools, sys
from rpcwheel.cli import caller, demo, main
demo.Settings = functools.partial(demo.Settings, answer_within={WAIT_S}, drain_within={WAIT_S})
demo.HEARD_WITHIN = caller.DEADLINE = {WAIT_S}
sys.exit(main())
"""
"""The command, whose limits a machine that stands still does not exceed."""

CHECKS = 11


@contextmanager
def rpcwheel(*arguments: str, **options: object) -> Iterator[subprocess.Popen[str]]:
    """Start the command line as a process, which does not outlive the test."""
    with subprocess.Popen(
        [sys.executable, "-W", "error", "-c", PATIENT, *arguments],
        **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **options},
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def servers(shown: str) -> list[int]:
    return [int(pid) for pid in re.findall(r"Server started: process (\d+)", shown)]


def living(pids: list[int]) -> list[int]:
    """Which of the processes live, once those that are on their way out had their time."""
    end = time.monotonic() + WAIT_S
    while (left := [pid for pid in pids if is_alive(pid)]) and time.monotonic() < end:
        time.sleep(0.01)
    return left


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that only waits for a parent to ask for its status does not."""
    try:
        os.kill(pid, 0)
        return not re.search(r"\) Z ", Path(f"/proc/{pid}/stat").read_text())
    except ProcessLookupError:
        return False
    except FileNotFoundError:  # ended between the two looks, or no /proc here
        return not Path("/proc").is_dir()


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory for the demo's temporary files, which must be empty again afterwards."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    yield tmp_path
    assert list(tmp_path.iterdir()) == []


# What it shows


def test_piped_it_shows_plain_lines_and_ends_with_status_0(temporary: Path) -> None:
    with rpcwheel(*SHORT) as process:
        shown, errors = process.communicate()
    assert (process.returncode, errors) == (0, ""), shown
    assert shown.isascii()
    assert "\x1b" not in shown
    assert shown.count("\nok  ") == CHECKS
    assert shown.endswith(f"\nAll {CHECKS} checks passed.\n")
    assert "SIGKILL between two calls" in shown
    assert "SIGKILL while two calls are in flight" in shown
    assert "Failback delivers at least once" in shown  # the one that was recorded, not answered
    assert len(servers(shown)) == 3
    assert not living(servers(shown))


def test_on_a_terminal_it_shows_colours_and_the_queue(temporary: Path) -> None:
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "80"}
    environment.pop("NO_COLOR", None)
    with rpcwheel(*SHORT, stdout=theirs, env=environment) as process:
        os.close(theirs)
        shown = "".join(read_terminal(ours))
        assert process.communicate() == (None, "")
    assert process.returncode == 0, shown
    assert "\x1b[" in shown
    assert re.search(r"\d waiting", shown)
    assert shown.count("\N{CHECK MARK}") == CHECKS


def read_terminal(ours: int) -> Iterator[str]:
    with open(ours, encoding="utf-8", errors="replace") as terminal:
        while True:
            try:
                line = terminal.readline()
            except OSError:  # Linux's way to say that the other side is closed
                return
            if not line:
                return
            yield line


# It can fail


def tampered(tamper: Callable[[list[str]], None]) -> type[ServerProcess]:
    """A server whose journal is changed when the story is over."""

    class Tampered(ServerProcess):
        def close(self) -> None:
            super().close()
            if self.journal.parent.name == "server-1":
                lines = self.journal.read_text().splitlines(keepends=True)
                tamper(lines)
                self.journal.write_text("".join(lines))

    return Tampered


def flip(lines: list[str]) -> None:
    lines[1] = lines[1].replace("a", "b")


def failures(start_server: type[ServerProcess], settings: Settings) -> set[str]:
    """Tell the story with a server that goes wrong: it must end with status 1, and say why."""
    demo.HEARD_WITHIN = WAIT_S
    stream = io.StringIO()
    assert run(settings, PlainView(stream), start_server) == 1, stream.getvalue()
    *_, result = stream.getvalue().splitlines()
    failed = set(re.findall(r"FAIL  (.+?)  ", stream.getvalue()))
    assert all(claim in result for claim in failed)
    return failed


def test_a_tampered_journal_fails_the_demo(temporary: Path) -> None:
    claims = {"every event arrived", "byte for byte, as when called"}
    assert failures(tampered(flip), QUICK) == claims


# Nothing is left


def shown_until(process: subprocess.Popen[str], word: str) -> str:
    """What the demo shows until a line has `word` in it."""
    shown = ""
    while word not in shown:
        line = process.stdout.readline()
        assert line, f"ended without {word!r}: {shown}{process.stderr.read()}"
        shown += line
    return shown


@pytest.mark.parametrize(
    ("number", "status", "moment"),
    [(signal.SIGINT, 130, "queue:"), (signal.SIGTERM, 143, "Server started")],
)
def test_a_signal_ends_it_and_its_servers(
    temporary: Path,
    number: signal.Signals,
    status: int,
    moment: str,
) -> None:
    with rpcwheel(*SHORT) as process:
        shown = shown_until(process, moment)
        process.send_signal(number)
        rest, errors = process.communicate()
    assert (process.returncode, errors) == (status, "")
    assert not living(servers(shown + rest))


def test_its_server_does_not_outlive_it_even_if_it_is_killed(tmp_path: Path) -> None:
    with rpcwheel(*SHORT, env={**os.environ, "TMPDIR": str(tmp_path)}) as process:
        shown = shown_until(process, "Server started")
        process.kill()
    assert not living(servers(shown))


def test_a_reader_who_goes_away_ends_it(temporary: Path) -> None:
    with rpcwheel(*SHORT) as process:
        shown = shown_until(process, "Server started")
        process.stdout.close()
        assert process.wait() == 1
        assert process.stderr.read() == ""
    assert not living(servers(shown))


# The command line


def test_wrong_arguments_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for option, values, said in (
        ("events", ["9", "-1", "ten", "1.5", ""], "give a whole number of 10 or more"),
        ("outage", ["0", "-1", "nan", "inf", "soon"], "give seconds above zero"),
    ):
        for value in values:
            with pytest.raises(SystemExit, match="2"):
                main(["demo", f"--{option}={value}"])
            assert said in capsys.readouterr().err
