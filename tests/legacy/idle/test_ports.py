"""Where a server listens, as its user says it."""

from rpcwheel.idle.ports import Ports


def test_a_port_may_be_said_as_grpc_takes_it():
    for given, found in (
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
    ):
        assert Ports.of(given) == (found, ()), given
        assert Ports.of(given).numbers == {50051}, given


def test_several_may_be_given_and_unix_sockets_among_them():
    assert Ports.of([50051, "[::]:50052", "unix:/run/shop.sock"]) == (
        {(None, 50051), (None, 50052)},
        ("unix:/run/shop.sock",),
    )
    assert Ports.of(1) == (frozenset(), ("a unix socket",))  # as grpc returns for one
    assert Ports.of(None).tcp is None
