"""A program gets the same from a bare channel of gRPC and from each kind of channel of rpcwheel."""

import asyncio
from types import SimpleNamespace

import grpc
import pytest

import rpcwheel
import rpcwheel.aio
from fixtures.balanced_channels import instance
from fixtures.shop import STREAM_STREAM, UNARY_STREAM, UNARY_UNARY
from fixtures.waiting import WAIT_S
from rpcwheel import RetryPolicy
from rpcwheel.balancer import aio as aio_balancer
from rpcwheel.balancer import sync as balancer
from rpcwheel.call import CallPolicy
from rpcwheel.interceptors import aio as aio_interceptors
from rpcwheel.interceptors import sync as interceptors
from rpcwheel.transport import aio as aio_transport
from rpcwheel.transport import sync as transport

POLICY = CallPolicy(retry=RetryPolicy(retry_on="UNAVAILABLE", backoff=0.0), idempotent=True)

SYNC = SimpleNamespace(
    bare=grpc.insecure_channel,
    with_interceptors=lambda target, interceptors: grpc.intercept_channel(
        grpc.insecure_channel(target), *interceptors
    ),
    interceptors=interceptors.client_interceptors,
    intercept=interceptors.intercept_channel,
    kit=rpcwheel.Kit,
    reconnecting=transport.ReconnectingChannel,
    balanced=balancer.BalancedChannel,
    by_name=rpcwheel.insecure_channel,
)
AIO = SimpleNamespace(
    bare=grpc.aio.insecure_channel,
    with_interceptors=lambda target, interceptors: grpc.aio.insecure_channel(
        target, interceptors=interceptors
    ),
    interceptors=aio_interceptors.client_interceptors,
    intercept=aio_interceptors.intercept_channel,
    kit=rpcwheel.aio.Kit,
    reconnecting=aio_transport.ReconnectingChannel,
    balanced=aio_balancer.BalancedChannel,
    by_name=rpcwheel.aio.insecure_channel,
)

CHANNELS = {
    "bare": lambda world, port: world.bare(f"127.0.0.1:{port}"),
    "intercepted": lambda world, port: world.intercept(CHANNELS["bare"](world, port), POLICY),
    "kit": lambda world, port: world.kit.from_policy(POLICY).channel(f"127.0.0.1:{port}"),
    "reconnecting": lambda world, port: world.reconnecting(f"127.0.0.1:{port}"),
    "balanced": lambda world, port: world.balanced("test.Shop", [instance(port)]),
    "by name": lambda world, port: world.by_name(f"headless://127.0.0.1:{port}"),
    "kit, balanced": lambda world, port: world.kit.from_policy(POLICY).intercept_channel(
        CHANNELS["balanced"](world, port)
    ),
}
ALL = pytest.mark.parametrize("kind", CHANNELS)


def of_error(error):
    """The code of a status, or the type of another exception."""
    return error.code() if isinstance(error, grpc.RpcError) else type(error)


def outcome(function, *args, **options):
    """The result of a function, or its error."""
    try:
        return function(*args, **options)
    except Exception as error:  # noqa: BLE001 - compared
        return of_error(error)


async def aio_outcome(awaitable):
    """The result of an awaitable, or its error."""
    try:
        return await asyncio.wait_for(awaitable, WAIT_S)
    except Exception as error:  # noqa: BLE001 - compared
        return of_error(error)


# Written requests without a server


async def writes(call):
    return [
        await aio_outcome(step)
        for step in (call.write(b"a"), call.write(b"b"), call.done_writing(), call.read())
    ]


async def writes_after_the_end(call):
    await call.code()
    return await writes(call)


@ALL
@pytest.mark.parametrize(
    ("program", "options", "code"),
    [
        (writes, {}, grpc.StatusCode.UNAVAILABLE),
        (writes, {"timeout": 0, "wait_for_ready": True}, grpc.StatusCode.DEADLINE_EXCEEDED),
        (writes_after_the_end, {}, grpc.StatusCode.UNAVAILABLE),
    ],
)
async def test_writes_without_a_server_end_as_with_grpc(dead, kind, program, options, code):
    first = code if program is writes else asyncio.InvalidStateError
    async with CHANNELS[kind](AIO, dead) as channel:
        call = channel.stream_stream(STREAM_STREAM)(**options)
        assert await program(call) == [first, asyncio.InvalidStateError, None, code]


@ALL
async def test_nothing_can_be_written_while_done_writing_waits_for_a_server(dead, kind):
    async with CHANNELS[kind](AIO, dead) as channel:
        call = channel.stream_stream(STREAM_STREAM)(wait_for_ready=True)
        ending = asyncio.create_task(call.done_writing())
        await asyncio.sleep(0)
        assert await aio_outcome(call.write(b"lost")) is asyncio.InvalidStateError
        ending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await ending
        assert call.cancelled()


# Wrong arguments without a server


def broken(_):
    raise KeyError


WRONG = [
    {"metadata": 42},
    {"metadata": [("a",)]},
    {"metadata": [("a", 5)]},
    {"metadata": [("a-bin", "text")]},
    {"request": "text"},
    {"request": "text", "serializer": broken},
]
RIGHT = {"metadata": [("a", b"b"), ("a-bin", b"c"), ("d", None)]}


def first_message(channel, style, *, request=b"x", serializer=None, **options):
    if style == "stream":
        return next(channel.unary_stream(UNARY_STREAM, serializer)(request, **options))
    method = channel.unary_unary(UNARY_UNARY, serializer)
    return (
        method(request, **options)
        if style == "call"
        else method.future(request, **options).result()
    )


async def aio_first_message(channel, style, *, request=b"x", serializer=None, **options):
    if style == "stream":
        return await channel.unary_stream(UNARY_STREAM, serializer)(request, **options).read()
    return await channel.unary_unary(UNARY_UNARY, serializer)(request, **options)


@ALL
@pytest.mark.parametrize("style", ["call", "future", "stream"])
def test_wrong_arguments_without_a_server_raise_as_with_grpc(dead, kind, style):
    def ends(channel):
        with channel:
            return [outcome(first_message, channel, style, **row) for row in (*WRONG, RIGHT)]

    expected = ends(CHANNELS["bare"](SYNC, dead))
    assert expected[:2] == [TypeError, ValueError]
    assert ends(CHANNELS[kind](SYNC, dead)) == expected


@ALL
@pytest.mark.parametrize("style", ["call", "stream"])
async def test_wrong_arguments_without_a_server_raise_as_with_grpc_aio(dead, kind, style):
    credentials = {"credentials": grpc.access_token_call_credentials("secret")}

    async def ends(channel):
        async with channel:
            return [
                await aio_outcome(aio_first_message(channel, style, **row))
                for row in (*WRONG, RIGHT, credentials)
            ]

    expected = await ends(CHANNELS["bare"](AIO, dead))
    assert expected[-2:] == [grpc.StatusCode.UNAVAILABLE, grpc.aio.UsageError]
    assert await ends(CHANNELS[kind](AIO, dead)) == expected


# Metadata in an iterator

REPEATING = CHANNELS | {
    "interceptors": lambda world, port: world.with_interceptors(
        f"127.0.0.1:{port}", world.interceptors(POLICY)
    ),
    "ring hash": lambda world, port: world.balanced(
        "test.Shop", [instance(port)], lb_policy="ring_hash:user"
    ),
}


@pytest.mark.parametrize("kind", REPEATING)
@pytest.mark.parametrize("style", ["call", "future", "stream"])
def test_each_attempt_sends_the_metadata_of_an_iterator(shop, kind, style):
    shop.then("UNAVAILABLE")
    with REPEATING[kind](SYNC, shop.port) as channel:
        outcome(first_message, channel, style, metadata=iter([("user", "a")]))
    assert {seen.metadata.get("user") for seen in shop.calls} == {"a"}


@pytest.mark.parametrize("kind", REPEATING)
@pytest.mark.parametrize("style", ["call", "stream"])
async def test_each_attempt_of_grpc_aio_sends_the_metadata_of_an_iterator(shop, kind, style):
    shop.then("UNAVAILABLE")
    async with REPEATING[kind](AIO, shop.port) as channel:
        await aio_outcome(aio_first_message(channel, style, metadata=iter([("user", "a")])))
    assert {seen.metadata.get("user") for seen in shop.calls} == {"a"}


# A closed channel


@ALL
async def test_a_closed_channel_refuses_to_wait_for_another_state(dead, kind):
    channel = CHANNELS[kind](AIO, dead)
    await channel.close()
    for state in (grpc.ChannelConnectivity.SHUTDOWN, grpc.ChannelConnectivity.IDLE):
        assert await aio_outcome(channel.wait_for_state_change(state)) is grpc.aio.UsageError
