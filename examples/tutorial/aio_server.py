"""`server_published.py` for `grpc.aio`: python aio_server.py PORT."""

import asyncio
import sys

import grpc
from orders import add_orders
from server import PRICES

from rpcwheel.aio import Kit


class Orders:
    """The methods of the service, as coroutine functions."""

    async def Price(self, item: str, context: grpc.aio.ServicerContext) -> str:
        """Return the price of an item, and the port of this server."""
        if item not in PRICES:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such item")
        return f"{PRICES[item]}, says {sys.argv[1]}"

    async def Place(self, item: str, context: grpc.aio.ServicerContext) -> str:
        """Take an order."""
        print("ordered:", item)
        return "accepted"


async def main() -> None:
    """Serve until SIGTERM or Ctrl-C."""
    async with Kit(limit="adaptive", registry_policy=60.0) as kit:
        server = grpc.aio.server(interceptors=kit.server_interceptors())  # no executor
        add_orders(Orders(), server)
        async with kit.serve(
            server,
            publish="sqlite://./registry.db",
            service="shop.Orders",
            port=int(sys.argv[1]),
            host="127.0.0.1",
        ):
            print("serving on port", sys.argv[1])
            await server.wait_for_termination()
    print("stopped")


asyncio.run(main())
