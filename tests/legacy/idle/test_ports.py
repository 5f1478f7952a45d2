"""Where a server listens, as its user says it."""

from rpcwheel.idle.ports import Ports

HERE, THERE = ("127.0.0.1", 50051), ("127.0.0.2", 50051)


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


def test_a_socket_is_the_servers_if_it_is_where_the_server_listens():
    for given, listening, mine in (
        (50051, {HERE}, {HERE, THERE}),  # all come in there: the other may be a wildcard's
        (50051, {HERE, THERE}, set()),  # whose is which?
        ("127.0.0.1:50051", {HERE, THERE}, {HERE}),
        (50052, {HERE}, set()),
        (None, {HERE}, set()),
    ):
        found = {at for at in (HERE, THERE) if Ports.of(given).has(at, set(), listening)}
        assert found == mine, given
    assert Ports.of(None).has(HERE, {HERE}, {HERE, THERE})  # where a call came in
    assert not Ports.of(None).has(THERE, {HERE}, {HERE, THERE})
