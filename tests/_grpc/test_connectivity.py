"""Whether the channel behind a continuation is connected, for every way to get at one."""

import asyncio
import contextlib

import grpc
import pytest

from fixtures.shop import STREAM_STREAM, STREAM_UNARY, UNARY_STREAM, UNARY_UNARY
from rpcwheel._grpc.connectivity import is_cut_off


class Look(
    grpc.UnaryUnaryClientInterceptor,
    grpc.UnaryStreamClientInterceptor,
    grpc.StreamUnaryClientInterceptor,
    grpc.StreamStreamClientInterceptor,
):
    """Notes what is known of the channel when a call has ended."""

    def __init__(self) -> None:
        self.saw = []

    def intercept_unary_unary(self, continuation, details, request):
        call = continuation(details, request)
        with contextlib.suppress(grpc.RpcError):
            call.code()
        self.saw.append(is_cut_off(continuation))
        return call

    intercept_unary_stream = intercept_stream_unary = intercept_stream_stream = (
        intercept_unary_unary
    )


class AioLook(grpc.aio.UnaryUnaryClientInterceptor):
    def __init__(self) -> None:
        self.saw = []

    async def intercept_unary_unary(self, continuation, details, request):
        call = await continuation(details, request)
        await call.code()
        self.saw.append(is_cut_off(continuation))
        return call


def call_all(channel):
    for call in (
        lambda: channel.unary_unary(UNARY_UNARY)(b"x", timeout=10),
        lambda: channel.unary_unary(UNARY_UNARY).future(b"x", timeout=10).result(),
        lambda: list(channel.unary_stream(UNARY_STREAM)(b"x", timeout=10)),
        lambda: channel.stream_unary(STREAM_UNARY)(iter([b"x"]), timeout=10),
        lambda: list(channel.stream_stream(STREAM_STREAM)(iter([b"x"]), timeout=10)),
    ):
        with contextlib.suppress(grpc.RpcError):
            call()


@pytest.mark.parametrize("depth", [1, 3])
def test_a_channel_that_never_connected_is_cut_off(depth):
    looks = [Look() for _ in range(depth)]
    with grpc.insecure_channel("127.0.0.1:1") as channel:
        call_all(grpc.intercept_channel(channel, *looks))
    assert [look.saw for look in looks] == [[True] * 5] * depth


def test_a_channel_intercepted_twice_is_found(shop):
    look = Look()
    with grpc.insecure_channel("127.0.0.1:1") as channel:
        call_all(grpc.intercept_channel(grpc.intercept_channel(channel, Look()), look))
    assert look.saw == [True] * 5


def test_a_server_that_answers_so_itself_does_not_cut_it_off(shop, shop_channel):
    look = Look()
    shop.then(*["UNAVAILABLE"] * 5)
    call_all(grpc.intercept_channel(shop_channel, look))
    assert look.saw == [False] * 5


async def test_a_channel_of_aio_is_found_too(shop):
    look = AioLook()
    async with grpc.aio.insecure_channel("127.0.0.1:1", interceptors=[look]) as channel:
        with contextlib.suppress(grpc.RpcError):
            await channel.unary_unary(UNARY_UNARY)(b"x", timeout=10)
    shop.then("UNAVAILABLE")
    async with grpc.aio.insecure_channel(shop.target, interceptors=[look]) as channel:
        with contextlib.suppress(grpc.RpcError):
            await channel.unary_unary(UNARY_UNARY)(b"x", timeout=10)
    assert look.saw == [True, False]


@pytest.mark.parametrize("continuation", [None, print, lambda: None, asyncio.sleep, object()])
def test_of_what_is_not_grpcios_nothing_is_known(continuation):
    assert is_cut_off(continuation) is False
