"""One deadline for a whole chain of aio calls; run it: python examples/deadlines_aio.py.

A calls B with a timeout of one second. B works for a while and calls C without a timeout. The call
to C gets the rest of the second.
"""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
from audit_pb2 import Line, Receipt
from audit_pb2_grpc import AuditServicer, AuditStub, add_AuditServicer_to_server

from rpcwheel import current_deadline
from rpcwheel.aio import Kit

Context = grpc.aio.ServicerContext[Line, Receipt]
KIT = Kit()  # propagates deadlines by default
TIMEOUT, WORK = 10.0, 0.3


class B(AuditServicer):
    """Works, then calls C."""

    def __init__(self, c: AuditStub) -> None:
        self._c = c

    async def Push(self, request: Line, context: Context) -> Receipt:  # noqa: D102, N802
        deadline = current_deadline()
        print(f"B has {deadline.remaining():.2f} s" if deadline else "B has no deadline")
        await asyncio.sleep(WORK)
        return await self._c.Push(request)


class C(AuditServicer):
    """Returns the time until its deadline, in milliseconds."""

    async def Push(self, request: Line, context: Context) -> Receipt:  # noqa: D102, N802
        print(f"C has {context.time_remaining():.2f} s")
        return Receipt(number=round(context.time_remaining() * 1000))


@asynccontextmanager
async def serving(servicer: AuditServicer) -> AsyncIterator[AuditStub]:
    """Start a server; yield a stub for it."""
    server = grpc.aio.server(interceptors=KIT.server_interceptors())
    add_AuditServicer_to_server(servicer, server)
    target = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    async with KIT.intercept_channel(grpc.aio.insecure_channel(target)) as channel:
        yield AuditStub(channel)
    await server.stop(None)


async def main() -> int:
    """Make the call of A."""
    async with serving(C()) as c, serving(B(c)) as b:
        print(f"A gives {TIMEOUT:.2f} s")
        left = (await b.Push(Line(text="order 1"), timeout=TIMEOUT)).number / 1000
    return 0 if 0 < left < TIMEOUT else 1


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
