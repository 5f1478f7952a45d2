"""Failback around your own aio stub; run it: python examples/failback_aio.py."""

import asyncio
import time

import grpc
from audit_pb2 import Line, Receipt
from audit_pb2_grpc import AuditStub
from audit_server import AuditServer

from rpcwheel import with_failback


async def main() -> None:
    """Call a server before it is killed, while it is down, and after its restart."""
    with AuditServer() as server:
        async with grpc.aio.insecure_channel(server.target) as channel:
            stub = AuditStub(channel)

            @with_failback(retry_on=grpc.StatusCode.UNAVAILABLE, max_attempts=101, backoff=0.25)
            async def push(line: Line) -> Receipt:
                return await stub.Push(line, timeout=20.0)

            print("up: the server answers", str(await push(Line(text="order 1"))).strip())
            server.kill()
            for number in (2, 3, 4):
                began = time.perf_counter()
                answer = await push(Line(text=f"order {number}"))
                took = f"{(time.perf_counter() - began) * 1e3:.1f} ms"
                print(f"killed: {answer} after {took}; in the queue: {push.failback.pending}")
            for entry in push.failback.entries():
                print(
                    f"queued: {entry.function}, {entry.attempts} attempt(s) in {entry.age_s:.2f} s"
                )
            server.start()
            print("up again: the queue is delivered, in any order")
            await push.failback.flush(timeout=20.0)
            print("delivered later:", push.failback.stats().redelivered)
            await push.failback.close()


if __name__ == "__main__":
    asyncio.run(main())
