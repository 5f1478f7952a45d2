"""The sockets of the process: which are found, their kernel state, and which are a server's."""

import fcntl
import os
import socket
import threading
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path

import pytest

from fixtures.idle_server import sockets_at
from fixtures.leaks import descriptors
from fixtures.programs import run_program
from fixtures.timers import run_threads
from fixtures.waiting import wait_until
from rpcwheel.idle import sockets
from rpcwheel.idle.sockets import (
    SUPPORTED,
    DescriptorSlot,
    ServerPorts,
    SocketInfo,
    find_sockets,
    parse_peer,
)

pytestmark = pytest.mark.skipif(not SUPPORTED, reason="sockets are found on Linux only")


@contextmanager
def connected():
    """A connection of which this process has both ends; gives the server's and the client's."""
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as client,
        listener.accept()[0] as server,
    ):
        yield server, client


def port_of(sock: socket.socket) -> int:
    return sock.getsockname()[1]


def info_of(sock: socket.socket) -> SocketInfo:
    (info,) = [one for one in sockets_at(port_of(sock)) if one.descriptor == sock.fileno()]
    return info


@contextmanager
def duplicate(sock: socket.socket):
    with closing(DescriptorSlot()) as slot:
        one = slot.duplicate(sock.fileno())
        yield one
        slot.release(one)


def reset_on_close(sock: socket.socket) -> None:
    """Let `close()` reset the connection, so that its addresses are free at once."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")


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


def test_the_peer_that_grpc_gives_is_parsed_as_an_address_or_none():
    wrong = [(peer, parse_peer(peer)) for peer, wanted in PEERS if parse_peer(peer) != wanted]
    assert not wrong


# --- The scan ------------------------------------------------------------------------------------


def test_only_tcp_connections_are_found():
    with ExitStack() as stack, connected() as (server, client):
        enter = stack.enter_context
        datagrams = enter(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        datagrams.connect(("127.0.0.1", 9))
        for sock in socket.socketpair():
            enter(sock)
        listener = enter(socket.create_server(("127.0.0.1", 0)))
        enter(socket.socket())  # neither connected nor listening
        for end in os.pipe():
            stack.callback(os.close, end)
        ours = {port_of(sock) for sock in (datagrams, server, client, listener)}
        listening = set()
        slot = enter(closing(DescriptorSlot()))
        found = find_sockets(lambda _, local: local in ours, slot, listening)
        ends = [(sock.getpeername(), sock.getsockname()) for sock in (server, client)]
        assert sorted((one.peer, one.local) for one in found) == sorted(ends)
        assert listener.getsockname() in listening


def test_a_scan_leaves_no_descriptor_open():
    with ExitStack() as stack, connected():
        stack.enter_context(Path(os.devnull).open())
        for sock in socket.socketpair():
            stack.enter_context(sock)
        before = descriptors()
        for _ in range(50):
            with closing(DescriptorSlot()) as slot:
                find_sockets(lambda peer, local: True, slot)
                with suppress(ZeroDivisionError):
                    find_sockets(lambda peer, local: 1 / 0, slot)
        assert descriptors() <= before


def test_scans_may_run_while_connections_come_and_go():
    over = threading.Event()

    def churn() -> None:
        for _ in range(100):
            with connected():
                pass
        over.set()

    def scan() -> None:
        with closing(DescriptorSlot()) as slot:
            while not over.is_set():
                find_sockets(lambda peer, local: True, slot)

    before = descriptors()
    run_threads(churn, scan, scan)
    assert descriptors() <= before


def test_a_scan_releases_no_locks_of_files(tmp_path):
    """Closing any duplicate of a file would (fcntl(2))."""
    path = tmp_path / "locked"
    with path.open("w") as file:
        fcntl.lockf(file, fcntl.LOCK_EX)
        sockets_at(0)
        assert run_program(LOCK, str(path))[0] == "locked\n"


LOCK = """
import fcntl, sys

with open(sys.argv[1], "w") as file:
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print("locked")
"""


def test_a_scan_does_not_change_whether_sockets_block():
    with connected() as (server, _):
        socket.setdefaulttimeout(5)
        try:
            assert sockets_at(port_of(server))
        finally:
            socket.setdefaulttimeout(None)
        assert os.get_blocking(server.fileno())


def test_a_descriptor_that_is_reused_is_not_the_connection_that_was_opened():
    with connected() as (server, client), connected() as (other, stranger):
        number = server.fileno()
        with duplicate(server) as one:
            os.dup2(other.fileno(), number)  # as if gRPC had closed it and accepted another
            one.shutdown()
        assert client.recv(1) == b""
        stranger.sendall(b"x")
        assert other.recv(1) == b"x"


def test_the_module_can_be_imported_on_other_systems():
    for platform in ("darwin", "win32"):
        program = (
            f"import sys, socket; sys.platform = {platform!r}; "
            "sys.modules['fcntl'] = sys.modules['termios'] = "
            "None if sys.platform == 'win32' else sys; "
            "del socket.SOCK_NONBLOCK, socket.TCP_INFO, socket.MSG_DONTWAIT\n"
            f"exec(compile(open({sockets.__file__!r}).read(), 'sockets', 'exec'))\n"
            "assert not SUPPORTED and parse_peer('ipv4:1.2.3.4:5') == ('1.2.3.4', 5)\n"
        )
        run_program(program)


# --- The state in the kernel ---------------------------------------------------------------------


def test_bytes_and_times_of_a_connection_are_read():
    with connected() as (server, client):
        assert wait_until(lambda: info_of(server).received_ago_ns > 5e7)  # since it began
        assert wait_until(lambda: info_of(server).sent_ago_ns > 5e7)
        assert (info_of(server).bytes_in, info_of(server).bytes_out) == (0, 0)
        server.sendall(b"123")
        info = info_of(server)
        assert info.sent_ago_ns < info.received_ago_ns
        client.sendall(b"12345")
        assert client.recv(3, socket.MSG_WAITALL) == b"123"
        assert server.recv(5, socket.MSG_WAITALL) == b"12345"
        assert wait_until(lambda: (info_of(server).bytes_in, info_of(server).bytes_out) == (5, 3))


def test_unread_bytes_are_counted():
    with connected() as (server, client), duplicate(server) as one:
        assert one.unread() == 0
        client.sendall(b"12345")
        assert wait_until(lambda: one.unread() == 5)
        server.recv(2)
        assert one.unread() == 3


@contextmanager
def connected_to_a_full_client():
    """As `connected`; the client takes less than the server can send."""
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(listener.getsockname())
        with listener.accept()[0] as server:
            yield server, client


def test_bytes_that_the_peer_has_not_acknowledged_are_counted():
    with connected_to_a_full_client() as (server, _), duplicate(server) as one:
        assert one.unsent() == 0
        server.send(bytes(40_000))
        assert one.unsent() > 0


def test_a_connection_that_is_gone_has_no_bytes_and_may_be_shut_down_again():
    with connected() as (server, client), duplicate(server) as one:
        reset_on_close(client)
        client.close()
        one.shutdown()
        one.shutdown()
        assert (one.unread(), one.unsent(), sockets_at(port_of(server))) == (0, 0, [])


@pytest.mark.parametrize("connect", [connected, connected_to_a_full_client])
def test_a_connection_that_was_shut_down_is_not_found_before_its_descriptor_is_closed(connect):
    with connect() as (server, client), duplicate(server) as one:
        server.send(bytes(40_000))
        one.shutdown()
        if connect is connected:
            while client.recv(40_000):
                pass
        found = sockets_at(port_of(server))
        assert [info.descriptor for info in found if info.descriptor == server.fileno()] == []


# --- The sockets of a server ---------------------------------------------------------------------

HERE, THERE, V6 = (("127.0.0.1", 50051), ("127.0.0.2", 50051), ("::1", 50051))
ALL_V4, ALL = ("0.0.0.0", 50051), ("::", 50051)


def test_ports_are_given_as_grpc_takes_them():
    for given, hosts in (
        (50051, {None}),
        ("[::]:50051", {None}),
        ("0.0.0.0:50051", {None}),
        ("shop.example:50051", {None}),
        ("localhost:50051", {"127.0.0.1", "::1"}),
        ("ipv4:127.0.0.1:50051", {"127.0.0.1"}),
        ("ipv6:[::1]:50051", {"::1"}),
        ("dns:///[::1]:50051", {"::1"}),
        ({50051}, {None}),
    ):
        assert ServerPorts.parse(given) == ({(host, 50051) for host in hosts}, ()), given
        assert ServerPorts.parse(given).numbers == {50051}, given
    assert ServerPorts.parse([50051, "[::]:50052", "unix:/run/shop.sock"]) == (
        {(None, 50051), (None, 50052)},
        ("unix:/run/shop.sock",),
    )
    assert ServerPorts.parse(1) == (frozenset(), ("a unix socket",))  # what gRPC returns for one
    assert ServerPorts.parse(None).tcp is None


def test_which_sockets_are_the_servers():
    """A port means the only address at which the process listens on it, or where a call came in."""
    for given, listening, learned, expected in (
        (50051, {HERE}, set(), {HERE}),
        (50051, {V6}, set(), {V6}),
        (50051, {ALL_V4}, set(), {HERE, THERE}),
        (50051, {ALL}, set(), {HERE, THERE, V6}),
        (50051, {HERE, ("127.0.0.2", 50052)}, set(), {HERE}),
        (50051, {HERE, THERE}, set(), set()),
        (50051, set(), set(), set()),
        (50051, {HERE, THERE}, {THERE}, {THERE}),
        ("127.0.0.1:50051", {HERE, THERE}, set(), {HERE}),
        ("127.0.0.1:50052", {HERE}, set(), set()),
        (None, {HERE, THERE}, {HERE}, {HERE}),
        (None, {HERE}, set(), set()),
    ):
        ports = ServerPorts.parse(given)
        own = {local for local in (HERE, THERE, V6) if ports.has(local, learned, listening)}
        assert own == expected, (given, listening, learned)
