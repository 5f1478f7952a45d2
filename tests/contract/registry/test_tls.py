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
SETTINGS = {"balancer_policy": BalancerPolicy(pick_timeout=WAIT_S), "registry_policy": POLICY}
"""Calls wait for instances for longer than a machine stands still."""

REFUSED = grpc.StatusCode.FAILED_PRECONDITION
REQUIRES_TLS = f"instances of {SERVICE} require TLS"
ADVICE = "use rpcwheel.secure_channel(target, credentials)"
WITHOUT_TLS = f"no instance of {SERVICE} is published with TLS"


@pytest.fixture
def registry(memory):
    with rpcwheel.open_registry(memory, registry_policy=POLICY) as registry:
        yield registry


@pytest.fixture
def publish(make_shop, registry, certificates):
    """Start a server with TLS or without and publish it; gives its registration."""

    def publish(name, *, tls, **fields):
        shop = make_shop(name)
        add, *credentials = (
            (shop.server.add_secure_port, certificates.server_credentials())
            if tls
            else (shop.server.add_insecure_port,)
        )
        port = add("127.0.0.1:0", *credentials)
        shop.server.start()
        protocol = "grpcs" if tls else "grpc"
        instance = ServiceInstance(
            service=SERVICE, host="127.0.0.1", port=port, protocol=protocol, **fields
        )
        return registry.register(instance, wait=WAIT_S)

    return publish


@pytest.fixture
def url(memory):
    return f"{memory}/{SERVICE}"


@pytest.fixture
def insecure(world, url):
    """Open channels to the service without credentials."""

    def insecure(**options):
        return world.keep(world.do(world.api.insecure_channel, url, **SETTINGS | options))

    return insecure


@pytest.fixture
def secure(world, url, certificates):
    """Open a channel to the service with credentials."""
    credentials = certificates.channel_credentials()
    return lambda: world.keep(world.do(world.api.secure_channel, url, credentials, **SETTINGS))


@pytest.fixture
def of_kit(world, url):
    """Open a channel of a kit to the service."""

    def of_kit(*credentials):
        kit = world.keep(world.do(world.api.Kit))
        policy = SETTINGS["balancer_policy"]
        return world.keep(world.do(kit.channel, url, *credentials, balancer_policy=policy))

    return of_kit


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
    assert {error.code() for error in errors} == {REFUSED}
    (details,) = {error.details() for error in errors}
    return details


def who(world, channel, times=4):
    calls = [world.call(channel, method=WHO, timeout=WAIT_S) for _ in range(times)]
    return {call.result() for call in calls}


def test_an_insecure_channel_does_not_call_a_service_with_tls(world, publish, insecure, of_kit):
    publish("secure", tls=True)
    details = refusal(world, insecure())
    assert REQUIRES_TLS in details
    assert ADVICE in details
    assert refusal(world, of_kit()) == details


def test_an_insecure_channel_calls_nothing_while_one_instance_has_tls(world, publish, insecure):
    publish("plain", tls=False)
    channel = insecure()
    assert who(world, channel) == {b"plain"}
    with_tls = publish("secure", tls=True)
    assert wait_until(lambda: not channel.subchannels)
    assert REQUIRES_TLS in refusal(world, channel)
    with_tls.unregister(wait=WAIT_S)
    assert wait_until(lambda: channel.subchannels)
    assert who(world, channel) == {b"plain"}


def test_a_secure_channel_calls_only_instances_with_tls(
    world, publish, secure, of_kit, certificates
):
    publish("plain", tls=False)
    publish("secure", tls=True)
    assert who(world, secure()) == {b"secure"}
    assert who(world, of_kit(certificates.channel_credentials())) == {b"secure"}


def test_a_secure_channel_refuses_a_service_without_tls(world, publish, secure):
    publish("plain", tls=False)
    channel = secure()
    assert WITHOUT_TLS in refusal(world, channel)
    publish("secure", tls=True)
    assert wait_until(lambda: channel.subchannels)
    assert who(world, channel) == {b"secure"}


def test_instances_that_are_not_selected_do_not_count(world, publish, insecure):
    publish("plain", tls=False, group="plain")
    publish("secure", tls=True, group="tls")
    assert who(world, insecure(group="plain")) == {b"plain"}
