"""A server that can answer 80 calls a second: python server_slow.py, with a limit: ... limit."""

import sys
import threading
import time

import grpc
from server import Orders, run

import rpcwheel


class SlowOrders(Orders):
    """Its database has 4 connections, and needs 0.05 s for a price."""

    def __init__(self) -> None:
        self._connections = threading.Semaphore(4)

    def Price(self, item: str, context: grpc.ServicerContext) -> str:
        """Return the price from the database."""
        with self._connections:
            time.sleep(0.05)
        return super().Price(item, context)


if __name__ == "__main__":
    kit = rpcwheel.Kit(limit="adaptive" if sys.argv[1:] == ["limit"] else None)
    server = grpc.server(kit.server_executor(30), interceptors=kit.server_interceptors())
    run(server, SlowOrders())
