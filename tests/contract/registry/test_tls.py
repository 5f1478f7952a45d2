"""Channels by name use TLS or plain text as they were made, never one in place of the other."""

import grpc
import pytest

import rpcwheel
from fixtures.shops import SERVICE, WHO
from fixtures.waiting import WAIT_S, wait_until
from rpcwheel import RegistryPolicy
from rpcwheel.balancer import BalancerPolicy
from rpcwheel.registry import ServiceInstance

POLICY = RegistryPolicy(lease_ttl=1800.0, timeout=1.0)
PATIENT = BalancerPolicy(pick_timeout=WAIT_S)
SETTINGS = {"balancer_policy": PATIENT, "registry_policy": POLICY}
"""Calls wait for instances for longer than a machine stands still."""


@pytest.fixture
def publish(memory, make_shop, certificates):
    """Start a server with TLS or without and publish it; gives its registration."""
    with rpcwheel.open_registry(memory, registry_policy=POLICY) as registry:

        def publish(name, *, tls):
            shop = make_shop(name)
            if tls:
                credentials = certificates.server_credentials()
                port = shop.server.add_secure_port("127.0.0.1:0", credentials)
            else:
                port = shop.listen()
            shop.server.start()
            given = {"host": "127.0.0.1", "port": port, "protocol": "grpcs" if tls else "grpc"}
            return registry.register(ServiceInstance(service=SERVICE, **given), wait=WAIT_S)

        yield publish


@pytest.fixture
def open_channel(world, memory):
    """Open a channel to the service, by the function or by a kit."""
    url = f"{memory}/{SERVICE}"

    def open_channel(*credentials, by_kit=False):
        if by_kit:
            kit = world.keep(world.do(world.api.Kit))
            opened = world.do(kit.channel, url, *credentials, balancer_policy=PATIENT)
        else:
            function = world.api.secure_channel if credentials else world.api.insecure_channel
            opened = world.do(function, url, *credentials, **SETTINGS)
        return world.keep(opened)

    return open_channel


def refusal(world, channel):
    """The status details of calls of each style, which all fail at once and equally."""
    calls = [
        world.call(channel, kind, b"", method=WHO, timeout=WAIT_S, **options)
        for kind, options in (
            ("unary_unary", {}),
            ("unary_unary", {"wait_for_ready": True}),
            ("unary_stream", {}),
        )
    ]
    errors = [call.error() for call in calls]
    assert {error.code() for error in errors} == {grpc.StatusCode.FAILED_PRECONDITION}
    (details,) = {error.details() for error in errors}
    return details


def who(world, channel, times=4):
    calls = [world.call(channel, method=WHO, timeout=WAIT_S) for _ in range(times)]
    return {call.result() for call in calls}


def test_an_insecure_channel_calls_nothing_while_one_instance_has_tls(world, publish, open_channel):
    publish("plain", tls=False)
    channel = open_channel()
    assert who(world, channel) == {b"plain"}
    with_tls = publish("secure", tls=True)
    assert wait_until(lambda: not channel.subchannels)
    details = refusal(world, channel)
    assert f"instances of {SERVICE} require TLS" in details
    assert "use rpcwheel.secure_channel(target, credentials)" in details
    assert refusal(world, open_channel(by_kit=True)) == details
    with_tls.unregister(wait=WAIT_S)
    assert wait_until(lambda: channel.subchannels)
    assert who(world, channel) == {b"plain"}


def test_a_secure_channel_calls_only_instances_with_tls(world, publish, open_channel, certificates):
    publish("plain", tls=False)
    credentials = certificates.channel_credentials()
    channel = open_channel(credentials)
    assert f"no instance of {SERVICE} is published with TLS" in refusal(world, channel)
    publish("secure", tls=True)
    assert wait_until(lambda: channel.subchannels)
    assert who(world, channel) == {b"secure"}
    assert who(world, open_channel(credentials, by_kit=True)) == {b"secure"}
