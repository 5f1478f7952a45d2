"""`examples/demo.py` as a program: its checks pass, they can fail, and no process is left."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import rpcwheel
from fixtures.waiting import WAIT_S, wait_until

PACKAGE = Path(rpcwheel.__file__).parents[1]
EXAMPLES = Path(__file__).parents[2] / "examples"

WITHOUT_TIME_LIMITS = f"""
import sys
sys.argv = ["demo.py", "--orders", "20", "--outage", "0.2"]
import demo, demo_server
demo.ANSWER_LIMIT_S = demo.DRAIN_LIMIT_S = demo.HOLD_LIMIT_S = demo.TIMEOUT_S = {WAIT_S}
demo_server.START_TIMEOUT_S = {WAIT_S}
"""

RUN = """
sys.exit(demo.main())
"""

TAMPER = """
read = demo.ServerProcess.requests
def requests(self):
    first, *others = read(self)
    return [first[:-1] + b"?", *others]
demo.ServerProcess.requests = requests
"""


@contextmanager
def demo(directory: Path, change: str = "") -> Iterator[subprocess.Popen[str]]:
    """Start the demo as a process, which does not outlive the test."""
    with subprocess.Popen(
        [sys.executable, "-W", "error", "-c", WITHOUT_TIME_LIMITS + change + RUN],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={
            **os.environ,
            "PYTHONPATH": f"{PACKAGE}{os.pathsep}{EXAMPLES}",
            "PYTHONUNBUFFERED": "1",
            "TMPDIR": str(directory),
            "COLUMNS": "200",
        },
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def output_until(process: subprocess.Popen[str], text: str) -> str:
    """What the demo prints until a line has this text."""
    output = ""
    while text not in output:
        line = process.stdout.readline()
        assert line, f"ended without {text!r}: {output}{process.stderr.read()}"
        output += line
    return output


def servers_ended(output: str) -> bool:
    """Wait until no server that the output names runs."""
    pids = re.findall(r"Server started.*: process (\d+)", output)
    assert pids
    return wait_until(lambda: not any(is_running(int(pid)) for pid in pids))


def is_running(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        os.kill(pid, 0)
        return not re.search(r"\) Z ", Path(f"/proc/{pid}/stat").read_text())
    except ProcessLookupError:
        return False
    except FileNotFoundError:  # it has ended in between, or this system has no /proc
        return not Path("/proc").is_dir()


def test_every_call_arrives_although_the_server_is_killed_twice(tmp_path: Path) -> None:
    with demo(tmp_path) as process:
        output, errors = process.communicate(timeout=4 * WAIT_S)
    assert (process.returncode, errors) == (0, ""), output
    assert len(re.findall(r"^  ok  ", output, re.MULTILINE)) == 11
    assert output.endswith("All 11 checks passed.\n")
    assert re.search(r"every call arrived +20 of 20", output)
    assert "recorded but not answered" in output
    assert output.count("SIGKILL") == 2
    assert servers_ended(output)
    assert list(tmp_path.iterdir()) == []


def test_a_changed_request_fails_the_demo(tmp_path: Path) -> None:
    with demo(tmp_path, TAMPER) as process:
        output, _ = process.communicate(timeout=4 * WAIT_S)
    assert process.returncode == 1
    failed = "every call arrived; byte for byte, as when called"
    assert output.endswith(f"FAILED, 2 of 11 checks: {failed}.\n")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_demo_and_its_servers(tmp_path: Path, number: signal.Signals) -> None:
    with demo(tmp_path) as process:
        output = output_until(process, "SIGKILL between")
        process.send_signal(number)
        rest, errors = process.communicate(timeout=4 * WAIT_S)
    assert (process.returncode, errors) == (128 + number, "")
    assert servers_ended(output + rest)
    assert list(tmp_path.iterdir()) == []


def test_a_server_does_not_outlive_a_demo_that_is_killed(tmp_path: Path) -> None:
    with demo(tmp_path) as process:
        output = output_until(process, "Server started")
        process.kill()
    assert servers_ended(output)
