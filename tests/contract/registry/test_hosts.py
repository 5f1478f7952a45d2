"""A host that is named as a scheme of gRPC does not select that scheme.

The calls go through an HTTP proxy, which gRPC uses for DNS names and not for Unix sockets. So the
tests do not depend on the DNS of the machine. `tests/unit/test_instance.py` has all schemes.
"""

import socket
import threading
from contextlib import suppress

import pytest

import rpcwheel
from fixtures.grpc_servers import IMPATIENT
from fixtures.shops import SERVICE, WHO
from fixtures.waiting import WAIT_S
from rpcwheel import RegistryPolicy
from rpcwheel.errors import RegistryUnavailable
from rpcwheel.registry import ServiceInstance

TARGET = "unix:50051"
"""For gRPC itself this is a Unix socket in the working directory."""

AUTHORIZATION = (("authorization", "Bearer secret"),)


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


def call(world, function, target, proxy, **options):
    """Call a method on a channel that a function makes; the call fails."""
    channel = world.keep(world.do(function, target, options=proxy.options, **options))
    world.call(channel, method=WHO, timeout=WAIT_S, metadata=AUTHORIZATION).error()


def test_the_host_of_a_target_is_a_dns_name(world, proxy):
    call(world, world.api.insecure_channel, TARGET, proxy)
    assert proxy.asked == {TARGET}
    proxy.asked.clear()
    call(world, world.keep(world.do(world.api.Kit)).channel, TARGET, proxy)
    assert proxy.asked == {TARGET}


def test_the_host_of_an_instance_is_a_dns_name(world, proxy, memory):
    registry = world.keep(world.do(world.api.open_registry, memory))
    instance = ServiceInstance(service=SERVICE, host="unix", port=50051)
    world.do(registry.register, instance, wait=WAIT_S)
    call(world, world.api.insecure_channel, SERVICE, proxy, registry=registry)
    assert proxy.asked == {TARGET}


def test_the_host_of_a_registry_url_is_a_dns_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    policy = RegistryPolicy(timeout=WAIT_S, lease_ttl=10 * WAIT_S, snapshot=False)
    with (
        socket.socket(socket.AF_UNIX) as listening,
        rpcwheel.open_registry(f"etcd://{TARGET}", registry_policy=policy) as registry,
    ):
        listening.bind("50051")
        listening.listen()
        listening.setblocking(False)
        with pytest.raises(RegistryUnavailable):
            registry.lookup(SERVICE)
        with pytest.raises(BlockingIOError):
            listening.accept()
