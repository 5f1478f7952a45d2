"""`options=None`, gRPC's default, is accepted by all channels."""

import rpcwheel
import rpcwheel.aio
from fixtures.shop import SERVICE, UNARY_UNARY
from fixtures.waiting import WAIT_S
from rpcwheel.registry import ServiceInstance


def instance_of(shop) -> ServiceInstance:
    return ServiceInstance(service=SERVICE, host="127.0.0.1", port=shop.port)


def test_channels_take_none_for_options(shop, memory):
    with rpcwheel.Kit() as kit, rpcwheel.open_registry(memory) as registry:
        registry.register(instance_of(shop), wait=WAIT_S)
        url = f"{memory}/{SERVICE}"
        for channel in (
            rpcwheel.transport.ReconnectingChannel(shop.target, options=None),
            rpcwheel.balancer.BalancedChannel(SERVICE, [instance_of(shop)], options=None),
            rpcwheel.insecure_channel(url, options=None),
            kit.channel(shop.target, options=None),
            kit.channel(url, options=None),
        ):
            with channel:
                assert channel.unary_unary(UNARY_UNARY)(b"a", timeout=WAIT_S) == b"a"


async def test_aio_channels_take_none_for_options(shop, memory):
    async with rpcwheel.aio.Kit() as kit, rpcwheel.aio.open_registry(memory) as registry:
        await registry.register(instance_of(shop), wait=WAIT_S)
        url = f"{memory}/{SERVICE}"
        for channel in (
            rpcwheel.transport.aio.ReconnectingChannel(shop.target, options=None),
            rpcwheel.balancer.aio.BalancedChannel(SERVICE, [instance_of(shop)], options=None),
            rpcwheel.aio.insecure_channel(url, options=None),
            kit.channel(shop.target, options=None),
            kit.channel(url, options=None),
        ):
            async with channel:
                assert await channel.unary_unary(UNARY_UNARY)(b"a", timeout=WAIT_S) == b"a"
