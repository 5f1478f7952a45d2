"""Where to look: what is read of the command line, and what a socket's errors mean."""

import errno
import socket
import threading

import pytest

from fixtures.waiting import WAIT_S
from rpcwheel.cli.diagnosis import Trouble
from rpcwheel.cli.target import Address, Target, connect, explained, parse_target, resolve


def test_targets_of_grpc_are_parsed():
    for text, target in [
        ("localhost:50051", Target("localhost", 50051)),
        ("[::1]:1", Target("::1", 1)),
        ("10.0.0.1:65535", Target("10.0.0.1", 65535)),
        ("dns:///shop.example:443", Target("shop.example", 443)),
        ("dns:shop:443", Target("shop", 443)),
        ("ipv4:127.0.0.1:80", Target("127.0.0.1", 80)),
        ("ipv6:[::1]:80", Target("::1", 80)),
        ("unix:/run/app.sock", Target("", 0, "/run/app.sock")),
        ("unix:///run/app.sock", Target("", 0, "/run/app.sock")),
        ("unix:app.sock", Target("", 0, "app.sock")),
        ("unix:50051", Target("unix", 50051)),
        ("dns:50051", Target("dns", 50051)),
        ("unix:./50051", Target("", 0, "./50051")),
    ]:
        assert parse_target(text) == target
        assert parse_target(str(target)) == target


def test_what_is_no_target_is_said_with_what_to_give():
    for text, said in [
        ("", "has no host"),
        ("shop", "'shop' has no port; give HOST:PORT, such as shop:50051"),
        (":50051", "has no host"),
        ("shop:", "not ''"),
        ("shop:0", "from 1 to 65535"),
        ("shop:65536", "from 1 to 65535"),
        ("shop:http", "not 'http'"),
        ("shop:²", "from 1 to 65535"),
        ("shop:-1", "from 1 to 65535"),
        ("::1", r"has a port: \[::1\]:50051"),
        ("fe80::1%eth0:50051", r"in brackets: \[fe80::1%eth0\]:50051"),
        ("[::1]", "no port after the bracket"),
        ("http://shop:80/", "leave out http://, and give HOST:PORT: shop:80"),
        ("unix:", "a unix socket has a path"),
    ]:
        with pytest.raises(ValueError, match=said):
            parse_target(text)


def test_a_name_has_its_addresses_once_each():
    found = resolve(Target("127.0.0.1", 80), WAIT_S)
    assert found == [Address(socket.AF_INET, ("127.0.0.1", 80))]
    assert resolve(Target("", 0, "/a"), WAIT_S) == [Address(socket.AF_UNIX, "/a")]


def test_a_name_without_address_is_told_from_a_name_service_that_is_away(monkeypatch):
    for error, said in [
        (socket.gaierror(socket.EAI_NONAME, "not known"), "the name 'shop' is unknown"),
        (socket.gaierror(socket.EAI_AGAIN, "try again"), "could not be looked up now"),
        (UnicodeError("label too long"), "is unknown .label too long"),
    ]:

        def fail(*_, error=error, **__):
            raise error

        monkeypatch.setattr(socket, "getaddrinfo", fail)
        with pytest.raises(Trouble, match=said):
            resolve(Target("shop", 80), WAIT_S)


def test_a_name_service_that_does_not_answer_is_given_up(monkeypatch):
    gate = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: gate.wait(WAIT_S) and [])
    with pytest.raises(Trouble, match=r"no answer of the name service within 0.05"):
        resolve(Target("shop", 80), 0.05)
    gate.set()


def test_each_error_of_a_socket_is_said_in_words_with_what_to_do():
    for number, said in [
        (errno.ECONNREFUSED, "refused"),
        (errno.ECONNRESET, "reset"),
        (errno.ENETUNREACH, "no way there"),
        (errno.EHOSTUNREACH, "no way there"),
        (errno.ENOENT, "no such socket"),
        (errno.EACCES, "no permission"),
        (errno.EIO, "failed"),
    ]:
        trouble = explained(OSError(number, "in its own words"), 1.0)
        assert said in trouble.said
        assert trouble.do


def test_a_socket_that_fails_is_closed():
    with pytest.raises(Trouble, match="no such socket"):
        connect(Address(socket.AF_UNIX, "/no/such/place"), WAIT_S)


def test_what_is_sent_does_not_wait_for_more():
    with socket.create_server(("127.0.0.1", 0)) as server:
        sock, took = connect(Address(socket.AF_INET, server.getsockname()), WAIT_S)
        with sock:
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert 0 < took < WAIT_S
