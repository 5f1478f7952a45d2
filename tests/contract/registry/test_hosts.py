"""A host that is named as a scheme of gRPC does not select that scheme.

The calls go through an HTTP proxy, which gRPC uses for DNS names and not for Unix sockets. So the
tests do not depend on the DNS of the machine. `tests/unit/test_instance.py` has all schemes.
"""

import socket
from types import SimpleNamespace

import pytest

import rpcwheel
from fixtures.grpc_servers import IMPATIENT
from fixtures.shops import SERVICE, WHO
from fixtures.waiting import WAIT_S, wait_until
from rpcwheel import RegistryPolicy
from rpcwheel.errors import RegistryUnavailable
from rpcwheel.registry import ServiceInstance

TARGET = "unix:50051"
"""For gRPC itself this is a Unix socket in the working directory."""

AUTHORIZATION = (("authorization", "Bearer secret"),)


@pytest.fixture
def proxy(monkeypatch, listen):
    """An HTTP proxy that notes which address it is to connect to, and closes the connection."""
    for name in ("no_grpc_proxy", "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    asked = set()

    def note(connection):
        with connection.makefile("rb") as lines:
            if line := lines.readline():  # "CONNECT shop.example:50051 HTTP/1.1"
                asked.add(line.split()[1].decode())

    options = [("grpc.http_proxy", f"http://{listen(note).target}"), *IMPATIENT]
    return SimpleNamespace(asked=asked, options=options)


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
    assert wait_until(lambda: proxy.asked)  # a slow machine connects after the call has failed
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
