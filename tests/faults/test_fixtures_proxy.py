"""The proxy breaks connections in the ways it says, and nothing else."""

import socket
import threading

import pytest

from fixtures.proxy import TO_CLIENT, TO_SERVER, open_proxy  # noqa: F401 - a fixture
from fixtures.waiting import wait_until

SHORT = 0.2
"""Seconds in which nothing comes, where nothing can come."""


class Echo:
    """Answers each connection with its own bytes, until that ends."""

    def __init__(self, name=b""):
        self._name = name
        self._server = socket.create_server(("127.0.0.1", 0))
        self.target = f"127.0.0.1:{self._server.getsockname()[1]}"
        self.ended = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def close(self):
        self._server.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(20)
        self._server.close()

    def _accept(self):
        while True:
            try:
                sock, _ = self._server.accept()
            except OSError:
                return
            self._threads.append(threading.Thread(target=self._serve, args=(sock,)))
            self._threads[-1].start()

    def _serve(self, sock):
        with sock:
            try:
                while piece := sock.recv(65536):
                    sock.sendall(self._name + piece)
                self.ended.append("FIN")
            except ConnectionResetError:
                self.ended.append("RST")


@pytest.fixture
def start_echo():
    started = []

    def start(name=b""):
        started.append(Echo(name))
        return started[-1]

    yield start
    for each in started:
        each.close()


@pytest.fixture
def echo(start_echo):
    return start_echo()


@pytest.fixture
def proxy(echo, open_proxy):  # noqa: F811
    return open_proxy(echo.target)


@pytest.fixture
def connect(proxy):
    made = []

    def one():
        host, port = proxy.target.rsplit(":", 1)
        made.append(socket.create_connection((host, int(port)), 20))
        return made[-1]

    yield one
    for each in made:
        each.close()


def ask(sock, message=b"x"):
    sock.sendall(message)
    return sock.recv(100)


def silent(sock):
    sock.settimeout(SHORT)
    try:
        return not sock.recv(100) and "ended"
    except TimeoutError:
        return True
    finally:
        sock.settimeout(20)


def test_it_forwards_much_both_ways(connect):
    sock = connect()
    sent = bytes(range(256)) * 40_000
    threading.Thread(target=sock.sendall, args=(sent,)).start()
    got = b""
    while len(got) < len(sent):
        got += sock.recv(1 << 20)
    assert got == sent


def test_new_connections_go_where_it_was_told_last_and_old_ones_stay(proxy, connect, start_echo):
    before = connect()
    assert ask(before) == b"x"
    proxy.to(start_echo(b"other ").target)
    assert ask(connect()) == b"other x"
    assert ask(before) == b"x"
    assert (proxy.accepted, proxy.connections) == (2, 2)


def test_an_end_is_passed_on(proxy, connect, echo):
    sock = connect()
    assert ask(sock) == b"x"
    sock.shutdown(socket.SHUT_WR)
    assert sock.recv(1) == b""
    assert wait_until(lambda: echo.ended == ["FIN"])
    assert wait_until(lambda: proxy.connections == 0)


def test_where_nobody_listens_a_connection_is_reset(proxy, connect, start_echo):
    gone = start_echo()
    proxy.to(gone.target)
    gone.close()
    gone.close = lambda: None
    with pytest.raises(ConnectionResetError):
        assert connect().recv(1) is None


def test_a_black_hole_swallows_what_is_open_and_heals(proxy, connect):
    sock = connect()
    proxy.blackhole()
    sock.sendall(b"late")
    assert silent(sock) is True
    assert ask(connect()) == b"x"
    proxy.heal()
    assert sock.recv(100) == b"late"


def test_a_black_hole_may_swallow_new_connections_too(proxy, connect):
    proxy.blackhole(new=True)
    sock = connect()
    sock.sendall(b"late")
    assert silent(sock) is True
    proxy.heal()
    assert sock.recv(100) == b"late"


def test_in_a_black_hole_not_even_an_end_is_seen(proxy, connect, echo):
    sock = connect()
    assert ask(sock) == b"x"
    proxy.blackhole()
    sock.close()
    threading.Event().wait(SHORT)
    assert (echo.ended, proxy.connections) == ([], 1)


@pytest.mark.parametrize("direction", [TO_SERVER, TO_CLIENT])
def test_half_open_stops_one_direction_only(proxy, open_proxy, connect, direction):  # noqa: F811
    with socket.create_server(("127.0.0.1", 0)) as listener:
        proxy.to(f"127.0.0.1:{listener.getsockname()[1]}")
        client = connect()
        server, _ = listener.accept()
        with server:
            proxy.half_open(direction)
            client.sendall(b"up")
            server.sendall(b"down")
            open_end, shut_end = (client, server) if direction == TO_SERVER else (server, client)
            assert open_end.recv(10) == (b"down" if direction == TO_SERVER else b"up")
            assert silent(shut_end) is True


def test_a_reset_is_seen_as_one_on_both_sides(proxy, connect, echo):
    sock = connect()
    assert ask(sock) == b"x"
    proxy.reset()
    with pytest.raises(ConnectionResetError):
        sock.recv(1)
    assert wait_until(lambda: echo.ended == ["RST"])
    assert proxy.connections == 0
    assert ask(connect()) == b"x"


def test_a_drop_is_seen_as_an_end_on_both_sides(proxy, connect, echo):
    sock = connect()
    assert ask(sock) == b"x"
    proxy.drop()
    assert sock.recv(1) == b""
    assert wait_until(lambda: echo.ended == ["FIN"])


def test_closing_it_ends_all_and_may_be_done_twice(proxy, connect):
    sock = connect()
    proxy.blackhole()
    proxy.close()
    proxy.close()
    assert sock.recv(1) == b""
    assert proxy.connections == 0
