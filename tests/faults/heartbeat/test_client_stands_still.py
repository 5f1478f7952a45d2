"""A client that stalls does not take its servers for dead."""

import contextlib
import json
import signal
import sys
import time

import pytest

from fixtures.heartbeat_clients import Client
from fixtures.processes import PATHS, LineProgram
from fixtures.waiting import wait_until

TIMEOUT = 6.0
"""Seconds after which a silent server is dead: more than one that runs is silent."""

PAUSE = TIMEOUT + 1
"""Seconds for which the client stands still."""


@pytest.fixture
def start_client(tmp_path):
    """Starts clients in separate processes."""
    command = [sys.executable, "-W", "error", "-m", "scenarios.paused_client"]
    with contextlib.ExitStack() as started:

        def start(world, target):
            words = [*command, world, target, str(TIMEOUT)]
            return started.enter_context(LineProgram(words, tmp_path / "log", PYTHONPATH=PATHS))

        yield start


def status_of(client):
    return json.loads(client.ask(""))


@pytest.mark.parametrize("world", ["sync", "aio"])
def test_a_client_that_was_stopped_keeps_its_connection(world, server, start_client):
    """As by suspend, a debugger, or a paused container."""
    client = start_client(world, server.target)
    assert status_of(client)["number"] == 1  # it has started
    assert wait_until(lambda: status_of(client)["answered"] > 0)
    before = status_of(client)["answered"]
    client.process.send_signal(signal.SIGSTOP)
    time.sleep(PAUSE)
    client.process.send_signal(signal.SIGCONT)
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
