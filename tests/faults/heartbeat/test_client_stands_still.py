"""A client that stalls does not take its servers for dead."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import rpcwheel
from fixtures.heartbeat_clients import Client
from fixtures.waiting import wait_until

TIMEOUT = 6.0
"""Seconds after which a silent server is dead: more than one that runs is silent."""

PAUSE = TIMEOUT + 1
"""Seconds for which the client stands still."""


@pytest.fixture
def start_client():
    """Starts clients in separate processes."""
    path = [str(Path(rpcwheel.__file__).parents[1]), str(Path(__file__).parents[2])]
    with contextlib.ExitStack() as started:

        def start(world, target):
            command = [sys.executable, "-W", "error", "-m", "scenarios.paused_client"]
            process = subprocess.Popen(
                [*command, world, target, str(TIMEOUT)],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                process_group=0,
            )
            started.enter_context(process)
            started.callback(process.kill)
            return process

        yield start


def status_of(process):
    process.stdin.write("\n")
    process.stdin.flush()
    return json.loads(process.stdout.readline())


@pytest.mark.parametrize("world", ["sync", "aio"])
def test_a_client_that_was_stopped_keeps_its_connection(world, server, start_client):
    """As by suspend, a debugger, or a paused container."""
    client = start_client(world, server.target)
    assert status_of(client)["number"] == 1  # it has started
    assert wait_until(lambda: status_of(client)["answered"] > 0)
    before = status_of(client)["answered"]
    os.kill(client.pid, signal.SIGSTOP)
    time.sleep(PAUSE)
    os.kill(client.pid, signal.SIGCONT)
    assert wait_until(lambda: status_of(client)["answered"] > before)
    status = status_of(client)
    assert (status["call"], status["number"]) == ("runs", 1)


def test_a_client_whose_event_loop_was_blocked_keeps_its_connection(server):
    """The answer arrived, but the loop could not read it."""
    with Client("aio", server.target, timeout=TIMEOUT) as client:
        client.ping()
        assert wait_until(lambda: client.heartbeat.answered > 0)
        before = client.heartbeat.answered
        client.do(time.sleep, PAUSE)
        assert wait_until(lambda: client.heartbeat.answered > before)
        assert client.bare.number == 1
