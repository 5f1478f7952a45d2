"""A server whose database is busy now and then: python server_busy.py."""

import itertools
from concurrent.futures import ThreadPoolExecutor

import grpc
from server import Orders, run


class BusyOrders(Orders):
    """Two of three calls of `Price` fail."""

    def __init__(self) -> None:
        self._calls = itertools.count(1)

    def Price(self, item: str, context: grpc.ServicerContext) -> str:
        """Return the price, if the database is not busy."""
        before = dict(context.invocation_metadata()).get("x-retry-attempt", "0")
        print(f"price of {item}, attempts before: {before}")
        if next(self._calls) % 3:
            context.abort(grpc.StatusCode.UNAVAILABLE, "the database is busy")
        return super().Price(item, context)


if __name__ == "__main__":
    run(grpc.server(ThreadPoolExecutor(10)), BusyOrders())
