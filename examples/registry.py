"""Two servers, and a client that finds them by name; run it: python examples/registry.py."""

import sys
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from tempfile import TemporaryDirectory

import grpc
from audit_pb2 import Line, Receipt
from audit_pb2_grpc import AuditServicer, AuditStub, add_AuditServicer_to_server
from registry_process import Server, when_parent_has_ended

import rpcwheel

CALLS = 50  # at the end
POLICY = rpcwheel.RegistryPolicy(lease_ttl=3.0, snapshot=False)  # no snapshot file


class Audit(AuditServicer):
    """Sends the name of its server in the trailing metadata."""

    def Push(self, request: Line, context: grpc.ServicerContext) -> Receipt:  # noqa: N802
        """Accept one line."""
        context.set_trailing_metadata((("server", sys.argv[1]),))
        return Receipt(number=1)


def serve(url: str) -> None:
    """Publish a server while it serves, and stop it gracefully."""
    with ThreadPoolExecutor() as pool, rpcwheel.Kit(registry_policy=POLICY) as kit:
        server = grpc.server(pool, interceptors=kit.server_interceptors())
        add_AuditServicer_to_server(Audit(), server)
        with kit.serve(server, publish=url, port=0, host="127.0.0.1", lame_duck=0.3) as served:
            when_parent_has_ended(served.begin_stop)
            server.wait_for_termination()


def called(audit: AuditStub, enough: Callable[[Counter[str]], bool]) -> Counter[str]:
    """Call until `enough`; return the number of responses of each server."""
    seen: Counter[str] = Counter()
    while not enough(seen):
        try:  # wait_for_ready: waits for the first instance, too
            _, call = audit.Push.with_call(Line(text="order"), timeout=20, wait_for_ready=True)
            seen[dict(call.trailing_metadata())["server"]] += 1
        except grpc.RpcError:
            seen["failed"] += 1
        time.sleep(0.002)
    return seen


def story(url: str, program: str = __file__) -> bool:
    """Stop server one gracefully, restart it, kill server two; return whether all went well."""
    with (
        Server(program, "one", url) as one,
        Server(program, "two", url) as two,
        rpcwheel.insecure_channel(url, registry_policy=POLICY) as channel,
    ):
        audit = AuditStub(channel)
        both = called(audit, lambda seen: seen["one"] > 0 < seen["two"])
        print("both servers answer:", *sorted(both.keys() - {"failed"}))
        one.stop()
        meanwhile = called(audit, lambda _: not one.running)
        print("one is stopped gracefully; calls that failed meanwhile:", meanwhile["failed"])
        one.start()
        print("one is back:", "one" in called(audit, lambda seen: "one" in seen))
        two.kill()
        after = called(audit, lambda seen: seen["one"] == CALLS)
        print("two is killed; answering:", *sorted(after.keys() - {"failed", "two"}))
    return not meanwhile["failed"] and after["failed"] <= 1  # the call that two was serving


if __name__ == "__main__":
    if sys.argv[1:]:
        serve(sys.argv[2])
    else:
        with TemporaryDirectory() as directory:
            sys.exit(not story(f"sqlite://{directory}/db?service=shop.Audit"))
