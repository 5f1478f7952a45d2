"""What a rolling restart costs a client: CPU time for each instance that is restarted.

Another process publishes all instances and restarts them one after the other, each as a server
does: DRAINING, withdrawn, published again with another epoch. All of them are one server, which
listens on all loopback addresses. It is that process, too:
`python -m benchmarks.registries.restart URL INSTANCES RESTARTED PAUSE`.
"""

from __future__ import annotations

import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import TYPE_CHECKING

import grpc

import rpcwheel
from benchmarks._process import Process, obey
from benchmarks.calls.scale import Row
from benchmarks.registries import rivals
from benchmarks.registries.engines import running
from benchmarks.registries.subjects import CHANNEL, RESTART
from rpcwheel.instance import ServiceInstance
from rpcwheel.registry import RegistryPolicy

if TYPE_CHECKING:
    from benchmarks.registries.scale import Scale

SERVICE = "bench.Shop"
METHOD = f"/{SERVICE}/Get"
POLICY = RegistryPolicy(lease_ttl=60, timeout=30, snapshot=False)
SETTLE_S = 2.0


def measure(engine: str, subject: str, scale: Scale) -> list[Row]:
    """A row: a channel by name, or the rival of the engine."""
    with running(engine) as place, ExitStack() as stack:
        numbers = (scale.listed, scale.restarted, scale.restart_pause_s)
        publisher = stack.enter_context(Process(__name__, place.url, *map(str, numbers)))
        if subject == CHANNEL:
            channel = rpcwheel.insecure_channel(place.url, service=SERVICE, registry_policy=POLICY)
            stack.enter_context(channel).unary_unary(METHOD)(b"", timeout=scale.timeout_s)
        else:
            stack.enter_context(rivals.WATCH[engine](place.url, SERVICE, ()))
        time.sleep(SETTLE_S)
        began_s = time.process_time()
        publisher.ask("restart")
        used_s = time.process_time() - began_s
    values = {"restart_ms": used_s * 1e3 / scale.restarted}
    return [Row("client", "sync", RESTART, f"{engine}: {subject}", values)]


def publish(url: str, count: int, restarted: int, pause_s: float) -> None:
    """Publish the instances, and restart some at a line of the input."""
    server = grpc.server(ThreadPoolExecutor(2))
    port = server.add_insecure_port("0.0.0.0:0")
    handler = grpc.unary_unary_rpc_method_handler(lambda request, _: request)
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(SERVICE, {"Get": handler}),)
    )
    server.start()
    with rpcwheel.open_registry(url, registry_policy=POLICY) as registry:
        registrations = [
            registry.register(ServiceInstance(service=SERVICE, host=_host(number), port=port))
            for number in range(count)
        ]
        if not all(one.wait_published(60) for one in registrations):
            raise RuntimeError("not published")

        def restart(_: object) -> None:
            for number, one in enumerate(registrations[:restarted]):
                one.update(status="DRAINING")
                one.wait_published(60)
                one.unregister(wait=60)
                registry.register(one.instance.replace(status="UP", epoch=f"{number:016}"), wait=60)
                time.sleep(pause_s)

        obey("published", restart)
    server.stop(0)


def _host(number: int) -> str:
    return f"127.1.{number // 250}.{number % 250 + 1}"


if __name__ == "__main__":
    publish(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))
