"""Whose sockets are found, what is asked of them, and what closing one does to gRPC."""

import fcntl
import os
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from fixtures.leaks import descriptors
from fixtures.timers import run_threads
from fixtures.waiting import wait_until
from rpcwheel.idle import peers
from rpcwheel.idle.peers import open_sockets, parse_peer

pytestmark = pytest.mark.skipif(not peers.SUPPORTED, reason="sockets are found on Linux only")


def found(port: int) -> list[str]:
    return sorted(found.text for found in open_sockets(lambda peer, local: local == port))


@contextmanager
def connected(host: str = "127.0.0.1"):
    """A connection of which this process has both ends; gives the server's and the client's."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with (
        socket.create_server((host, 0), family=family) as listener,
        socket.create_connection(listener.getsockname()[:2]) as client,
        listener.accept()[0] as server,
    ):
        yield server, client


def port_of(sock: socket.socket) -> int:
    return sock.getsockname()[1]


@contextmanager
def look_at(sock: socket.socket):
    """The connection as it is found; `sock` is its end."""
    here = sock.getpeername()[1], port_of(sock)
    search = open_sockets(lambda peer, local: (peer[1], local) == here)
    yield next(search)
    search.close()


# --- Names ---------------------------------------------------------------------------------------


PEERS = [
    ("ipv4:127.0.0.1:50296", ("127.0.0.1", 50296)),
    ("ipv6:%5B::1%5D:41232", ("::1", 41232)),
    ("ipv6:[::1]:41232", ("::1", 41232)),
    ("ipv6:%5Bfe80::fc:ff:fe00:1%254%5D:50468", ("fe80::fc:ff:fe00:1", 50468)),
    ("ipv6:%5B::ffff:127.0.0.1%5D:7", ("127.0.0.1", 7)),
    ("ipv6:%5B2001:0DB8:0:0::1%5D:7", ("2001:db8::1", 7)),
    ("unix:", None),
    ("unix:/run/x.sock", None),
    ("", None),
    ("ipv4:", None),
    ("ipv4:127.0.0.1", None),
    ("ipv4:127.0.0.1:", None),
    ("ipv4:127.0.0.1:x", None),
    ("ipv4:127.0.0.256:1", None),
    ("ipv6:%5Bfe80::x%5D:1", None),
    ("vsock:2:3", None),
]


def test_the_peer_of_grpc_is_read_as_an_address_or_as_none():
    wrong = [(peer, parse_peer(peer)) for peer, wanted in PEERS if parse_peer(peer) != wanted]
    assert not wrong


# --- The scan ------------------------------------------------------------------------------------


def test_only_connections_of_tcp_are_given():
    with ExitStack() as stack, connected() as (server, client):
        enter = stack.enter_context
        datagrams = enter(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        datagrams.connect(("127.0.0.1", 9))
        for sock in socket.socketpair():
            enter(sock)
        listener = enter(socket.create_server(("127.0.0.1", 0)))
        enter(socket.socket())  # neither connected nor listening
        stack.enter_context(Path(os.devnull).open())
        for end in os.pipe():
            stack.callback(os.close, end)
        ours = {port_of(sock) for sock in (datagrams, server, client, listener)}
        got = [(s.peer, s.local[1]) for s in open_sockets(lambda peer, local: local in ours)]
        ends = [(sock.getpeername(), port_of(sock)) for sock in (server, client)]
    assert sorted(got) == sorted(ends)


def test_a_scan_leaves_no_descriptor_open_whatever_it_meets():
    with ExitStack() as stack, connected():
        stack.enter_context(Path(os.devnull).open())
        for sock in socket.socketpair():
            stack.enter_context(sock)
        before = descriptors()
        for _ in range(50):
            list(open_sockets(lambda peer, local: True))
            list(open_sockets(lambda peer, local: False))
            next(open_sockets(lambda peer, local: True))  # and then no further
            with suppress(ZeroDivisionError):
                list(open_sockets(lambda peer, local: 1 / 0))
        assert descriptors() == before


def test_a_scan_takes_no_locks_from_files(tmp_path):
    """Closing any duplicate of a file would (fcntl(2))."""
    path = tmp_path / "locked"
    with path.open("w") as file:
        fcntl.lockf(file, fcntl.LOCK_EX)
        list(open_sockets(lambda peer, local: True))
        taken = f"import fcntl; fcntl.lockf(open({str(path)!r}, 'w'), fcntl.LOCK_EX|fcntl.LOCK_NB)"
        other = subprocess.run([sys.executable, "-c", taken], capture_output=True, check=False)
    assert b"BlockingIOError" in other.stderr


def test_a_scan_leaves_sockets_as_blocking_as_they_were():
    with connected() as (server, _):
        socket.setdefaulttimeout(5)
        try:
            assert found(port_of(server))
        finally:
            socket.setdefaulttimeout(None)
        assert os.get_blocking(server.fileno())


def test_a_descriptor_that_is_reused_meanwhile_is_not_the_one_that_was_found():
    with connected() as (server, client), connected() as (other, stranger):
        number = server.fileno()
        with look_at(server) as it:
            os.dup2(other.fileno(), number)  # as if gRPC had closed it and accepted another
            it.shutdown()
        assert client.recv(1) == b""
        stranger.sendall(b"x")
        assert other.recv(1) == b"x"


def test_another_connection_between_the_same_addresses_is_told_apart():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        inodes = []
        port = 0
        for _ in range(2):
            with socket.socket() as client:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                client.bind(("127.0.0.1", port))
                port = port_of(client)
                client.connect(listener.getsockname())
                with listener.accept()[0] as server, look_at(server) as it:
                    assert it.peer == ("127.0.0.1", port)
                    inodes.append(it.inode)
                # reset, or the pair of addresses would stay taken for a minute
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    assert len(set(inodes)) == 2


def test_scans_may_run_while_connections_come_and_go():
    over = threading.Event()

    def churn() -> None:
        for _ in range(100):
            with connected():
                pass
        over.set()

    def scan() -> None:
        while not over.is_set():
            for each in open_sockets(lambda peer, local: True):
                each.info()
                each.unread()

    before = descriptors()
    run_threads(churn, scan, scan)
    assert descriptors() == before


def test_where_sockets_cannot_be_looked_up_none_is_found(monkeypatch):
    with connected() as (server, _):
        monkeypatch.setattr(peers, "SUPPORTED", False)
        assert found(port_of(server)) == []


def test_other_systems_import_it_and_are_told_that_it_is_not_supported():
    for platform in ("darwin", "win32"):
        program = (
            f"import sys, socket; sys.platform = {platform!r}; "
            "sys.modules['fcntl'] = sys.modules['termios'] = "
            "None if sys.platform == 'win32' else sys; "
            "del socket.SOCK_NONBLOCK, socket.TCP_INFO, socket.MSG_DONTWAIT\n"
            f"exec(compile(open({peers.__file__!r}).read(), 'peers', 'exec'))\n"
            "assert not SUPPORTED and parse_peer('ipv4:1.2.3.4:5') == ('1.2.3.4', 5)\n"
            "assert list(open_sockets(print)) == []"
        )
        subprocess.run([sys.executable, "-c", program], check=True)


# --- What the kernel knows -----------------------------------------------------------------------


def info_of(sock: socket.socket):
    with look_at(sock) as it:
        return it.info()


def test_bytes_and_times_of_a_connection_are_read():
    with connected() as (server, client):
        assert wait_until(lambda: info_of(server).received_ago_s > 0.05)  # since it began
        assert wait_until(lambda: info_of(server).sent_ago_s > 0.05)
        fresh = info_of(server)
        assert (fresh.bytes_in, fresh.bytes_out) == (0, 0)
        before = time.monotonic()
        client.sendall(b"12345")
        server.sendall(b"123")
        assert client.recv(3, socket.MSG_WAITALL) == b"123"
        assert server.recv(5, socket.MSG_WAITALL) == b"12345"

        def counted() -> bool:
            info = info_of(server)
            return (info.bytes_in, info.bytes_out) == (5, 3)

        assert wait_until(counted)
        info = info_of(server)
        assert info.received_ago_s <= time.monotonic() - before + 0.01
        assert info.sent_ago_s <= time.monotonic() - before + 0.01


def test_received_and_sent_are_told_apart():
    with connected() as (server, _):
        assert wait_until(lambda: info_of(server).received_ago_s > 0.1)
        server.sendall(b"x")
        info = info_of(server)
        assert info.sent_ago_s < info.received_ago_s - 0.05


def test_what_waits_to_be_read_is_counted():
    with connected() as (server, client), look_at(server) as it:
        assert it.unread() == 0
        client.sendall(b"12345")
        assert wait_until(lambda: it.unread() == 5)
        server.recv(2)
        assert it.unread() == 3


def test_what_the_peer_has_not_taken_is_counted_and_nothing_is_put_behind_it():
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(listener.getsockname())
        with listener.accept()[0] as server, look_at(server) as it:
            assert it.unsent() == 0
            server.send(bytes(40_000))  # there is room for more
            assert it.unsent() > 0
            assert not it.goaway()


def test_a_connection_that_is_gone_answers_nothing_and_may_be_closed_again():
    with connected() as (server, client), look_at(server) as it:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        client.close()
        it.shutdown()
        it.shutdown()
        assert (it.unread(), it.unsent(), it.goaway()) == (0, 0, False)
        assert found(port_of(server)) == []
