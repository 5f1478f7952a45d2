"""The sockets of a gRPC server: how they are found, and what a shutdown does to gRPC."""

from pathlib import Path

import grpc
import pytest

from fixtures.grpc_servers import IMPATIENT
from fixtures.idle_server import sockets_at
from fixtures.ports import has_ipv6
from fixtures.small_servers import METHOD, running, small
from fixtures.waiting import WAIT_S
from fixtures.worlds import SyncWorld
from rpcwheel.idle.sockets import SUPPORTED, parse_peer

pytestmark = pytest.mark.skipif(not SUPPORTED, reason="sockets are found on Linux only")


def asked(host: str):
    """A gRPC server that responds with the peer of the call; yields it and its port."""
    handler = grpc.unary_unary_rpc_method_handler(lambda _, context: context.peer().encode())
    return running(SyncWorld(), small(handler), place=f"{host}:0")


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
        with asked(bind) as (_, port), client_of(host, port) as channel:
            name = who(channel)
            sockets = [(one.name, one.peer) for one in sockets_at(port)]
            assert sockets == [(name, parse_peer(name))], case
