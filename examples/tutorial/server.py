"""The server of the shop: python server.py."""

import contextlib
from concurrent.futures import ThreadPoolExecutor

import grpc
from orders import add_orders

PRICES = {"tea": "3.50", "coffee": "2.80"}


class Orders:
    """The methods of the service."""

    def Price(self, item: str, context: grpc.ServicerContext) -> str:
        """Return the price of an item."""
        if item not in PRICES:
            context.abort(grpc.StatusCode.NOT_FOUND, "no such item")
        return PRICES[item]

    def Place(self, item: str, context: grpc.ServicerContext) -> str:
        """Take an order."""
        print("ordered:", item)
        return "accepted"


def run(server: grpc.Server, orders: Orders) -> None:
    """Serve until Ctrl-C."""
    add_orders(orders, server)
    server.add_insecure_port("127.0.0.1:50051")
    server.start()
    print("serving on 127.0.0.1:50051")
    with contextlib.suppress(KeyboardInterrupt):
        server.wait_for_termination()


if __name__ == "__main__":
    run(grpc.server(ThreadPoolExecutor(10)), Orders())
