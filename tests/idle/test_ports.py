"""Where a server listens, as its user says it."""

import re

import pytest

from rpcwheel.errors import ConfigurationError
from rpcwheel.idle.ports import Ports


@pytest.mark.parametrize(
    "given",
    [50051, "[::]:50051", "0.0.0.0:50051", "localhost:50051", "ipv6:[::1]:50051", [50051], {50051}],
)
def test_a_port_may_be_said_as_grpc_takes_it(given):
    assert Ports.of(given) == ({50051}, ())


def test_several_may_be_given_and_unix_sockets_among_them():
    assert Ports.of([50051, "[::]:50052", "unix:/run/shop.sock"]) == (
        {50051, 50052},
        ("unix:/run/shop.sock",),
    )


def test_none_means_wherever_calls_come_in():
    assert Ports.of(None).tcp is None


@pytest.mark.parametrize("given", [0, -1, 65536, "[::]:0", "shop.example", "localhost:", [], ""])
def test_what_names_no_port_is_refused_with_what_does(given):
    with pytest.raises(ConfigurationError, match=re.escape('50051, "[::]:50051"')):
        Ports.of(given)


@pytest.mark.parametrize("given", [True, [None], [5.0]])
def test_what_is_neither_a_number_nor_an_address_is_a_type_error(given):
    with pytest.raises(TypeError, match="ports has"):
        Ports.of(given)
