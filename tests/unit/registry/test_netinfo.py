"""Which addresses and ports are this machine's and this process's, by the system's own word."""

import socket

import pytest

from rpcwheel.errors import ConfigurationError
from rpcwheel.registry.netinfo import accepts, host_towards, is_local, listening
from rpcwheel.registry.url import parse_url


@pytest.fixture
def listener():
    with socket.create_server(("127.0.0.1", 0)) as one:
        yield one


def urls(*given):
    return [parse_url(one) for one in given]


def test_a_registry_of_this_machine_is_reached_from_its_loopback():
    for url in (
        "memory://",
        "sqlite:///run/shop.db",
        "etcd://127.0.0.1:2379",
        "redis://localhost",
        "own://",
        "etcd://no.such.host.invalid,127.0.0.1",
    ):
        assert host_towards(urls(url)) == "127.0.0.1", url


def test_a_registry_of_another_machine_is_reached_from_the_interface_towards_it():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            pytest.skip("this machine has no way out")
        mine = probe.getsockname()[0]
    assert host_towards(urls("memory://", "etcd://192.0.2.1:2379")) == mine


def test_where_no_registry_can_be_found_it_is_the_way_out_or_the_host_is_to_be_given():
    try:
        mine = host_towards(urls("etcd://192.0.2.1:2379"))
    except ConfigurationError as error:
        assert "give host=" in str(error)  # noqa: PT017 - of a machine that has no way out
    else:
        assert host_towards(urls()) == mine
        assert host_towards(urls("etcd://no.such.host.invalid:2379")) == mine


def test_addresses_of_this_machine_are_known_from_others():
    assert is_local("127.0.0.1")
    assert is_local("localhost")
    assert not is_local("192.0.2.1")
    assert not is_local("no.such.host.invalid")


def test_this_process_listens_where_it_does_and_nowhere_else(listener):
    place = listener.getsockname()
    assert place in listening()
    with socket.create_connection(place) as client:
        assert client.getsockname() not in listening()
    listener.close()
    assert place not in listening()


def test_a_unix_socket_is_seen_without_a_port(tmp_path):
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(str(tmp_path / "shop.sock"))
        one.listen()
        assert (str(tmp_path / "shop.sock"), 0) in listening()


def test_who_accepts_is_told_from_who_does_not(listener):
    host, port = listener.getsockname()
    assert accepts(host, port, 5.0) == ""
    listener.close()
    assert "refused" in accepts(host, port, 5.0)
