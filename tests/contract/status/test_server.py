"""The live view over HTTP."""

import http.client
import json
import os
import re
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from http import HTTPStatus
from itertools import product

import pytest

import rpcwheel
from fixtures.forks import holds_in_child
from fixtures.programs import run_program
from fixtures.waiting import WAIT_S, in_thread, wait_until
from rpcwheel import ConfigurationError, Kit, status
from rpcwheel.status import server as server_module
from rpcwheel.status.server import MAX_CONNECTIONS, MAX_HEAD_BYTES, StatusServer
from rpcwheel.telemetry import components

TOKEN = "correct-horse-battery"


@pytest.fixture
def server():
    with StatusServer(0) as server:
        yield server


@pytest.fixture
def guarded():
    """A server at all addresses, which needs a token."""
    with StatusServer(0, "0.0.0.0", TOKEN) as server:
        yield server


def get(server, path="/", method="GET", **headers):
    """Request a path; return the answer and its body."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=WAIT_S)
    with closing(connection):
        connection.putrequest(method, path, skip_host="Host" in headers)
        for name, value in headers.items():
            connection.putheader(name, value)
        connection.endheaders()
        answer = connection.getresponse()
        return answer, answer.read()


def exchange(server, data: bytes) -> bytes:
    """Send bytes, and return all that comes until the server closes the connection."""
    with connect(server) as client:
        client.sendall(data)
        return received(client)


def connect(server) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), WAIT_S)


def received(client) -> bytes:
    data = b""
    while True:
        try:
            more = client.recv(65536)
        except ConnectionResetError:
            return data
        if not more:
            return data
        data += more


def test_the_page_allows_only_its_own_script_and_style(server):
    answer, body = get(server)
    assert answer.status == 200
    assert answer.getheader("Content-Type") == "text/html; charset=utf-8"
    policy = answer.getheader("Content-Security-Policy")
    assert "default-src 'none'; script-src 'sha256-" in policy
    assert "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy
    assert not re.search(rb"(?:src|href)=.?(?:https?:)?//", body)
    assert b"innerHTML" not in body
    assert not re.search(rb"\son\w+=|\sstyle=", body)


def test_the_status_is_json(server):
    answer, body = get(server, "/status.json")
    assert answer.status == 200
    assert answer.getheader("Content-Type") == "application/json"
    assert json.loads(body)["pid"] == os.getpid()


def test_no_answer_may_be_cached_or_read_by_other_origins(server):
    for path in ("/", "/status.json", "/metrics", "/other"):
        answer, _ = get(server, path, Origin="http://evil.example")
        assert answer.getheader("Cache-Control") == "no-store"
        assert answer.getheader("X-Content-Type-Options") == "nosniff"
        assert answer.getheader("Cross-Origin-Resource-Policy") == "same-origin"
        assert not [name for name in answer.headers if name.lower().startswith("access-control")]


def test_metrics_are_the_exposition_of_prometheus(server):
    pytest.importorskip("prometheus_client")
    answer, body = get(server, "/metrics")
    assert answer.status == 200
    assert answer.getheader("Content-Type").startswith("text/plain; version=")
    assert b"# TYPE " in body
    openmetrics, body = get(server, "/metrics", Accept="application/openmetrics-text")
    assert openmetrics.getheader("Content-Type").startswith("application/openmetrics-text")
    assert body.endswith(b"# EOF\n")


def test_without_prometheus_metrics_say_what_to_install(server, monkeypatch):
    monkeypatch.setattr(status, "exposition", None)  # as if the process began now
    answer, body = get(server, "/metrics")
    assert answer.status == 501
    assert b"pip install 'rpcwheel[prometheus]'" in body


def test_only_three_paths_exist_and_a_query_changes_none(server):
    for path in ("/other", "/status.json/", "/../etc/passwd", "/%2e%2e"):
        answer, body = get(server, path)
        assert (answer.status, body) == (404, b"there are /, /metrics, /status.json\n")
    assert get(server, "/status.json?x=1")[0].status == 200


def test_head_has_the_headers_of_get_and_no_body(server):
    answer, body = get(server, "/", "HEAD")
    assert answer.status == 200
    assert body == b""
    assert int(answer.getheader("Content-Length")) == len(get(server)[1])


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "TRACE", "CONNECT", "X"])
def test_only_get_and_head_are_allowed(server, method):
    answer, _ = get(server, "/", method)
    assert answer.status == 405
    assert answer.getheader("Allow") == "GET, HEAD"


LOOPBACK = ["localhost", "LOCALHOST:9090", "127.0.0.1:1", "127.1.2.3", "[::1]:9090"]
OTHERS = [
    *("evil.example", "evil.example:9090", "localhost.evil.example", "127.0.0.1.evil.example"),
    *("10.0.0.1", "0.0.0.0", "", "localhost@evil.example"),
]


@pytest.mark.parametrize("host", [*LOOPBACK, *OTHERS])
def test_the_host_must_be_the_loopback(server, host):
    for path in ("/", "/status.json", "/metrics", "/other"):
        answer, _ = get(server, path, Host=host)
        assert (answer.status == 403) is (host in OTHERS)


def test_with_a_token_data_need_it_and_the_page_does_not(guarded):
    wrong = ["", "Bearer", "Bearer x", f"Basic {TOKEN}", f"Bearer {TOKEN}x", TOKEN]
    for path, authorization in product(("/status.json", "/metrics", "/other"), wrong):
        answer, body = get(guarded, path, Authorization=authorization)
        assert answer.status == 401
        assert answer.getheader("WWW-Authenticate") == "Bearer"
        assert TOKEN.encode() not in body
    for scheme in ("Bearer", "bearer"):  # then any host may be named
        headers = {"Authorization": f"{scheme} {TOKEN}", "Host": "orders.example:9090"}
        assert get(guarded, "/status.json", **headers)[0].status == 200
    assert get(guarded, f"/status.json?token={TOKEN}")[0].status == 401
    assert get(guarded)[0].status == 200


def test_requests_and_the_token_are_not_logged(guarded, caplog, capfd):
    caplog.set_level("DEBUG")
    get(guarded, f"/status.json?token={TOKEN}", Authorization=f"Bearer {TOKEN}")
    exchange(guarded, b"\xff\x00 nonsense\r\n\r\n")
    assert caplog.records == []
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"nonsense\r\n\r\n", 400),
        (b"GET /\r\n\r\n", 403),  # it has no Host
        (b"GET / HTTP/1.1\r\nAccept: */*\r\n\r\n", 403),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n", 403),
        (b"GET / HTTP/0.9\r\n\r\n", 403),
        (b"GET / HTTP/3.0\r\n\r\n", 505),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505),
        (b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 200 + b"\r\n", 431),
        (b"GET / HTTP/1.1\r\na: " + b"x" * 2 * MAX_HEAD_BYTES, 431),
        (b"GET /" + b"x" * 2 * MAX_HEAD_BYTES, 414),
        (b"\x16\x03\x01\x02\x00\r\n\r\n", 400),  # the beginning of TLS
        (b"GET <script>alert(1)</script> HTTP/1.1\r\n\r\n", 403),
        (b"GET http://[ HTTP/1.1\r\nHost: localhost\r\n\r\n", 404),  # it is no URL
    ],
)
def test_invalid_requests_get_an_error_as_plain_text(server, caplog, data, status):
    answer = exchange(server, data)
    assert answer.startswith(b"HTTP/1.0 %d " % status)
    assert b"text/html" not in answer
    assert caplog.text == ""
    assert get(server)[0].status == 200


def test_a_client_that_sends_slowly_is_disconnected(set_limit):
    set_limit("status.server.TIMEOUT_S", 0.2)
    with StatusServer(0) as server:
        with connect(server) as client:
            client.sendall(b"GET / HT")
            assert received(client) == b""
        wait_until(lambda: not server._http.connections)


def test_a_client_that_reads_nothing_is_disconnected(monkeypatch, set_limit):
    big = server_module.Answer(server_module.HTTPStatus.OK, b"x" * 100_000_000)
    monkeypatch.setattr(server_module, "PATHS", {"/": lambda _: big})
    set_limit("status.server.TIMEOUT_S", 0.2)
    with StatusServer(0) as server, connect(server) as client:
        client.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        with suppress(ConnectionError):
            client.recv(1)  # it answers
        wait_until(lambda: not server._http.connections)


def test_connections_without_a_request_do_not_prevent_others(server):
    held = [connect(server) for _ in range(MAX_CONNECTIONS)]
    wait_until(lambda: len(server._http.connections) == MAX_CONNECTIONS)
    assert get(server)[0].status == 200
    assert received(held[0]) == b""  # the oldest one
    for one in held:
        one.close()
    wait_until(lambda: not server._http.connections)


def test_too_many_requests_are_refused_until_one_ends(server, monkeypatch):
    running, go_on = threading.Semaphore(0), threading.Event()

    def wait(_):
        running.release()
        go_on.wait(WAIT_S)
        return server_module.Answer(HTTPStatus.OK, b"")

    monkeypatch.setitem(server_module.PATHS, "/", wait)
    with ThreadPoolExecutor(MAX_CONNECTIONS) as pool:
        answers = [pool.submit(get, server) for _ in range(MAX_CONNECTIONS)]
        for _ in answers:
            assert running.acquire(timeout=WAIT_S)
        with connect(server) as one_more:
            assert received(one_more).startswith(b"HTTP/1.0 503 ")
        go_on.set()
        assert {one.result(WAIT_S)[0].status for one in answers} == {200}
    wait_until(lambda: not server._http.connections)
    assert get(server)[0].status == 200


def test_an_exception_is_logged_and_the_server_continues(server, monkeypatch, caplog):
    def fail(_):
        raise ValueError("a bug")

    with monkeypatch.context() as patch:
        patch.setitem(server_module.PATHS, "/", fail)
        assert get(server)[0].status == 500
    assert "a bug" in caplog.text
    assert get(server)[0].status == 200


def test_kits_with_the_same_fixed_port_share_the_live_view():
    host = "127.0.0.77"  # where no other test listens
    with socket.create_server((host, 0)) as free:
        port = free.getsockname()[1]
    settings = {"status_port": port, "status_host": host}
    with rpcwheel.Kit(**settings) as one, rpcwheel.Kit(**settings) as other:
        assert one.status_address == other.status_address
        one.close()
        one.close()
        assert one.status_address is None
        with socket.create_connection((host, port), WAIT_S):
            pass
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, port), WAIT_S)


def test_close_ends_threads_connections_and_the_port(server):
    client = connect(server)
    with client:
        wait_until(lambda: server._http.connections)
        server.close()
        assert received(client) == b""
    wait_until(lambda: not [t for t in threading.enumerate() if t.name == "rpcwheel-status"])
    with pytest.raises(ConnectionRefusedError):
        connect(server)
    server.close()
    assert server.closed


def test_a_server_that_is_dropped_warns_and_closes():
    server = StatusServer(0)
    port = server.port
    with pytest.warns(ResourceWarning, match="dropped and not closed"):
        del server
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), WAIT_S)


JOIN_OF_CPYTHON_3_14 = """
import sys, threading

def join(thread, timeout=None, join=threading.Thread.join):
    if sys.is_finalizing():
        raise RuntimeError("cannot join thread at interpreter shutdown")
    join(thread, timeout)

threading.Thread.join = join
"""

UNCLOSED = f"""
exec({JOIN_OF_CPYTHON_3_14!r}, {{}})  # not among the names of this module, which it would keep
import warnings
from rpcwheel.status.server import StatusServer
warnings.simplefilter("ignore", ResourceWarning)
server = StatusServer(0)
"""


def test_a_program_that_does_not_close_the_live_view_exits_without_errors():
    assert run_program(UNCLOSED) == ("", "")


def test_a_port_in_use_is_refused(server):
    with pytest.raises(ConfigurationError, match=rf"port {server.port}: Address already in use"):
        StatusServer(server.port)
    with pytest.raises(ConfigurationError, match=f"port {server.port}: "):
        Kit(status_port=server.port)


def test_an_ipv6_address_is_served():
    try:
        server = StatusServer(0, "::1")
    except ConfigurationError:
        pytest.skip("this machine has no IPv6")
    with server:
        assert server.address == f"[::1]:{server.port}"
        with socket.create_connection(("::1", server.port), WAIT_S) as client:
            client.sendall(f"GET / HTTP/1.1\r\nHost: {server.address}\r\n\r\n".encode())
            assert received(client).startswith(b"HTTP/1.0 200 ")


def test_a_forked_child_closes_its_copies_of_the_sockets(server):
    with connect(server):
        wait_until(lambda: server._http.connections)
        sockets = (server._http.socket, *server._http.connections)
        assert holds_in_child(lambda: server.closed and all(one.fileno() == -1 for one in sockets))
    assert get(server)[0].status == 200


def test_a_kit_closes_while_another_kit_looks_up_its_host(monkeypatch):
    looks_up, over, known = threading.Event(), threading.Event(), socket.getaddrinfo

    def look_up(host, *args, **options):
        if host != "slow":
            return known(host, *args, **options)
        looks_up.set()
        assert over.wait(WAIT_S)
        raise OSError("unknown host")

    kit = Kit(status_port=0)
    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    other = in_thread(Kit, status_port=0, status_host="slow", status_token=TOKEN)
    assert looks_up.wait(WAIT_S)
    try:
        in_thread(kit.close).result(WAIT_S)
        assert holds_in_child(lambda: Kit(status_port=0).status_address)
    finally:
        over.set()
    with pytest.raises(ConfigurationError, match="unknown host"):
        other.result(WAIT_S)


def test_a_kit_serves_its_status_until_it_is_closed(world):
    kit = world.keep(world.do(world.api.Kit, status_port=0))
    host, port = kit.status_address.split(":")
    with socket.create_connection((host, int(port)), WAIT_S) as client:
        client.sendall(b"GET /status.json HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert b"200 OK" in received(client)
    world.do(kit.close)
    assert kit.status_address is None
    without_a_port = {"status_token": TOKEN, "status_host": "0.0.0.0"}
    assert world.keep(world.do(world.api.Kit, **without_a_port)).status_address is None
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, int(port)), WAIT_S)


def test_a_kit_with_a_status_counts_calls(world, monkeypatch):
    monkeypatch.setattr(components._COMPONENTS, "counts", None)
    monkeypatch.setattr(components._COMPONENTS, "_on_first", [])  # as without the extras
    world.keep(world.do(world.api.Kit, status_port=0))
    assert components.call_counts() is not None


def test_an_error_or_a_repr_does_not_contain_the_token():
    for token in ("swordfish", 1234567, ["swordfish"], "swordfish ü" * 3):
        with pytest.raises((ConfigurationError, TypeError)) as caught:
            Kit(status_token=token)
        assert "swordfish" not in str(caught.value)
        assert "1234567" not in str(caught.value)
    with Kit(status_token=TOKEN) as kit:
        assert TOKEN not in repr(kit) + repr(kit.policy) + kit.policy.model_dump_json()
