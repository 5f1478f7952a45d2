"""A server for the examples in this directory: it is published, measured, and stopped gracefully.

Its settings are environment variables, so that Kubernetes and systemd run the same program:

    SHOP_REGISTRY   the URL of the registry in which it is published
    SHOP_ID         its id there, different in each process; default: host:port
    SHOP_PORT       the port; 0 (default): any free port
    SHOP_LAME_DUCK  seconds from its withdrawal to its stop; default 1
    SHOP_GRACE      seconds that calls in flight may take then; default 10
    RPCWHEEL_...    settings of the kit (docs/policies.md), such as RPCWHEEL_STATUS_PORT, where
                    Prometheus reads its metrics
"""

from __future__ import annotations

import os
import socket
from concurrent.futures import ThreadPoolExecutor

import grpc
from grpc_health.v1.health import HealthServicer
from grpc_health.v1.health_pb2_grpc import add_HealthServicer_to_server

import rpcwheel


def tell_systemd(state: str) -> None:
    """Send a state, as sd_notify(3) does. Outside of systemd it does nothing."""
    if address := os.environ.get("NOTIFY_SOCKET"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as to_systemd:
            to_systemd.sendto(state.encode(), address.replace("@", "\0", 1))


def who(_: bytes, __: grpc.ServicerContext) -> bytes:
    """Answer with the id of this server, or the name of the pod."""
    return (os.environ.get("SHOP_ID") or socket.gethostname()).encode()


def main() -> None:
    """Serve until SIGTERM or SIGINT, and then stop gracefully."""
    settings = os.environ
    with ThreadPoolExecutor() as pool, rpcwheel.Kit.from_env() as kit:
        server = grpc.server(
            pool, interceptors=kit.server_interceptors(), options=kit.server_options()
        )
        methods = {"Who": grpc.unary_unary_rpc_method_handler(who)}
        server.add_generic_rpc_handlers(
            [grpc.method_handlers_generic_handler("shop.Orders", methods)]
        )
        health = HealthServicer()
        add_HealthServicer_to_server(health, server)
        with kit.serve(
            server,
            publish=settings["SHOP_REGISTRY"],
            service="shop.Orders",
            id=settings.get("SHOP_ID", ""),
            port=int(settings.get("SHOP_PORT", "0")),
            health=health,
            lame_duck=float(settings.get("SHOP_LAME_DUCK", "1")),
            grace=float(settings.get("SHOP_GRACE", "10")),
        ) as publisher:
            while publisher.state == "serving" and not publisher.wait_published(1.0):
                pass
            tell_systemd("READY=1")  # clients can find it: the next instance may be restarted
            server.wait_for_termination()


if __name__ == "__main__":
    main()
