"""The host of an instance cannot select another scheme of gRPC than an address or a DNS name."""

import sys
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from fixtures.clusters import instance
from fixtures.shop import UNARY_UNARY
from fixtures.waiting import WAIT_S

AUTHORIZATION = (("authorization", "Bearer secret"),)
NOT_REACHED = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED}
"""DNS does not know the name, or does not answer. Of a wrong target gRPC says UNKNOWN."""


@pytest.fixture
def received(dead, tmp_path, monkeypatch):
    """The metadata of calls that reached a gRPC server on Unix sockets that are named as a port."""
    monkeypatch.chdir(tmp_path)
    metadata = []

    def answer(request, context):
        metadata.append(dict(context.invocation_metadata()))
        return request

    _, service, method = UNARY_UNARY.split("/")
    handlers = {method: grpc.unary_unary_rpc_method_handler(answer)}
    with ThreadPoolExecutor(2) as pool:
        server = grpc.server(pool)
        server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(service, handlers)])
        server.add_insecure_port(f"unix:{dead}")
        if sys.platform == "linux":
            server.add_insecure_port(f"unix-abstract:{dead}")
        server.start()
        yield metadata
        server.stop(None).wait()


@pytest.mark.parametrize("host", ["unix", "unix-abstract", "xds", "ipv4", "ipv6", "dns"])
def test_a_host_that_is_named_as_a_scheme_is_looked_up_in_dns(received, open_cluster, dead, host):
    channel = open_cluster()
    channel.update([instance(dead, host=host)])
    with pytest.raises(grpc.RpcError) as failed:
        channel.unary_unary(UNARY_UNARY)(b"x", timeout=WAIT_S, metadata=AUTHORIZATION)
    assert failed.value.code() in NOT_REACHED
    assert received == []


async def test_a_host_that_is_named_as_a_scheme_is_looked_up_in_dns_in_aio(
    received, aio_cluster, dead
):
    channel = aio_cluster()
    channel.update([instance(dead, host="unix")])
    with pytest.raises(grpc.RpcError) as failed:
        await channel.unary_unary(UNARY_UNARY)(b"x", timeout=WAIT_S, metadata=AUTHORIZATION)
    assert failed.value.code() in NOT_REACHED
    assert received == []
