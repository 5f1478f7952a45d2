"""Targets of the command line: parsing, lookup, and the meaning of a socket's errors."""

import errno
import socket
import threading
from unittest.mock import Mock

import pytest

from fixtures.waiting import WAIT_S
from rpcwheel.cli.findings import Problem
from rpcwheel.cli.target import Address, ServerTarget, connect, explained, parse_target, resolve


def test_targets_of_grpc_are_parsed():
    for text, target in [
        ("localhost:50051", ServerTarget("localhost", 50051)),
        ("[::1]:1", ServerTarget("::1", 1)),
        ("10.0.0.1:65535", ServerTarget("10.0.0.1", 65535)),
        ("dns:///shop.example:443", ServerTarget("shop.example", 443)),
        ("dns:shop:443", ServerTarget("shop", 443)),
        ("dns:/shop:443", ServerTarget("shop", 443)),
        ("ipv4:127.0.0.1:80", ServerTarget("127.0.0.1", 80)),
        ("ipv4:/127.0.0.1:80", ServerTarget("127.0.0.1", 80)),
        ("ipv4:///127.0.0.1:80", ServerTarget("127.0.0.1", 80)),
        ("ipv6:[::1]:80", ServerTarget("::1", 80)),
        ("unix:/run/app.sock", ServerTarget("", 0, "/run/app.sock")),
        ("unix:///run/app.sock", ServerTarget("", 0, "/run/app.sock")),
        ("unix:app.sock", ServerTarget("", 0, "app.sock")),
        ("unix:50051", ServerTarget("unix", 50051)),
        ("dns:50051", ServerTarget("dns", 50051)),
        ("unix:./50051", ServerTarget("", 0, "./50051")),
    ]:
        assert parse_target(text) == target
        assert parse_target(str(target)) == target


def test_an_invalid_target_is_refused_with_a_valid_one():
    for text, message in [
        ("", "has no host"),
        ("shop", "'shop' has no port; give HOST:PORT, such as shop:50051"),
        ("9191", "'9191' has no port; give HOST:PORT, such as 127.0.0.1:9191"),
        (":50051", "has no host"),
        ("shop:", "not ''"),
        ("shop:0", "from 1 to 65535"),
        ("shop:65536", "from 1 to 65535"),
        ("shop:http", "not 'http'"),
        ("shop:²", "from 1 to 65535"),
        ("shop:-1", "from 1 to 65535"),
        ("::1", r"brackets and a port: \[::1\]:50051"),
        ("fe80::1%eth0:50051", r"needs brackets: \[fe80::1%eth0\]:50051"),
        ("[::1]", "has no port; give \\[HOST\\]:PORT"),
        ("http://shop:80/p@q", "^leave out http://, give HOST:PORT$"),
        ("etcd://a:b@c", "^this is the URL of a registry; .*`rpcwheel registry ls URL` lists$"),
        ("unix:", "a Unix socket needs a path"),
        ("unix-abstract:app", "give HOST:PORT.* or unix:/path, not a target of 'unix-abstract'"),
        ("vsock:1:2", "not a target of 'vsock'"),
        ("xds:///shop", "not a target of 'xds'"),
        ("xds", "'xds' has no port; give HOST:PORT, such as xds:50051"),
        ("ipv4:10.0.0.1:80,10.0.0.2:80", "has several addresses; give one HOST:PORT"),
        ("dns://8.8.8.8/shop:80", "leave out the name server; give HOST:PORT, not 'dns://8.8"),
        ("ipv4://10.0.0.1:80", "^give HOST:PORT, not 'ipv4://10"),
        ("dns:////shop:80", "^give one HOST:PORT, not 'dns:////shop:80'"),
        ("shop/x:80", "^give one HOST:PORT, not 'shop/x:80'"),
    ]:
        with pytest.raises(ValueError, match=message):
            parse_target(text)


def test_a_lookup_returns_each_address_once():
    found = resolve(ServerTarget("127.0.0.1", 80), WAIT_S)
    assert found == [Address(socket.AF_INET, ("127.0.0.1", 80))]
    assert resolve(ServerTarget("", 0, "/a"), WAIT_S) == [Address(socket.AF_UNIX, "/a")]


def test_an_unknown_name_is_distinguished_from_a_failed_lookup(monkeypatch):
    for error, said in [
        (socket.gaierror(socket.EAI_NONAME, "not known"), "the name 'shop' is unknown"),
        (socket.gaierror(socket.EAI_AGAIN, "try again"), "the lookup of 'shop' failed for now"),
        (UnicodeError("label too long"), "is unknown .label too long"),
    ]:
        monkeypatch.setattr(socket, "getaddrinfo", Mock(side_effect=error))
        with pytest.raises(Problem, match=said):
            resolve(ServerTarget("shop", 80), WAIT_S)


def test_a_lookup_has_a_timeout(monkeypatch):
    gate = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: gate.wait(WAIT_S) and [])
    with pytest.raises(Problem, match=r"the name server does not answer within 0.05"):
        resolve(ServerTarget("shop", 80), 0.05)
    gate.set()


def test_each_error_of_a_socket_has_message_and_advice():
    for number, message in [
        (errno.ECONNREFUSED, "refused"),
        (errno.ECONNRESET, "closed the connection at once"),
        (errno.ENETUNREACH, "no route to host"),
        (errno.EHOSTUNREACH, "no route to host"),
        (errno.ENOENT, "no such socket"),
        (errno.EACCES, "no permission"),
        (errno.EIO, "failed"),
    ]:
        problem = explained(OSError(number, "in its own words"), 1.0)
        assert message in problem.message
        assert problem.advice


@pytest.mark.parametrize(
    ("host", "is_loopback"), [("127.0.0.1", True), ("::1", True), ("10.0.0.1", False)]
)
def test_the_advice_for_a_loopback_address_does_not_suspect_127_0_0_1(
    monkeypatch, host, is_loopback
):
    error = ConnectionRefusedError(errno.ECONNREFUSED, "refused")
    monkeypatch.setattr(socket.socket, "connect", Mock(side_effect=error))
    with pytest.raises(Problem) as refused:
        connect(Address(socket.AF_INET, (host, 80)), WAIT_S)
    assert "start the server; check its port" in refused.value.advice
    assert ("127.0.0.1 only" in refused.value.advice) is not is_loopback


def test_a_socket_that_fails_is_closed():
    with pytest.raises(Problem, match="no such socket"):
        connect(Address(socket.AF_UNIX, "/no/such/place"), WAIT_S)


def test_tcp_connections_have_no_delay():
    with socket.create_server(("127.0.0.1", 0)) as server:
        sock, took = connect(Address(socket.AF_INET, server.getsockname()), WAIT_S)
        with sock:
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert 0 < took < WAIT_S
