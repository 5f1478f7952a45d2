"""`insecure_channel` and `secure_channel` take what gRPC's functions take, and registry URLs."""

import inspect

import grpc
import grpc.aio
import pytest

import rpcwheel
import rpcwheel.aio
from fixtures.client_interceptors import aio_interceptor
from fixtures.shops import SERVICE, WHO
from fixtures.waiting import WAIT_S
from rpcwheel.registry import ServiceInstance

NAMES = ("insecure_channel", "secure_channel")
WORLDS = ((rpcwheel, grpc), (rpcwheel.aio, grpc.aio))


@pytest.fixture
def shop(make_shop, certificates, tmp_path):
    """A server, and its targets without TLS."""
    shop = make_shop()
    port = shop.listen()
    path = tmp_path / "shop.sock"
    shop.server.add_insecure_port(f"unix:{path}")
    shop.tls_port = shop.server.add_secure_port("127.0.0.1:0", certificates.server_credentials())
    shop.targets = [f"127.0.0.1:{port}", f"ipv4:127.0.0.1:{port}", f"unix:{path}"]
    shop.instance = ServiceInstance(service=SERVICE, host="127.0.0.1", port=port)
    shop.server.start()
    return shop


def positional(function):
    parameters = inspect.signature(function).parameters.values()
    return [(one.name, one.default) for one in parameters if one.kind is one.POSITIONAL_OR_KEYWORD]


def keyword_only(function):
    parameters = inspect.signature(function).parameters.values()
    return [(one.name, one.default) for one in parameters if one.kind is one.KEYWORD_ONLY]


def test_the_positional_parameters_are_those_of_grpc():
    for ours, grpcs in WORLDS:
        for name in NAMES:
            assert positional(getattr(ours, name)) == positional(getattr(grpcs, name))


def test_the_keyword_only_parameters_are_the_same_everywhere():
    functions = [getattr(ours, name) for ours, _ in WORLDS for name in NAMES]
    assert all(keyword_only(each) == keyword_only(functions[0]) for each in functions)
    assert {default for _, default in keyword_only(functions[0])} == {None}


def test_an_address_gets_a_reconnecting_channel(world, shop):
    options = [("grpc.max_send_message_length", -1)]
    compression = grpc.Compression.Gzip
    for target in shop.targets:
        channel = world.keep(world.do(world.api.insecure_channel, target, options, compression))
        assert isinstance(channel, world.module("transport").ReconnectingChannel)
        assert world.call(channel, method=WHO).result() == b"a"


def test_secure_channel_calls_over_tls(world, shop, certificates):
    target, credentials = f"localhost:{shop.tls_port}", certificates.channel_credentials()
    channel = world.keep(world.do(world.api.secure_channel, target, credentials))
    assert world.call(channel, method=WHO).result() == b"a"


async def test_interceptors_run_in_calls_to_addresses_and_by_name(shop, memory):
    calls = []

    async def note(continuation, details, request):
        calls.append(target)
        return await continuation(details, request)

    async with rpcwheel.aio.open_registry(memory) as registry, rpcwheel.aio.Kit() as kit:
        await registry.register(shop.instance, wait=WAIT_S)
        for target in (shop.targets[0], f"{memory}/{SERVICE}"):
            interceptor = aio_interceptor(note)
            for channel in (
                rpcwheel.aio.insecure_channel(target, None, None, [interceptor]),
                kit.channel(target, interceptors=[interceptor]),
            ):
                async with channel:
                    assert await channel.unary_unary(WHO)(b"", timeout=WAIT_S) == b"a"
            assert calls.count(target) == 2, target
