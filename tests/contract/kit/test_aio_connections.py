"""Heartbeats and idle detection of a kit of `grpc.aio`."""

from contextlib import asynccontextmanager

import grpc
import pytest

from fixtures.grpc_servers import IMPATIENT
from fixtures.shop import UNARY_UNARY
from fixtures.small_servers import METHOD, small
from fixtures.waiting import aio_wait_until
from rpcwheel.aio import Kit
from rpcwheel.balancer.aio_channel import BalancedChannel
from rpcwheel.events import ConnectionClosed
from rpcwheel.heartbeat import HeartbeatState
from rpcwheel.registry import ServiceInstance
from rpcwheel.timer import ManualTimer
from rpcwheel.transport.aio import ReconnectingChannel


async def echo(request, _):
    return request


@asynccontextmanager
async def serving(kit):
    """A server with all that the kit gives one."""
    interceptors = kit.server_interceptors()
    server = grpc.aio.server(interceptors=interceptors, options=kit.server_options())
    server.add_generic_rpc_handlers([small(grpc.unary_unary_rpc_method_handler(echo))])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield server, port, interceptors
    finally:
        await server.stop(None)


def closed_after(timer, events) -> bool:
    """Let some seconds pass, and see whether a connection was closed."""
    timer.advance(5.0)
    return any(isinstance(one, ConnectionClosed) for one in events)


async def answers(call) -> bool:
    try:
        return await call(b"b") == b"b"
    except grpc.aio.AioRpcError:
        return False


async def test_closing_a_channel_ends_its_heartbeat(shop):
    with ManualTimer() as timer:
        async with Kit(heartbeat=10.0, timer=timer) as kit:
            channel = kit.channel(shop.target)
            assert await channel.unary_unary(UNARY_UNARY)(b"a") == b"a"
            assert len(kit.heartbeats) == 1
            await channel.close()
            assert kit.heartbeats == ()
            assert timer.pending == 0


async def test_closing_a_kit_ends_heartbeats_and_leaves_channels_open(shop):
    with ManualTimer() as timer:
        kit = Kit(heartbeat=10.0, timer=timer)
        async with kit.channel(shop.target) as channel:
            call = channel.unary_unary(UNARY_UNARY)
            assert await call(b"a") == b"a"
            await kit.close()
            assert kit.heartbeats == ()
            assert timer.pending == 0
            assert await call(b"b") == b"b"
        with pytest.raises(RuntimeError, match="closed"):
            kit.channel(shop.target)


async def test_an_idle_connection_is_closed_and_its_client_reconnects(events):
    with ManualTimer() as timer:
        async with Kit(idle=60.0, timer=timer) as kit, serving(kit) as (server, port, _):
            detector = kit.detect_idle(server, port)
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=IMPATIENT) as channel:
                call = channel.unary_unary(METHOD)
                assert await call(b"a") == b"a"
                await aio_wait_until(lambda: closed_after(timer, events))
                while not await answers(call):  # the news takes a moment to the client
                    pass
            assert not detector.closed
            await kit.close()
            assert detector.closed


@pytest.mark.parametrize("make", [ReconnectingChannel, grpc.aio.insecure_channel])
async def test_an_intercepted_channel_has_one_heartbeat_until_it_is_closed(shop, make):
    with ManualTimer() as timer:
        async with Kit(heartbeat=10.0, timer=timer) as kit:
            mine = make(shop.target)
            channel = kit.intercept_channel(mine)
            other = kit.intercept_channel(mine)
            assert await channel.unary_unary(UNARY_UNARY)(b"a") == b"a"
            (heartbeat,) = kit.heartbeats
            assert heartbeat.target == shop.target
            await channel.close()
            assert kit.heartbeats == ()
            assert heartbeat.state is HeartbeatState.CLOSED
            await other.close()


async def test_client_interceptors_warn_once_that_heartbeat_has_no_effect():
    async with Kit(heartbeat=10.0) as kit:
        with pytest.warns(RuntimeWarning, match="has no effect on this channel") as caught:
            kit.client_interceptors()
        assert [one.filename for one in caught] == [__file__]
        kit.client_interceptors()
    Kit().client_interceptors()


def instance_of(shop):
    return ServiceInstance(service="shop", host="127.0.0.1", port=shop.port)


async def test_each_subchannel_of_a_balanced_channel_has_a_heartbeat(shop):
    async with Kit(heartbeat=10.0) as kit, BalancedChannel("shop", [instance_of(shop)]) as balanced:
        channel = kit.intercept_channel(balanced)
        assert await channel.unary_unary(UNARY_UNARY)(b"a") == b"a"
        (subchannel,) = balanced.subchannels
        (heartbeat,) = kit.heartbeats
        assert heartbeat.target == subchannel.instance.target
