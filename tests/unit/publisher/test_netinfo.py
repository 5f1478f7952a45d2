"""Addresses and ports of this machine and this process, as the system reports them."""

import socket

import pytest

from rpcwheel.errors import ConfigurationError
from rpcwheel.publisher.netinfo import (
    PortBinding,
    address_facing,
    connect_error,
    is_local,
    listening_addresses,
    port_binding,
)
from rpcwheel.registry.url import parse_url


@pytest.fixture
def listener():
    with socket.create_server(("127.0.0.1", 0)) as one:
        yield one


def urls(*given):
    return [parse_url(one) for one in given]


def test_the_loopback_faces_a_registry_on_this_machine():
    for url in (
        "memory://",
        "sqlite:///run/shop.db",
        "etcd://127.0.0.1:2379",
        "redis://localhost",
        "own://",
        "etcd://no.such.host.invalid,127.0.0.1",
    ):
        assert address_facing(urls(url)) == "127.0.0.1", url


def test_the_address_facing_a_remote_registry_is_that_of_the_route_to_it():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            pytest.skip("this machine has no default route")
        own = probe.getsockname()[0]
    assert address_facing(urls("memory://", "etcd://192.0.2.1:2379")) == own


def test_without_a_resolvable_registry_the_default_route_counts_or_host_is_required():
    try:
        own = address_facing(urls("etcd://192.0.2.1:2379"))
    except ConfigurationError as error:
        assert "give host=" in str(error)  # noqa: PT017 - this machine has no default route
    else:
        assert address_facing(urls()) == own
        assert address_facing(urls("etcd://no.such.host.invalid:2379")) == own


def test_is_local_knows_the_addresses_of_this_machine():
    assert is_local("127.0.0.1")
    assert is_local("localhost")
    assert not is_local("192.0.2.1")
    assert not is_local("no.such.host.invalid")


def test_only_listening_sockets_of_this_process_are_listening_addresses(listener):
    address = listener.getsockname()
    assert address in listening_addresses()
    with socket.create_connection(address) as client:
        assert client.getsockname() not in listening_addresses()
    listener.close()
    assert address not in listening_addresses()


def test_a_unix_socket_is_listed_with_port_0(tmp_path):
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(str(tmp_path / "shop.sock"))
        one.listen()
        assert (str(tmp_path / "shop.sock"), 0) in listening_addresses()


@pytest.mark.skipif(not hasattr(socket, "AF_VSOCK"), reason="only on Linux")
def test_a_socket_without_an_ip_address_is_left_out():
    """gRPC can listen at one, too."""
    with socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM) as one:
        try:
            one.bind((socket.VMADDR_CID_ANY, socket.VMADDR_PORT_ANY))
        except OSError:
            pytest.skip("this machine has no vsock")
        one.listen()
        port = one.getsockname()[1]
        assert port not in {number for _, number in listening_addresses()}


def test_connect_error_is_empty_if_the_connection_is_accepted(listener):
    host, port = listener.getsockname()
    assert connect_error(host, port, 5.0) == ""
    listener.close()
    assert "refused" in connect_error(host, port, 5.0)


# Who listens on the published port


@pytest.mark.parametrize(
    ("port", "listening", "server_runs", "host_forwards", "expected"),
    [
        (50051, {50051}, False, False, PortBinding.OWN),
        (50051, {50051}, True, True, PortBinding.OWN),
        (50051, (), False, False, PortBinding.BIND),
        (50051, {9090}, False, False, PortBinding.BIND),
        (0, (), False, False, PortBinding.BIND),
        (50051, {50052}, False, True, PortBinding.PROXY),
        (50051, (), True, True, PortBinding.PROXY),
        # another server answers at the host: the one that this replaces, which stops soon
        (50051, (), False, True, PortBinding.BIND),
    ],
)
def test_a_port_is_the_own_one_that_of_a_proxy_or_to_be_bound(
    port, listening, server_runs, host_forwards, expected
):
    settings = {"server_runs": server_runs, "host_forwards": host_forwards}
    assert port_binding(port, listening_ports=listening, **settings) is expected


@pytest.mark.parametrize(
    ("port", "listening", "host_forwards"),
    [(50051, (), False), (50051, {50052}, False), (0, (), True)],
)
def test_a_running_server_with_another_port_is_refused(port, listening, host_forwards):
    settings = {"server_runs": True, "host_forwards": host_forwards}
    with pytest.raises(ConfigurationError, match=rf"port is {port}.*the server runs already"):
        port_binding(port, listening_ports=listening, **settings)
