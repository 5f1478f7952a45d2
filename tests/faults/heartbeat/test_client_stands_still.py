"""The client stands still itself: that says nothing of the server, and nothing may come of it."""

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
from fixtures.heartbeat_worlds import TIMEOUT, AioClient
from fixtures.waiting import wait_until

PAUSE = TIMEOUT + 1
"""Seconds; a peer that was silent for so long would be dead."""


@pytest.fixture
def start_client():
    """Starts clients in processes of their own."""
    path = [str(Path(rpcwheel.__file__).parents[1]), str(Path(__file__).parents[2])]
    with contextlib.ExitStack() as started:

        def start(world, target):
            command = [sys.executable, "-W", "error", "-m", "scenarios.paused_client"]
            process = subprocess.Popen(
                [*command, world, target],
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


def ask(process):
    process.stdin.write("\n")
    process.stdin.flush()
    return json.loads(process.stdout.readline())


@pytest.mark.parametrize("world", ["sync", "aio"])
def test_a_client_that_was_frozen_itself_keeps_its_connection(world, server, start_client):
    """A laptop that slept, a debugger, a container that was paused."""
    client = start_client(world, server.target)
    assert ask(client)["number"] == 1  # it has started, which takes its time
    assert wait_until(lambda: ask(client)["answered"] > 0)
    before = ask(client)["answered"]
    os.kill(client.pid, signal.SIGSTOP)
    time.sleep(PAUSE)
    os.kill(client.pid, signal.SIGCONT)
    assert wait_until(lambda: ask(client)["answered"] > before)
    story = ask(client)
    assert (story["call"], story["number"]) == ("runs", 1)


def test_a_loop_that_was_blocked_keeps_its_connection(server):
    """User code that blocks the loop: the answer is there, and nobody could read it."""
    with AioClient(server.target) as client:
        client.ping()
        assert wait_until(lambda: client.heartbeat.answered > 0)
        before = client.heartbeat.answered
        client.do(time.sleep, PAUSE)
        assert wait_until(lambda: client.heartbeat.answered > before)
        assert client.bare.number == 1
