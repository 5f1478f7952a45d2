"""The examples run alone, quickly, and show what they are for."""

import os
import re
import shutil
from pathlib import Path

import pytest

from fixtures.processes import PACKAGE
from fixtures.programs import python

EXAMPLES = Path(__file__).parents[2] / "examples"
SHARED = {
    "audit_server",
    "demo_client",
    "demo_process",
    "demo_server",
    "overload_server",
    "registry_process",
}

GRPC_ROUNDING = 1.01
"""gRPC rounds a timeout up on the wire, by at most a hundredth (docs/grpcio.md)."""


def story(name: str) -> str:
    """What an example prints; it ends with 0 if what it shows was true."""
    variables = {"PYTHONPATH": str(PACKAGE), "PYTHONUNBUFFERED": "1"}  # one story, in order
    run = python(str(EXAMPLES / name), **variables)
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


@pytest.mark.parametrize("name", ["failback_sync.py", "failback_aio.py"])
def test_a_failback_example_delivers_what_it_queued(name: str) -> None:
    printed = story(name)
    before, _, after = printed.partition("up again")
    assert "up: the server answers number: 1" in before
    assert re.findall(r"killed: None after .* ms; in the queue: (\d)", before) == ["1", "2", "3"]
    assert len(re.findall(r"queued: __main__.*push, \d+ attempt\(s\) in \d+.\d+ s", before)) == 3
    assert sorted(re.findall(r"server: order (\d)", after)) == ["2", "3", "4"]
    assert printed.endswith("delivered later: 3\n")


def test_the_failback_interceptor_answers_at_once_and_delivers_later() -> None:
    printed = story("failback_interceptor.py")
    before, _, after = printed.partition("up again")
    assert "up: the server answers number: 1" in before
    assert re.findall(r"killed: queued=True after .* ms; waiting: (\d)", before) == ["1", "2", "3"]
    methods = ", ".join(["/shop.Audit/Push"] * 3)
    assert f"the queue /shop.Audit/Push has: {methods}\n" in before
    assert sorted(re.findall(r"server: order (\d)", after)) == ["2", "3", "4"]
    assert printed.endswith("delivered later: 3\n")


def test_the_calls_of_a_killed_process_are_delivered_by_the_next() -> None:
    printed = story("failback_journal.py")
    before, _, after = printed.partition("the process was killed: True\n")
    assert re.findall(r"order (\d): queued=True", before) == ["1", "2", "3"]
    assert sorted(re.findall(r"server: order (\d)", after)) == ["1", "2", "3"]
    assert printed.endswith("delivered by this process: 3\n")


@pytest.mark.parametrize("name", ["deadlines.py", "deadlines_aio.py"])
def test_a_deadline_shrinks_from_hop_to_hop(name: str) -> None:
    found = re.fullmatch(r"A gives (.*) s\nB has (.*) s\nC has (.*) s\n", story(name))
    assert found is not None
    entry, middle, leaf = (float(each) for each in found.groups())
    assert entry * GRPC_ROUNDING >= middle > leaf > 0


def test_retries_tell_the_server_how_many_went_before_and_end_before_the_deadline() -> None:
    printed = story("retry.py")
    assert re.findall(r"order 1; attempts before: (.*);", printed) == ["none", "1", "2"]
    assert "answered: number: 1\n" in printed
    attempts = re.findall(r"order 2; attempts before: (.*); (.*) s left", printed)
    assert [before for before, _ in attempts] == ["none", "1", "2", "3"][: len(attempts)]
    left = [float(seconds) for _, seconds in attempts]
    assert left == sorted(left, reverse=True)
    assert re.search(r"failed: .*\nafter .* s, of 1.75\n$", printed)


def test_a_silent_stream_is_ended_on_both_sides() -> None:
    lines = story("silent_stream.py").splitlines()
    assert lines[:3] == [f"received: order {number}" for number in (1, 2, 3)]
    assert lines[3:] == [
        "cut: DEADLINE_EXCEEDED, no message for 6 s (message_timeout)",
        "the server has ended the call: True",
    ]


def test_an_overloaded_server_with_a_limit_refuses_sheddable_calls_and_answers_others() -> None:
    before, _, limited = story("overload.py").partition("adaptive limit: answered in time ")
    assert "no limit: answered in time " in before
    assert re.search(r" critical: \d+ OK\n", limited)
    assert re.search(r" sheddable: \d+ RESOURCE_EXHAUSTED\n", limited)


def test_a_circuit_breaker_sends_few_calls_to_a_server_that_fails() -> None:
    printed = story("breaker.py")
    ends = re.findall(r"calls: {(.*)}", printed)
    works, down, again = (dict(re.findall(r"'(.+?)': (\d+)", phase)) for phase in ends)
    assert works == {"answered": "20"}
    assert int(down["not sent"]) > int(down["failed"])
    assert int(again["answered"]) > 0
    # A worker logs it; the main thread may print before the line ends.
    assert re.search(r"/shop.Audit/Push: the circuit breaker is open; .* calls failed", printed)
    assert "/shop.Audit/Push: the circuit breaker is closed again, after" in printed


@pytest.mark.parametrize("name", ["heartbeat.py", "heartbeat_aio.py"])
def test_a_frozen_server_is_replaced_by_the_other(name: str) -> None:
    printed = story(name)
    assert re.findall(r"(\w+): (order \d)", printed) == [  # a worker may print before the line ends
        ("one", "order 1"),
        ("two", "order 3"),
    ]
    assert re.search(r"order 2: UNAVAILABLE after .* s, .*no answer to heartbeats", printed)
    assert "DEAD" in printed
    assert "order 3: answered on connection 2" in printed  # a worker may print before the line ends


@pytest.mark.parametrize("name", ["idle.py", "idle_aio.py"])
def test_an_idle_connection_is_closed_and_a_busy_one_is_not(name: str) -> None:
    printed = story(name)
    # A worker prints it; the main thread may print before the line ends, even all that follows.
    assert (
        len(
            re.findall(
                r"closed: ipv4:127.0.0.1:\d+ after \d.\d s: connection idle for 6 s", printed
            )
        )
        == 1
    )
    assert printed.count("closed: ") == 1
    assert "the busy connection was kept: True" in printed
    assert printed.rstrip().endswith("the other client calls again and gets a response")


@pytest.mark.parametrize("name", ["registry.py", "registry_aio.py", "registry_etcd.py"])
def test_a_client_by_name_continues_while_servers_stop_crash_and_start(name: str) -> None:
    if name == "registry_etcd.py" and not os.environ.get("ETCD_URL") and not shutil.which("etcd"):
        pytest.skip("etcd is not installed (Debian: apt-get install etcd-server)")
    assert story(name).splitlines() == [
        "both servers answer: one two",
        "one is stopped gracefully; calls that failed meanwhile: 0",
        "one is back: True",
        "two is killed; answering: one",
    ]


def test_the_example_on_etcd_says_what_is_missing(tmp_path: Path) -> None:
    environment = {"PYTHONPATH": str(PACKAGE), "PATH": str(tmp_path), "ETCD_URL": ""}
    run = python(str(EXAMPLES / "registry_etcd.py"), **environment)
    assert (run.returncode, run.stderr) == (2, "")
    assert run.stdout.startswith("etcd is missing: set ETCD_URL, or (Debian) apt-get install")


@pytest.mark.parametrize(
    "path",
    [path for path in EXAMPLES.glob("*.py") if path.stem not in SHARED and "_pb2" not in path.stem],
    ids=lambda path: path.name,
)
def test_an_example_is_short_and_documents_its_command(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= 80 or path.stem == "demo"
    assert f"run it: python examples/{path.name}." in text
