"""Where a server listens, as its user says it."""

import re

import pytest

from rpcwheel.errors import ConfigurationError
from rpcwheel.idle.ports import Ports


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (50051, {(None, 50051)}),
        ("[::]:50051", {(None, 50051)}),
        ("0.0.0.0:50051", {(None, 50051)}),
        ("shop.example:50051", {(None, 50051)}),
        ("localhost:50051", {("127.0.0.1", 50051), ("::1", 50051)}),
        ("127.0.0.1:50051", {("127.0.0.1", 50051)}),
        ("ipv4:127.0.0.1:50051", {("127.0.0.1", 50051)}),
        ("ipv6:[::1]:50051", {("::1", 50051)}),
        ("dns:///[::1]:50051", {("::1", 50051)}),
        ([50051], {(None, 50051)}),
        ({50051}, {(None, 50051)}),
    ],
)
def test_a_port_may_be_said_as_grpc_takes_it(given, found):
    assert Ports.of(given) == (found, ())
    assert Ports.of(given).numbers == {50051}


def test_several_may_be_given_and_unix_sockets_among_them():
    assert Ports.of([50051, "[::]:50052", "unix:/run/shop.sock"]) == (
        {(None, 50051), (None, 50052)},
        ("unix:/run/shop.sock",),
    )


def test_what_grpc_returns_for_a_unix_socket_is_one():
    assert Ports.of(1) == (frozenset(), ("a unix socket",))


HERE, THERE = ("127.0.0.1", 50051), ("127.0.0.2", 50051)


@pytest.mark.parametrize(
    ("given", "listening", "mine"),
    [
        (50051, {HERE}, {HERE, THERE}),  # all come in there: the other may be a wildcard's
        (50051, {HERE, THERE}, set()),  # whose is which?
        ("127.0.0.1:50051", {HERE, THERE}, {HERE}),
        (50052, {HERE}, set()),
        (None, {HERE}, set()),
    ],
)
def test_a_socket_is_the_servers_if_it_is_where_the_server_listens(given, listening, mine):
    assert {at for at in (HERE, THERE) if Ports.of(given).has(at, set(), listening)} == mine


def test_where_a_call_came_in_is_the_servers():
    assert Ports.of(None).has(HERE, {HERE}, {HERE, THERE})
    assert not Ports.of(None).has(THERE, {HERE}, {HERE, THERE})


def test_none_means_wherever_calls_come_in():
    assert Ports.of(None).tcp is None


@pytest.mark.parametrize("given", [0, -1, 65536, "[::]:0", "shop.example", "localhost:", [], ""])
def test_what_names_no_port_is_refused_with_what_does(given):
    with pytest.raises(ConfigurationError, match=re.escape('50051, "[::]:50051"')):
        Ports.of(given)


@pytest.mark.parametrize("given", [True, [None], [5.0], b"50051"])
def test_what_is_neither_a_number_nor_an_address_is_a_type_error(given):
    with pytest.raises(TypeError, match=r"ports (has|is) "):
        Ports.of(given)
