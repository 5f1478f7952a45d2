"""The server in a process does what it says, and never stays behind."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import grpc
import pytest

from fixtures.certificates import NAMES, certificates  # noqa: F401 - a fixture
from fixtures.server_process import CHECK, FOLLOW, PING, SLOW, start_server  # noqa: F401
from fixtures.waiting import WAIT_S, wait_until

FRESH = [("grpc.use_local_subchannel_pool", 1)]


def ask(target, method=PING, request=b"", **options):
    with grpc.insecure_channel(target, options=FRESH) as channel:
        options = {"timeout": 20, "wait_for_ready": True, **options}
        return channel.unary_unary(method)(request, **options)


def gone(pid):
    """Whether it has ended; nobody may have waited for it yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_it_says_its_pid_in_all_ways(start_server):  # noqa: F811
    server = start_server()
    pid = str(server.pid).encode()
    assert ask(server.target) == ask(server.target, SLOW, b"0.01") == pid
    with server.connect() as channel:
        stream = channel.unary_stream(FOLLOW)(b"0.01", timeout=WAIT_S)
        assert [next(stream), next(stream)] == [pid, pid]
        stream.cancel()


@pytest.mark.parametrize(
    ("health", "answer"),
    [
        ("serving", b"\x08\x01"),
        ("not_serving", b"\x08\x02"),
        ("missing", grpc.StatusCode.UNIMPLEMENTED),
        ("hanging", grpc.StatusCode.DEADLINE_EXCEEDED),
    ],
)
def test_its_health_is_what_was_wished(start_server, health, answer):  # noqa: F811
    server = start_server(health=health)
    assert ask(server.target) == str(server.pid).encode()
    try:
        got = ask(server.target, CHECK, timeout=0.5)
    except grpc.RpcError as error:
        got = error.code()
    assert got == answer


def test_it_counts_calls_and_heartbeats(start_server):  # noqa: F811
    server = start_server()
    ask(server.target)
    ask(server.target, CHECK, metadata=[("rpcwheel-heartbeat", "1")])
    calls = server.calls()
    assert (calls[PING], calls[CHECK], calls["heartbeats"]) == (1, 1, 1)


def test_frozen_it_does_not_answer_and_thawed_it_does(start_server):  # noqa: F811
    server = start_server()
    ask(server.target)
    server.stop()
    with pytest.raises(grpc.RpcError) as caught:
        ask(server.target, timeout=0.3)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    server.cont()
    assert ask(server.target) == str(server.pid).encode()


def test_killed_it_is_gone_and_comes_back_on_its_port(start_server):  # noqa: F811
    server = start_server()
    before, target = server.pid, server.target
    server.kill()
    server.kill()
    assert gone(before)
    server.restart()
    assert server.target == target
    assert ask(target) == str(server.pid).encode()
    assert server.pid != before


@pytest.mark.parametrize("name", NAMES)
def test_its_certificate_is_good_for(start_server, certificates, name):  # noqa: F811
    server = start_server(certificates=certificates, host="::1" if name == "::1" else "127.0.0.1")
    target = f"[::1]:{server.port}" if name == "::1" else f"127.0.0.1:{server.port}"
    options = [*FRESH, ("grpc.ssl_target_name_override", "localhost")]
    options = options if name == "localhost" else FRESH
    credentials = certificates.channel_credentials()
    with grpc.secure_channel(target, credentials, options=options) as channel:
        answer = channel.unary_unary(PING)(b"", timeout=WAIT_S, wait_for_ready=True)
    assert answer == str(server.pid).encode()
    assert server.calls()[PING] == 1


@pytest.mark.parametrize("frozen", [False, True])
def test_it_ends_with_the_process_that_made_it(frozen):
    script = (
        "import json, os, sys, time; sys.path.insert(0, sys.argv[1])\n"
        "from fixtures.server_process import KillableServer\n"
        "server = KillableServer()\n"
        f"pid = server.pid; {'server.stop()' if frozen else ''}\n"
        "print(json.dumps(pid), flush=True); time.sleep(60)\n"
    )
    tests = str(Path(__file__).parents[1])
    command = [sys.executable, "-c", script, tests]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        pid = json.loads(process.stdout.readline())
        assert not gone(pid)
        os.kill(process.pid, signal.SIGKILL)
    assert wait_until(lambda: gone(pid))
