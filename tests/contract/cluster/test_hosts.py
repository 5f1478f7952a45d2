"""A host that is named as a scheme of gRPC does not select that scheme.

The calls go through an HTTP proxy, which gRPC uses for DNS names and not for Unix sockets. So the
tests do not depend on the DNS of the machine. `tests/unit/test_instance.py` has all schemes.
"""

import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import grpc
import pytest

from fixtures.clusters import instance
from fixtures.grpc_servers import IMPATIENT
from fixtures.shop import UNARY_UNARY
from fixtures.waiting import WAIT_S

AUTHORIZATION = (("authorization", "Bearer secret"),)


@pytest.fixture
def received(dead, tmp_path, monkeypatch):
    """The metadata of calls that reached a gRPC server on the Unix socket that a port names."""
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
        server.start()
        yield metadata
        server.stop(None).wait()


class Proxy:
    """An HTTP proxy that notes which address it is to connect to, and closes the connection."""

    def __init__(self) -> None:
        self.asked: set[str] = set()
        self._closed = False
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.options = [("grpc.http_proxy", f"http://127.0.0.1:{self.port}"), *IMPATIENT]
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    @property
    def port(self) -> int:
        return self._listening.getsockname()[1]

    def _serve(self) -> None:
        while not self._closed:
            connection, _ = self._listening.accept()
            with connection, suppress(OSError), connection.makefile("rb") as lines:
                if line := lines.readline():  # "CONNECT shop.example:50051 HTTP/1.1"
                    self.asked.add(line.split()[1].decode())

    def close(self) -> None:
        self._closed = True
        socket.create_connection(("127.0.0.1", self.port)).close()
        self._thread.join(WAIT_S)
        self._listening.close()


@pytest.fixture
def proxy(monkeypatch):
    for name in ("no_grpc_proxy", "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    proxy = Proxy()
    yield proxy
    proxy.close()


def test_a_host_that_is_named_unix_is_a_dns_name(received, open_cluster, dead, proxy):
    channel = open_cluster(options=proxy.options)
    channel.update([instance(dead, host="unix")])
    with pytest.raises(grpc.RpcError):
        channel.unary_unary(UNARY_UNARY)(b"x", timeout=WAIT_S, metadata=AUTHORIZATION)
    assert (proxy.asked, received) == ({f"unix:{dead}"}, [])


async def test_a_host_that_is_named_unix_is_a_dns_name_in_aio(received, aio_cluster, dead, proxy):
    channel = aio_cluster(options=proxy.options)
    channel.update([instance(dead, host="unix")])
    with pytest.raises(grpc.RpcError):
        await channel.unary_unary(UNARY_UNARY)(b"x", timeout=WAIT_S, metadata=AUTHORIZATION)
    assert (proxy.asked, received) == ({f"unix:{dead}"}, [])
