"""`rpcwheel top`: a real live view, in this process and in a pseudo-terminal."""

import gc
import json
import os
import re
import signal
import threading

import pytest

from fixtures.hostile_process import HOSTILE, VISIBLE, escaped_for_terminal, hostile_components
from fixtures.terminals import Terminal
from fixtures.waiting import WAIT_S, wait_until
from rpcwheel import __version__, with_breaker
from rpcwheel.cli import main
from rpcwheel.cli.top import VARIABLE
from rpcwheel.status import server as server_module
from rpcwheel.status.server import StatusServer
from rpcwheel.telemetry import components
from rpcwheel.telemetry.call_counts import CallCounts
from rpcwheel.timer import WheelTimer

TOKEN = "correct-horse-battery"


@pytest.fixture
def server():
    with StatusServer(0) as server:
        yield server


def test_without_a_terminal_one_frame_is_printed(server, capsys):
    with WheelTimer(name="a-timer") as timer:
        timer.new_timeout(print, 600.0)
        assert main(["top", f"http://{server.address}/", "--once"]) == 0  # as in a browser
        assert server.address in capsys.readouterr().out
        assert main(["top", server.address]) == 0
        kind = type(timer._timer_state.queue).__name__  # it is another one without the extension
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"rpcwheel {__version__} at {server.address}, process {os.getpid()}")
    (line,) = (line for line in lines if line.startswith("a-timer "))
    assert line.split()[:4] == ["a-timer", kind, "1", "0"]
    assert lines[-1].startswith("no ")
    assert not [line for line in lines if line != line.rstrip()]


def test_a_circuit_breaker_that_is_open_is_a_problem(server, capsys):
    @with_breaker(minimum_calls=1, open_duration=600.0, failures=(ConnectionError,))
    def fetch():
        raise ConnectionResetError

    with pytest.raises(ConnectionResetError):
        fetch()
    assert main(["top", server.address]) == 0
    fetch.breaker.force_open()
    assert main(["top", server.address]) == 0
    first, second = re.findall(r"circuit breaker is ([a-z]+(?: open)?)", capsys.readouterr().out)
    assert (first, second) == ("open", "forced open")


@pytest.mark.parametrize("given", ["variable", "option"])
def test_a_token_comes_from_a_variable_or_an_option(given, monkeypatch, capsys):
    with StatusServer(0, token=TOKEN) as server:
        options = []
        if given == "variable":
            monkeypatch.setenv(VARIABLE, TOKEN)
        else:
            options = ["--token", TOKEN]
        assert main(["top", server.address, "--json", *options]) == 0
        assert json.loads(capsys.readouterr().out)["pid"]


def test_a_wrong_token_is_reported(capsys):
    with StatusServer(0, token=TOKEN) as server:
        for options in ([], ["--token", "wrong-horse-battery"]):
            assert main(["top", server.address, *options]) == 1
            error = capsys.readouterr().err
            assert f"{server.address} answers 401" in error
            assert "set RPCWHEEL_STATUS_TOKEN, or give --token" in error


def test_a_token_that_no_header_can_have_is_reported_without_it(server, capsys):
    assert main(["top", server.address, "--token", "swordfish\r\nx: y"]) == 1
    error = capsys.readouterr().err
    assert "the token is not valid" in error
    assert "swordfish" not in error


def test_a_process_that_does_not_answer_is_reported(server, capsys):
    server.close()
    assert main(["top", server.address]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert f"{server.address} does not answer: Connection refused" in captured.err
    assert "status_port" in captured.err


def test_the_port_of_a_grpc_server_is_reported(shop, capsys):
    assert main(["top", shop.target]) == 1
    error = capsys.readouterr().err
    assert "may be a port for calls of gRPC" in error
    assert "status_port" in error


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"{}", b"<html>", b"[" * 100_000, b"\xff", b'{"pid":"\x1b[31m"}']
)
def test_an_answer_that_is_no_status_is_reported(server, body, monkeypatch, capsys):
    answer = server_module.Answer(server_module.HTTPStatus.OK, body)
    monkeypatch.setitem(server_module.PATHS, "/status.json", lambda _: answer)
    assert main(["top", server.address]) == 1
    assert "does not answer with a status" in capsys.readouterr().err


def test_another_server_is_reported(server, monkeypatch, capsys):
    monkeypatch.delitem(server_module.PATHS, "/status.json")
    assert main(["top", server.address]) == 1
    assert "is this the status_port of a Kit?" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ["nohost"],
        ["unix:/run/x"],
        ["h:0"],
        ["a..b:1"],
        ["a b:1"],
        ["h:1", "--interval", "0"],
        ["https://h:1"],
        [],
    ],
)
def test_wrong_arguments_are_refused(arguments, capsys):
    assert main(["top", *arguments]) == 2
    assert capsys.readouterr().err


def test_texts_of_peers_are_neither_markup_nor_control_characters(monkeypatch, capsys):
    with hostile_components(monkeypatch) as kit:
        assert main(["top", kit.status_address, "--json"]) == 0
        sent = capsys.readouterr().out
        assert main(["top", kit.status_address]) == 0
    assert json.loads(sent)["queues"][0]["name"] == HOSTILE
    assert sent.replace("\n", "").isprintable()
    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    assert "\u202e" not in shown
    assert shown.count(escaped_for_terminal(HOSTILE)) >= 6
    assert VISIBLE in next(line for line in shown.splitlines() if "grpc-python" in line)


def test_a_terminal_shows_texts_of_peers_escaped(monkeypatch):
    with (
        hostile_components(monkeypatch) as kit,
        Terminal("top", kit.status_address, columns=400, rows=200) as terminal,
    ):
        wait_until(lambda: "Queued calls" in terminal.text)
        terminal.process.terminate()
        assert terminal.process.wait(WAIT_S) == 143
        assert escaped_for_terminal(HOSTILE) in terminal.text
        assert "\u202e" not in terminal.raw
        assert "\x1b[31mb" not in terminal.raw


def test_frames_follow_a_process_that_freezes_and_restarts_until_ctrl_c(server, monkeypatch):
    counts = CallCounts()
    monkeypatch.setattr(components._COMPONENTS, "counts", counts)
    get = counts.client.method("/shop.Orders/Get", "unary")
    get.end(get.begin(), "OK")
    go_on, status = threading.Event(), server_module.PATHS["/status.json"]

    def freeze(accept):
        go_on.wait(WAIT_S)
        return status(accept)

    with Terminal("top", server.address, "--interval", "0.1") as terminal:
        wait_until(lambda: "OK 1" in terminal.text)
        get.end(get.begin(), "UNAVAILABLE")
        wait_until(lambda: "OK 1, UNAVAILABLE 1" in terminal.text)

        monkeypatch.setitem(server_module.PATHS, "/status.json", freeze)
        wait_until(lambda: f"{server.address} has not answered for " in terminal.text)
        go_on.set()
        with WheelTimer(name="thawed"):
            wait_until(lambda: "thawed" in terminal.text)

        server.close()
        wait_until(lambda: "does not answer: Connection refused" in terminal.text)
        with StatusServer(server.port), WheelTimer(name="after-the-restart"):
            wait_until(lambda: "after-the-restart" in terminal.text)

        terminal.process.send_signal(signal.SIGINT)
        assert terminal.process.wait(WAIT_S) == 130
        wait_until(lambda: terminal.raw.endswith("\x1b[?1049l"))  # the screen as it was before
    assert "Traceback" not in terminal.text


def lines_shown(terminal):
    """The first and the last line on the screen, and how many there are; () before a key."""
    frames = re.findall(r"lines (\d+) to (\d+) of (\d+);", terminal.text)
    return frames[-1] if frames else ()


def test_a_frame_fits_a_small_terminal(server):
    gc.collect()  # or components of earlier tests end while the pages are turned
    timers = [WheelTimer(name=f"timer-{number:02}") for number in range(40)]
    with Terminal("top", server.address, "--interval", "0.1", columns=100, rows=12) as terminal:
        wait_until(lambda: "rows are hidden" in terminal.text)
        first = terminal.text.split("rpcwheel ")[1]
        assert first.count("\n") <= 12
        assert "timer-39" not in first
        terminal.press("\x1b[B")  # down: all rows
        wait_until(lambda: lines_shown(terminal))
        while (lines := lines_shown(terminal))[1] != lines[2]:
            terminal.press(" ")
            wait_until(lambda lines=lines: lines_shown(terminal) != lines)
        assert "timer-39" in terminal.text
        terminal.press("q")
        assert terminal.process.wait(WAIT_S) == 0
    for timer in timers:
        timer.stop()
