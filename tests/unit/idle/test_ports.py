"""Which sockets of the process are the server's, by where the server listens."""

from rpcwheel.idle.ports import Ports

HERE, THERE, V6 = (("127.0.0.1", 50051), ("127.0.0.2", 50051), ("::1", 50051))
ALL_V4, ALL = ("0.0.0.0", 50051), ("::", 50051)


def test_a_port_stands_for_the_address_at_which_the_process_listens():
    for listening, expected in (
        ({HERE}, {HERE}),
        ({V6}, {V6}),
        ({ALL_V4}, {HERE, THERE}),
        ({ALL}, {HERE, THERE, V6}),
        ({HERE, ("127.0.0.2", 50052)}, {HERE}),
        ({HERE, THERE}, set()),  # the port does not say which of them
        (set(), set()),
    ):
        assert mine(50051, listening=listening) == expected, listening


def test_an_address_stands_for_itself():
    assert mine("127.0.0.1:50051", listening={HERE, THERE}) == {HERE}
    assert mine("127.0.0.1:50052", listening={HERE}) == set()


def test_a_socket_is_the_servers_where_a_call_came_in():
    assert mine(50051, listening={HERE, THERE}, learned={THERE}) == {THERE}
    assert mine(None, listening={HERE, THERE}, learned={HERE}) == {HERE}
    assert mine(None, listening={HERE}) == set()


def mine(given, *, listening, learned=frozenset()):
    ports = Ports.of(given)
    return {local for local in (HERE, THERE, V6) if ports.has(local, learned, listening)}
