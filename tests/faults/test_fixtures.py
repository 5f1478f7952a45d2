"""What no user of these fixtures would see go wrong: what they leave behind, and half a fault."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from fixtures.engine_etcd import EtcdEngine
from fixtures.engines import engine_fixture
from fixtures.listeners import listen
from fixtures.processes import has_ended
from fixtures.proxy import TO_CLIENT, TO_SERVER, open_proxy
from fixtures.waiting import WAIT_S, wait_until

__all__ = ["listen", "open_proxy"]

# Engines

etcd = engine_fixture(EtcdEngine, scope="function")


def test_a_frozen_engine_is_removed_completely(etcd):
    etcd.freeze()
    etcd.close()
    assert not etcd.running
    assert not etcd.directory.exists()


class Absent(EtcdEngine):
    program = "no-such-program"
    package = "no-such-package"


class Broken(EtcdEngine):
    def command(self) -> list[str]:
        return ["sh", "-c", "echo no such flag; exit 2"]


def test_a_missing_engine_skips_its_test_and_one_that_does_not_start_is_an_error():
    missing = r"no-such-program is not installed \(Debian: apt-get install no-such-package\)"
    with pytest.raises(pytest.skip.Exception, match=missing):
        Absent().__enter__()
    with pytest.raises(RuntimeError, match="no such flag"):
        Broken().__enter__()


# Server processes


def test_a_frozen_server_process_ends_with_its_parent_process():
    script = (
        "import sys, time; sys.path.insert(0, sys.argv[1])\n"
        "from fixtures.server_process import KillableServer\n"
        "server = KillableServer(); server.stop()\n"
        "print(server.pid, flush=True); time.sleep(600)\n"
    )
    tests = str(Path(__file__).parents[1])
    command = [sys.executable, "-c", script, tests]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        pid = int(process.stdout.readline())
        assert not has_ended(pid)
        os.kill(process.pid, signal.SIGKILL)
    assert wait_until(lambda: has_ended(pid))


# The proxy


@pytest.fixture
def ended():
    """How the connections to `echo` have ended."""
    return []


@pytest.fixture
def echo(listen, ended):
    """Answers each connection with its own bytes, until that ends."""

    def talk(sock):
        try:
            while piece := sock.recv(65536):
                sock.sendall(piece)
            ended.append("FIN")
        except ConnectionResetError:
            ended.append("RST")

    return listen(talk)


@pytest.fixture
def proxy(echo, open_proxy):
    return open_proxy(echo.target)


@pytest.fixture
def connect(proxy, closed_later):
    host, port = proxy.target.rsplit(":", 1)
    return lambda: closed_later(socket.create_connection((host, int(port)), WAIT_S))


def ask(sock):
    sock.sendall(b"x")
    return sock.recv(100)


@pytest.mark.parametrize("direction", [TO_SERVER, TO_CLIENT])
def test_a_half_open_connection_passes_on_the_other_direction(proxy, connect, direction):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        proxy.to(f"127.0.0.1:{listener.getsockname()[1]}")
        client = connect()
        server, _ = listener.accept()
        with server:
            proxy.half_open(direction)
            sender, receiver = (server, client) if direction == TO_SERVER else (client, server)
            receiver.sendall(b"swallowed")
            sender.sendall(b"passed")
            assert receiver.recv(10) == b"passed"


def test_a_reset_is_seen_as_one_on_both_sides(proxy, connect, ended):
    sock = connect()
    assert ask(sock) == b"x"
    proxy.reset()
    with pytest.raises(ConnectionResetError):
        sock.recv(1)
    assert wait_until(lambda: ended == ["RST"])
    assert wait_until(lambda: proxy.connections == 0)
    assert ask(connect()) == b"x"
