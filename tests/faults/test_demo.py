"""`examples/demo.py` as a program: its checks pass, they can fail, and no process is left."""

import os
import re
import signal
import subprocess
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from fixtures.processes import PACKAGE, has_ended
from fixtures.programs import command
from fixtures.waiting import WAIT_S, wait_until

EXAMPLES = Path(__file__).parents[2] / "examples"

WITHOUT_TIME_LIMITS = f"""
import sys
sys.argv = ["demo.py", "--orders", "20", "--outage", "0.2"]
import demo, demo_process
demo.ANSWER_LIMIT_S = demo.DRAIN_LIMIT_S = demo.HOLD_LIMIT_S = demo.TIMEOUT_S = {WAIT_S}
demo_process.START_TIMEOUT_S = {WAIT_S}
"""

RUN = """
sys.exit(demo.main())
"""

CHANGED_REQUEST = """
read = demo.ServerProcess.received
def received(self):
    first, *others = read(self)
    return [first if first.key else first._replace(request=first.request[:-1] + b"?"), *others]
demo.ServerProcess.received = received
"""

CHANGED_KEYS = """
read = demo.ServerProcess.received
def received(self):
    return [one._replace(key=one.key and f"{one.key} {n}") for n, one in enumerate(read(self))]
demo.ServerProcess.received = received
"""

ONE_KEY = """
read = demo.ServerProcess.received
def received(self):
    return [one._replace(key=one.key and "the same") for one in read(self)]
demo.ServerProcess.received = received
"""

UNREAD_ANSWERS = """
import time
kill = demo.ClientProcess.kill
def kill_later(self):
    if "--first" in str(self._process.args) and self._process.poll() is None:
        while self._lines.qsize() < 3:
            time.sleep(0.01)
    return kill(self)
demo.ClientProcess.kill = kill_later
"""
"""The client is killed when it has printed three answers that the demo has not read yet."""

MISSING = """
read = demo.ServerProcess.received
demo.ServerProcess.received = lambda self: [one for one in read(self) if not one.key]
"""


def demo(directory: Path, change: str = "") -> AbstractContextManager[subprocess.Popen[str]]:
    """Start the demo as a process, which does not outlive the test."""
    return command(
        program=("-c", WITHOUT_TIME_LIMITS + change + RUN),
        PYTHONPATH=f"{PACKAGE}{os.pathsep}{EXAMPLES}",
        TMPDIR=str(directory),
        COLUMNS="200",
    )


def output_until(process: subprocess.Popen[str], text: str) -> str:
    """What the demo prints until a line has this text."""
    output = ""
    while text not in output:
        line = process.stdout.readline()
        assert line, f"ended without {text!r}: {output}{process.stderr.read()}"
        output += line
    return output


def processes_ended(output: str) -> bool:
    """Wait until no process that the output names runs."""
    pids = [int(pid) for pid in re.findall(r"started.*: process (\d+)", output)]
    assert pids
    return wait_until(lambda: all(map(has_ended, pids)))


def test_every_call_arrives_although_server_and_client_are_killed(tmp_path: Path) -> None:
    with demo(tmp_path, UNREAD_ANSWERS) as process:
        output, errors = process.communicate(timeout=4 * WAIT_S)
    assert (process.returncode, errors) == (0, ""), output
    assert len(re.findall(r"^  ok  ", output, re.MULTILINE)) == 14
    assert output.endswith("All 14 checks passed.\n")
    assert re.search(r"every call arrived +20 of 20", output)
    assert "recorded but not answered" in output
    answered, arrived = (
        re.search(pattern, output)
        for pattern in (r'(\d+) calls were answered "queued"', r"queue +(\d+) of \1 arrived")
    )
    assert int(answered[1]) == int(arrived[1]) >= 9
    assert re.search(r"twice with the same key +order .*21\b.*; different keys: 0", output)
    assert output.count("SIGKILL") == 4
    assert processes_ended(output)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("change", "failed"),
    [
        (CHANGED_REQUEST, ["every call arrived", "byte for byte, as when called"]),
        (CHANGED_KEYS, ["twice with the same key"]),
        (ONE_KEY, ["twice with the same key"]),
        (MISSING, ["the next delivered its queue", "twice with the same key"]),
    ],
    ids=["request", "keys", "one key", "missing"],
)
def test_the_demo_fails_if_what_arrived_is_not_what_was_sent(
    tmp_path: Path, change: str, failed: list[str]
) -> None:
    with demo(tmp_path, change) as process:
        output, _ = process.communicate(timeout=4 * WAIT_S)
    assert process.returncode == 1
    assert output.endswith(f"FAILED, {len(failed)} of 14 checks: {'; '.join(failed)}.\n")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_demo_and_its_processes(tmp_path: Path, number: signal.Signals) -> None:
    with demo(tmp_path) as process:
        output = output_until(process, "SIGKILL between")
        process.send_signal(number)
        rest, errors = process.communicate(timeout=4 * WAIT_S)
    assert (process.returncode, errors) == (128 + number, "")
    assert processes_ended(output + rest)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("last", ["Server started", "It makes calls", "It only delivers"])
def test_no_process_outlives_a_demo_that_is_killed(tmp_path: Path, last: str) -> None:
    with demo(tmp_path) as process:
        output = output_until(process, last)
        process.kill()
    assert processes_ended(output)
