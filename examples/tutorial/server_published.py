"""A server that clients find in a registry: python server_published.py PORT."""

import sys

import grpc
from orders import add_orders
from server import Orders

import rpcwheel


class NumberedOrders(Orders):
    """Says which server has answered."""

    def Price(self, item: str, context: grpc.ServicerContext) -> str:
        """Return the price and the port of this server."""
        return f"{super().Price(item, context)}, says {sys.argv[1]}"


kit = rpcwheel.Kit(limit="adaptive", registry_policy=60.0)  # its lease in the registry
server = grpc.server(kit.server_executor(10), interceptors=kit.server_interceptors())
add_orders(NumberedOrders(), server)
publisher = kit.serve(
    server,
    publish="sqlite://./registry.db",
    service="shop.Orders",
    port=int(sys.argv[1]),
    host="127.0.0.1",
)
with kit, publisher:
    print("serving on port", sys.argv[1])
    server.wait_for_termination()  # until SIGTERM or Ctrl-C
print("stopped")
