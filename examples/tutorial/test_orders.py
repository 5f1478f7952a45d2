"""Tests of the shop: python -m pytest test_orders.py."""

from typing import Any

import grpc
import pytest
from client_balanced import SETTINGS
from orders import OrdersStub, add_orders
from server import Orders

import rpcwheel


@pytest.fixture
def orders(flaky_server: Any) -> Any:
    """A stub with the settings of the client, for a server that fails on command."""
    add_orders(Orders(), flaky_server)
    kit = rpcwheel.Kit.from_policy(SETTINGS)
    with kit, kit.channel(flaky_server.target) as channel:
        yield OrdersStub(channel)


def test_a_price_is_read_again_when_the_server_fails(
    orders: Any, flaky_server: Any, no_waits: None
) -> None:
    """`fail` lets the next calls fail with UNAVAILABLE; `no_waits` removes the backoff."""
    flaky_server.fail(times=2)
    assert orders.Price("tea") == "3.50"
    assert len(flaky_server.calls) == 3


def test_an_order_is_not_placed_twice(orders: Any, flaky_server: Any, no_waits: None) -> None:
    """`lose_response` executes the call, but the client gets UNAVAILABLE."""
    flaky_server.lose_response(times=1)
    with pytest.raises(grpc.RpcError, match="UNAVAILABLE"):
        orders.Place("tea")
    assert len(flaky_server.calls) == 1


def test_a_price_that_does_not_come_ends_at_the_deadline(orders: Any, flaky_server: Any) -> None:
    """`freeze` lets calls hang."""
    flaky_server.freeze(times=1)
    with pytest.raises(grpc.RpcError, match="DEADLINE_EXCEEDED"):
        orders.Price("tea", timeout=0.2)
