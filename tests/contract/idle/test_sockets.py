"""The sockets of a gRPC server: how they are found, and what a shutdown does to gRPC."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from fixtures.grpc_servers import IMPATIENT
from fixtures.idle_server import sockets_at
from fixtures.idle_worlds import has_ipv6
from fixtures.small_servers import METHOD, small
from fixtures.waiting import WAIT_S
from rpcwheel.idle.sockets import SUPPORTED, parse_peer

pytestmark = pytest.mark.skipif(not SUPPORTED, reason="sockets are found on Linux only")


class Asked:
    """A gRPC server that responds with the peer of the call."""

    def __init__(self, host: str) -> None:
        self._pool = ThreadPoolExecutor(2)
        self._server = grpc.server(self._pool)
        handler = grpc.unary_unary_rpc_method_handler(lambda _, context: context.peer().encode())
        self._server.add_generic_rpc_handlers([small(handler)])
        self.port = self._server.add_insecure_port(f"{host}:0")
        self._server.start()

    def __enter__(self):
        return self

    def __exit__(self, *_) -> None:
        self._server.stop(None).wait()
        self._pool.shutdown()


def client_of(host: str, port: int) -> grpc.Channel:
    return grpc.insecure_channel(f"{host}:{port}", options=IMPATIENT)


def who(channel: grpc.Channel) -> str:
    return channel.unary_unary(METHOD)(b"", wait_for_ready=True, timeout=WAIT_S).decode()


def link_local() -> str | None:
    """An address of this machine that needs a scope, with it."""
    table = Path("/proc/net/if_inet6")
    for line in table.read_text().splitlines() if table.exists() else ():
        digits, _, _, scope, _, interface = line.split()
        if scope == "20":
            return f"{':'.join(digits[i : i + 4] for i in range(0, 32, 4))}%{interface}"
    return None


CASES = {
    "IPv4": ("127.0.0.1", "127.0.0.1"),
    "IPv6": ("[::1]", "[::1]"),
    "IPv4 on [::]": ("[::]", "127.0.0.1"),
    "IPv6 on [::]": ("[::]", "[::1]"),
    "link-local": ("[::]", f"ipv6:[{link_local()}]"),
}


def test_a_connection_has_the_name_that_grpc_gives_its_peer():
    for case, (bind, host) in CASES.items():
        if ("::1]" in host and not has_ipv6()) or "[None]" in host:
            continue  # this machine has no such address
        with Asked(bind) as server, client_of(host, server.port) as channel:
            name = who(channel)
            sockets = [(one.name, one.peer) for one in sockets_at(server.port)]
            assert sockets == [(name, parse_peer(name))], case
