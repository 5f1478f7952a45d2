"""A program gets the same from a bare channel of gRPC and from each kind of channel of rpcwheel."""

import asyncio
from types import SimpleNamespace

import grpc
import pytest

import rpcwheel
import rpcwheel.aio
from fixtures.balanced_channels import instance
from fixtures.shop import STREAM_STREAM
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
    intercept=interceptors.intercept_channel,
    kit=rpcwheel.Kit,
    reconnecting=transport.ReconnectingChannel,
    balanced=balancer.BalancedChannel,
    by_name=rpcwheel.insecure_channel,
)
AIO = SimpleNamespace(
    bare=grpc.aio.insecure_channel,
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


async def aio_outcome(awaitable):
    """The result of an awaitable, or the code of its status, or the type of its exception."""
    try:
        return await asyncio.wait_for(awaitable, WAIT_S)
    except grpc.RpcError as error:
        return error.code()
    except Exception as error:  # noqa: BLE001 - compared
        return type(error)


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
