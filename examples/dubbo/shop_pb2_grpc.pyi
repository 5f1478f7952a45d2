# Written by hand (mypy-protobuf makes such files): just what the examples use.
from collections.abc import Iterator
from typing import Any

import grpc
from shop_pb2 import Order, Receipt

class _Place:
    def __call__(self, request: Order, timeout: float | None = None) -> Receipt: ...

class OrdersStub:
    def __init__(self, channel: grpc.Channel) -> None: ...
    Place: _Place

class OrdersServicer:
    def Place(self, request: Order, context: Any) -> Receipt: ...  # noqa: N802
    def Watch(self, request: Order, context: Any) -> Iterator[Receipt]: ...  # noqa: N802
    def Upload(self, requests: Iterator[Order], context: Any) -> Receipt: ...  # noqa: N802
    def Chat(self, requests: Iterator[Order], context: Any) -> Iterator[Receipt]: ...  # noqa: N802

def add_OrdersServicer_to_server(servicer: OrdersServicer, server: grpc.Server) -> None: ...  # noqa: N802
