"""A server that delays some calls: `python -m benchmarks.calls.slow_server aio NAME`.

Prints its port as a line of JSON. Then it answers each line on its stdin with the number of calls
it has received, and ends when its stdin does. Which calls are delayed is random, but the same in
each run: an attempt that is sent again may be delayed again.
"""

from __future__ import annotations

import asyncio
import random
import sys

import grpc
import grpc.aio

from benchmarks._process import obey
from benchmarks.calls.wire import SERVICE

WORK_S = 0.005
"""What each call takes. Without it the measurement would be of the processors: the same call takes
0.5 ms when it follows another one, and 1.5 ms after a pause of 50 ms."""

ONE_IN, DELAY_S = 20, 1.0
"""One call in so many takes that much longer."""


class SlowService:
    """Returns the request after `WORK_S`; one call in `ONE_IN` is delayed by `DELAY_S`."""

    def __init__(self) -> None:
        self.calls = 0
        self._random = random.Random(1)

    async def echo(self, request: bytes, _: grpc.aio.ServicerContext) -> bytes:
        """The handler."""
        self.calls += 1
        is_delayed = self._random.randrange(ONE_IN) == 0
        await asyncio.sleep(WORK_S + DELAY_S if is_delayed else WORK_S)
        return request


async def serve(name: str) -> None:
    """Serve until stdin ends."""
    service, server = SlowService(), grpc.aio.server()
    handlers = {"UnaryUnary": grpc.unary_unary_rpc_method_handler(service.echo)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    await asyncio.to_thread(obey, {name: port}, lambda _: service.calls)
    await server.stop(None)


if __name__ == "__main__":
    _, _world, _name = sys.argv
    asyncio.run(serve(_name))
