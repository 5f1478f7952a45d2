"""The service shop.Orders. With protobuf, protoc generates such a file, with messages for `str`."""

from typing import Any

import grpc


def encode(text: str | bytes) -> bytes:
    """Serialize a message. A server of `grpc.aio` has encoded text already."""
    return text.encode() if isinstance(text, str) else text


class OrdersStub:
    """The client's part."""

    def __init__(self, channel: Any) -> None:
        """Take a channel of `grpc` or of `grpc.aio`."""
        self.Price = channel.unary_unary("/shop.Orders/Price", encode, bytes.decode)
        self.Place = channel.unary_unary("/shop.Orders/Place", encode, bytes.decode)


def add_orders(servicer: Any, server: Any) -> None:
    """Add the methods `Price` and `Place` of an object to a server of `grpc` or of `grpc.aio`."""
    handlers = {
        name: grpc.unary_unary_rpc_method_handler(method, bytes.decode, encode)
        for name, method in (("Price", servicer.Price), ("Place", servicer.Place))
    }
    handler = grpc.method_handlers_generic_handler("shop.Orders", handlers)
    server.add_generic_rpc_handlers((handler,))
