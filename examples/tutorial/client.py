"""Call the server once for each item: python client.py price tea coffee."""

import sys
import time

import grpc
from orders import OrdersStub


def make_calls(channel: grpc.Channel) -> None:
    """Call `price` or `place`, as the command line says, and print what the caller gets."""
    orders = OrdersStub(channel)
    call = {"price": orders.Price, "place": orders.Place}[sys.argv[1]]
    for item in sys.argv[2:]:
        began = time.monotonic()
        try:
            result = call(item)
        except grpc.RpcError as error:
            result = f"{error.code().name}, {error.details()}"
        print(f"{item}: {result} ({time.monotonic() - began:.1f} s)")


if __name__ == "__main__":
    with grpc.insecure_channel("127.0.0.1:50051") as channel:
        make_calls(channel)
