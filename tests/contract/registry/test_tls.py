"""Channels by name use TLS or plain text as they were made, never one in place of the other."""

import grpc
import pytest

import rpcwheel
import rpcwheel.aio
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


def callers(channel):
    """A call of each style, which returns the answer or raises."""
    unary, stream = channel.unary_unary(WHO), channel.unary_stream(WHO)
    return (
        lambda: unary(b"", timeout=WAIT_S),
        lambda: unary(b"", timeout=WAIT_S, wait_for_ready=True),
        lambda: unary.with_call(b"", timeout=WAIT_S)[0],
        lambda: unary.future(b"", timeout=WAIT_S).result(),
        lambda: next(stream(b"", timeout=WAIT_S)),
    )


def refusals(channel):
    """The status details of calls of each style, which all fail at once."""
    details = set()
    for call in callers(channel):
        with pytest.raises(grpc.RpcError) as caught:
            call()
        assert caught.value.code() is REFUSED
        details.add(caught.value.details())
    return details


async def aio_refusals(channel):
    details = set()
    unary, stream = channel.unary_unary(WHO), channel.unary_stream(WHO)
    for call in (
        unary(b"", timeout=WAIT_S),
        unary(b"", timeout=WAIT_S, wait_for_ready=True),
        anext(aiter(stream(b"", timeout=WAIT_S))),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        assert caught.value.code() is REFUSED
        details.add(caught.value.details())
    return details


def who(channel, times=4):
    return {channel.unary_unary(WHO)(b"", timeout=WAIT_S) for _ in range(times)}


async def aio_who(channel, times=4):
    return {await channel.unary_unary(WHO)(b"", timeout=WAIT_S) for _ in range(times)}


def test_an_insecure_channel_does_not_call_a_service_with_tls(publish, url):
    publish("secure", tls=True)
    with rpcwheel.insecure_channel(url, **SETTINGS) as channel, rpcwheel.Kit() as kit:
        (details,) = refusals(channel)
        assert REQUIRES_TLS in details
        assert ADVICE in details
        with kit.channel(url, balancer_policy=SETTINGS["balancer_policy"]) as of_kit:
            assert refusals(of_kit) == {details}


async def test_an_insecure_channel_does_not_call_a_service_with_tls_in_aio(publish, url):
    publish("secure", tls=True)
    async with rpcwheel.aio.insecure_channel(url, **SETTINGS) as channel, rpcwheel.aio.Kit() as kit:
        (details,) = await aio_refusals(channel)
        assert REQUIRES_TLS in details
        assert ADVICE in details
        async with kit.channel(url, balancer_policy=SETTINGS["balancer_policy"]) as of_kit:
            assert await aio_refusals(of_kit) == {details}


def test_an_insecure_channel_calls_nothing_while_one_instance_has_tls(publish, url):
    publish("plain", tls=False)
    with rpcwheel.insecure_channel(url, **SETTINGS) as channel:
        assert who(channel) == {b"plain"}
        secure = publish("secure", tls=True)
        assert wait_until(lambda: not channel.subchannels)
        (details,) = refusals(channel)
        assert REQUIRES_TLS in details
        secure.unregister(wait=WAIT_S)
        assert wait_until(lambda: channel.subchannels)
        assert who(channel) == {b"plain"}


def test_a_secure_channel_calls_only_instances_with_tls(publish, url, certificates):
    publish("plain", tls=False)
    publish("secure", tls=True)
    credentials = certificates.channel_credentials()
    with rpcwheel.secure_channel(url, credentials, **SETTINGS) as channel:
        assert who(channel) == {b"secure"}
    policy = SETTINGS["balancer_policy"]
    with rpcwheel.Kit() as kit, kit.channel(url, credentials, balancer_policy=policy) as channel:
        assert who(channel) == {b"secure"}


async def test_a_secure_channel_calls_only_instances_with_tls_in_aio(publish, url, certificates):
    publish("plain", tls=False)
    publish("secure", tls=True)
    credentials = certificates.channel_credentials()
    async with rpcwheel.aio.secure_channel(url, credentials, **SETTINGS) as channel:
        assert await aio_who(channel) == {b"secure"}
    policy = SETTINGS["balancer_policy"]
    async with (
        rpcwheel.aio.Kit() as kit,
        kit.channel(url, credentials, balancer_policy=policy) as channel,
    ):
        assert await aio_who(channel) == {b"secure"}


def test_a_secure_channel_refuses_a_service_without_tls(publish, url, certificates):
    publish("plain", tls=False)
    credentials = certificates.channel_credentials()
    with rpcwheel.secure_channel(url, credentials, **SETTINGS) as channel:
        (details,) = refusals(channel)
        assert WITHOUT_TLS in details
        publish("secure", tls=True)
        assert wait_until(lambda: channel.subchannels)
        assert who(channel) == {b"secure"}


async def test_a_secure_channel_refuses_a_service_without_tls_in_aio(publish, url, certificates):
    publish("plain", tls=False)
    credentials = certificates.channel_credentials()
    async with rpcwheel.aio.secure_channel(url, credentials, **SETTINGS) as channel:
        (details,) = await aio_refusals(channel)
        assert WITHOUT_TLS in details


def test_instances_that_are_not_selected_do_not_count(publish, url):
    publish("plain", tls=False, group="plain")
    publish("secure", tls=True, group="tls")
    with rpcwheel.insecure_channel(url, group="plain", **SETTINGS) as channel:
        assert who(channel) == {b"plain"}
