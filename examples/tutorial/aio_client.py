"""`client_balanced.py` for `grpc.aio`: python aio_client.py price tea tea tea."""

import asyncio
import sys
import time

import grpc
from client_balanced import SETTINGS, SHOP
from orders import OrdersStub

from rpcwheel.aio import Kit


async def main() -> None:
    """Call `price` or `place`, as the command line says, once for each item."""
    kit = Kit.from_policy(SETTINGS)  # the settings are the same
    async with kit, kit.channel(SHOP) as channel:
        orders = OrdersStub(channel)
        call = {"price": orders.Price, "place": orders.Place}[sys.argv[1]]
        for item in sys.argv[2:]:
            began = time.monotonic()
            try:
                result = await call(item)
            except grpc.RpcError as error:
                result = f"{error.code().name}, {error.details()}"
            print(f"{item}: {result} ({time.monotonic() - began:.1f} s)")


asyncio.run(main())
