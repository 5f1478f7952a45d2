"""Servers and a client that finds them by name, in aio; run it: python examples/registry_aio.py."""

import asyncio
import sys
from collections import Counter
from collections.abc import Callable
from tempfile import TemporaryDirectory
from typing import Any

import grpc
from audit_pb2 import Line, Receipt
from audit_pb2_grpc import AuditServicer, AuditStub, add_AuditServicer_to_server
from registry_process import Server, when_parent_has_ended

import rpcwheel.aio

POLICY = rpcwheel.RegistryPolicy(lease_ttl=3.0, snapshot=False)  # no snapshot file
CALLS = 50  # at the end


class Audit(AuditServicer):
    """Sends the name of its server in the trailing metadata."""

    async def Push(self, request: Line, context: Any) -> Receipt:  # noqa: N802
        """Accept one line."""
        context.set_trailing_metadata((("server", sys.argv[1]),))
        return Receipt(number=1)


async def serve(url: str) -> None:
    """Publish a server while it serves, and stop it gracefully."""
    async with rpcwheel.aio.Kit(registry_policy=POLICY) as kit:
        server = grpc.aio.server(interceptors=kit.server_interceptors())
        add_AuditServicer_to_server(Audit(), server)
        async with kit.serve(
            server, publish=url, port=0, host="127.0.0.1", lame_duck=0.3
        ) as served:
            when_parent_has_ended(served.begin_stop)
            await server.wait_for_termination()


async def called(audit: AuditStub, enough: Callable[[Counter[str]], bool]) -> Counter[str]:
    """Call until `enough`; return the number of responses of each server."""
    seen: Counter[str] = Counter()
    while not enough(seen):
        try:  # wait_for_ready: waits for the first instance, too
            call = audit.Push(Line(text="order"), timeout=20, wait_for_ready=True)
            await call
            seen[dict(await call.trailing_metadata())["server"]] += 1
        except grpc.aio.AioRpcError:
            seen["failed"] += 1
        await asyncio.sleep(0.002)
    return seen


async def story(url: str) -> bool:
    """Stop server one gracefully, restart it, kill server two; return whether all went well."""
    with Server(__file__, "one", url) as one, Server(__file__, "two", url) as two:
        async with rpcwheel.aio.insecure_channel(url, registry_policy=POLICY) as channel:
            audit = AuditStub(channel)
            both = await called(audit, lambda seen: seen["one"] > 0 < seen["two"])
            print("both servers answer:", *sorted(both.keys() - {"failed"}))
            one.stop()
            meanwhile = await called(audit, lambda _: not one.running)
            print("one is stopped gracefully; calls that failed meanwhile:", meanwhile["failed"])
            one.start()
            print("one is back:", "one" in await called(audit, lambda seen: "one" in seen))
            two.kill()
            after = await called(audit, lambda seen: seen["one"] >= CALLS)
            print("two is killed; answering:", *sorted(after.keys() - {"failed", "two"}))
    return not meanwhile["failed"] and after["failed"] <= 1  # the call that two was serving


if __name__ == "__main__":
    if sys.argv[1:]:
        asyncio.run(serve(sys.argv[2]))
    else:
        with TemporaryDirectory() as directory:
            sys.exit(not asyncio.run(story(f"sqlite://{directory}/db?service=shop.Audit")))
