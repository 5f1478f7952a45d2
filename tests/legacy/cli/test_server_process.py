"""The handle of a server process: it starts, is heard, dies; what goes wrong is said."""

import os
import socket
from pathlib import Path

import pytest

from rpcwheel.cli.server_process import DemoError, ServerProcess


def test_a_killed_server_is_dead_and_its_port_closed(tmp_path: Path) -> None:
    with ServerProcess(tmp_path / "server") as server:
        assert not server.refuses()
        assert server.kill() == -9
        assert server.refuses()
        assert server.kill() == -9  # nothing left to kill
    with pytest.raises(ProcessLookupError):
        os.kill(server.pid, 0)


def test_a_server_comes_back_on_its_port(tmp_path: Path) -> None:
    with ServerProcess(tmp_path / "first") as first:
        first.kill()
        with ServerProcess(tmp_path / "second", port=first.port) as second:
            assert (second.port, second.refuses()) == (first.port, False)


def test_a_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(DemoError, match=f"port {port}: in use"):
            ServerProcess(tmp_path / "server", port=port)


def test_a_server_that_says_nothing_is_not_waited_for_for_ever(tmp_path: Path) -> None:
    with (
        ServerProcess(tmp_path / "server") as server,
        pytest.raises(DemoError, match=r"did not say 'holding' within 0\.05 s"),
    ):
        server.hear("holding", 0.05)


def test_a_server_that_died_is_not_waited_for(tmp_path: Path) -> None:
    with ServerProcess(tmp_path / "server") as server:
        server.kill()
        with pytest.raises(DemoError, match="ended before it said 'holding'"):
            server.hear("holding", 60.0)


def test_a_server_leaves_when_its_owner_is_gone(tmp_path: Path) -> None:
    with ServerProcess(tmp_path / "server") as server:
        server._process.stdin.close()  # what the kernel does for an owner that was killed
        assert server._process.wait(10.0) == 0
