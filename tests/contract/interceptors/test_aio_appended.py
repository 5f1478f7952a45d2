"""Interceptors appended to the private lists of rpcwheel's aio channels, as google-cloud does."""

from collections import Counter

import grpc
import pytest

from fixtures.aio_channels import Stub
from fixtures.client_interceptors import aio_interceptor
from fixtures.grpcio import opaque
from fixtures.shop import SERVICE, UNARY_UNARY
from fixtures.waiting import WAIT_S
from fixtures.ways import iterate, read_and_write
from fixtures.worlds import KINDS
from rpcwheel import ConfigurationError, RetryPolicy
from rpcwheel.aio import Kit, open_registry
from rpcwheel.balancer.aio import BalancedChannel
from rpcwheel.registry import ServiceInstance
from rpcwheel.transport.aio import ReconnectingChannel

SETTINGS = {
    "timeout": WAIT_S,
    "retry": RetryPolicy(retry_on={"UNAVAILABLE"}, max_attempts=3, backoff=0.01),
    "idempotent": True,
}


STYLES = (iterate, read_and_write)


def append(channel: grpc.aio.Channel) -> Counter[str]:
    """Append interceptors that add metadata, one for each kind; returns their calls by kind."""
    calls = Counter()

    def tagging(kind):
        async def tag(continuation, details, request):
            calls[kind] += 1
            details.metadata.add("passed", "appended")
            return await continuation(details, request)

        return aio_interceptor(tag, kind)

    for kind in KINDS:
        getattr(channel, f"_{kind}_interceptors").append(tagging(kind))
    return calls


def instance_of(shop) -> ServiceInstance:
    return ServiceInstance(service=SERVICE, host="127.0.0.1", port=shop.port)


def passed(shop) -> list[list[str]]:
    """The names of the interceptors of each call that the server received."""
    return [call.metadata.get("passed") for call in shop.calls]


@pytest.fixture
async def kit():
    async with Kit(**SETTINGS) as kit:
        yield kit


@pytest.fixture
async def url(memory, shop):
    """The registry URL of the server."""
    async with open_registry(memory) as registry:
        await registry.register(instance_of(shop), wait=WAIT_S)
        yield f"{memory}/{SERVICE}"


CHANNELS = {
    "ReconnectingChannel": lambda kit, shop, url: ReconnectingChannel(shop.target),
    "BalancedChannel": lambda kit, shop, url: BalancedChannel(SERVICE, [instance_of(shop)]),
    "kit.channel": lambda kit, shop, url: kit.channel(shop.target),
    "kit.channel by name": lambda kit, shop, url: kit.channel(url),
    "intercept_channel of grpc.aio": lambda kit, shop, url: kit.intercept_channel(
        grpc.aio.insecure_channel(shop.target)
    ),
    "intercept_channel of ReconnectingChannel": lambda kit, shop, url: kit.intercept_channel(
        ReconnectingChannel(shop.target)
    ),
}


@pytest.mark.parametrize("maker", CHANNELS.values(), ids=CHANNELS)
async def test_appended_interceptors_run_in_calls_of_each_kind(maker, kit, shop, url):
    async with maker(kit, shop, url) as channel:
        stub = Stub(channel)
        appended = None
        for _ in range(2):
            for style in STYLES:
                for kind in KINDS:
                    assert await style(getattr(stub, kind), kind) == b"ab"
            if appended is None:
                appended = append(channel)  # to stubs that were made and have been used
                shop.calls.clear()
    assert appended == dict.fromkeys(KINDS, len(STYLES))
    assert passed(shop) == ["appended"] * len(STYLES) * len(KINDS)


@pytest.mark.parametrize(
    "name", ["kit.channel", "kit.channel by name", "intercept_channel of grpc.aio"]
)
async def test_appended_interceptors_run_in_each_attempt(name, kit, shop, url):
    shop.then("UNAVAILABLE", "UNAVAILABLE")
    async with CHANNELS[name](kit, shop, url) as channel:
        appended = append(channel)
        assert await channel.unary_unary(UNARY_UNARY)(b"a") == b"a"
    assert appended["unary_unary"] == 3
    assert passed(shop) == ["appended"] * 3


def noting(name, noted):
    """An interceptor that notes its name and the request of each call."""

    async def note(continuation, details, request):
        noted.append((name, request))
        return await continuation(details, request)

    return aio_interceptor(note)


async def test_appended_interceptors_run_on_each_connection_and_behind_those_given(shop):
    noted = []
    given = [noting("given", noted)]
    async with ReconnectingChannel(shop.target, interceptors=given) as channel:
        call = channel.unary_unary(UNARY_UNARY)
        channel._unary_unary_interceptors.append(noting("appended", noted))
        assert await call(b"a") == b"a"
        assert channel.reconnect(force=True)
        assert await call(b"a") == b"a"
        channel._unary_unary_interceptors.append(noting("last", noted))
        assert await call(b"a") == b"a"
    assert [name for name, _ in noted] == ["given", "appended"] * 2 + ["given", "appended", "last"]


async def test_appended_interceptors_run_on_subchannels_that_are_added_later(shop):
    async with BalancedChannel(SERVICE) as channel:
        appended = append(channel)
        channel.update([instance_of(shop)])
        assert await channel.unary_unary(UNARY_UNARY)(b"a") == b"a"
    assert appended["unary_unary"] == 1


async def test_an_appended_interceptor_sees_the_message_and_not_its_bytes(kit, url):
    noted = []
    async with kit.channel(url) as channel:
        channel._unary_unary_interceptors.append(noting("appended", noted))
        call = channel.unary_unary(UNARY_UNARY, request_serializer=str.encode)
        assert await call("message") == b"message"
    assert noted == [("appended", "message")]


async def test_interceptors_that_connect_leaves_no_place_for_are_refused(shop):
    def connect(options):
        return opaque(grpc.aio.insecure_channel(shop.target, options=options))

    async with ReconnectingChannel(shop.target, connect=connect) as channel:
        call = channel.unary_unary(UNARY_UNARY)
        assert await call(b"a") == b"a"
        append(channel)
        with pytest.raises(ConfigurationError, match="pass the interceptors to it in connect"):
            await call(b"a")
