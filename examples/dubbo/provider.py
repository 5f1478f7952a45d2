"""A server in Python that consumers of Dubbo call, beside the provider in Java.

    python provider.py [PORT] [ZOOKEEPER]

It is published in ZooKeeper as a Dubbo provider of Triple. `Consumer` of `src/main/java` and
`consumer.py` find it; see docs/dubbo.md.
"""

import sys
from collections.abc import Iterator
from concurrent import futures
from typing import Any

import grpc
import shop_pb2
import shop_pb2_grpc

import rpcwheel

URL = "dubbo+zookeeper://{}?interface=com.example.shop.Orders&application=py-shop"


class Orders(shop_pb2_grpc.OrdersServicer):
    """The service of shop.proto."""

    def __init__(self, name: str) -> None:
        self.name = name

    def Place(self, request: shop_pb2.Order, context: grpc.ServicerContext) -> shop_pb2.Receipt:  # noqa: N802 - as in shop.proto
        """Accept an order; the trailing metadata arrive as an attachment in Java."""
        context.set_trailing_metadata((("served-by", self.name),))
        return shop_pb2.Receipt(server=self.name, text=request.item)

    def Watch(self, request: shop_pb2.Order, _: Any) -> Iterator[shop_pb2.Receipt]:  # noqa: N802 - as in shop.proto
        """Send as many receipts as the item says."""
        for number in range(1, int(request.item) + 1):
            yield shop_pb2.Receipt(server=self.name, text=str(number))

    def Upload(self, requests: Iterator[shop_pb2.Order], _: Any) -> shop_pb2.Receipt:  # noqa: N802 - as in shop.proto
        """Accept several orders at once."""
        return shop_pb2.Receipt(server=self.name, text="".join(each.item for each in requests))

    def Chat(self, requests: Iterator[shop_pb2.Order], _: Any) -> Iterator[shop_pb2.Receipt]:  # noqa: N802 - as in shop.proto
        """Accept each order as it comes."""
        for each in requests:
            yield shop_pb2.Receipt(server=self.name, text=each.item)


def main(port: str = "50052", zookeeper: str = "127.0.0.1:2181") -> None:
    """Serve until Ctrl-C or SIGTERM; both withdraw the server 10 s before it stops."""
    with rpcwheel.Kit() as kit:
        # `server_options` permits the pings of consumers, one each 60 s without calls
        server = grpc.server(futures.ThreadPoolExecutor(16), options=kit.server_options())
        shop_pb2_grpc.add_OrdersServicer_to_server(Orders(f"python-{port}"), server)
        url = URL.format(zookeeper)
        with kit.serve(server, publish=url, service="shop.v1.Orders", port=int(port)):
            print(f"serving at port {port}")
            server.wait_for_termination()


if __name__ == "__main__":
    main(*sys.argv[1:])
