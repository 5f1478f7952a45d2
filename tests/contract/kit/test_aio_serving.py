"""The same of grpc.aio: a kit serves under a name, and calls by one."""

import asyncio

import pytest

from fixtures.shops import HOLD, SERVICE, WHO
from fixtures.waiting import WAIT_S, aio_wait_until
from rpcwheel import aio
from rpcwheel.aio import ConfigurationError
from rpcwheel.balancer import BalancerPolicy
from rpcwheel.heartbeat import HeartbeatState
from rpcwheel.registry import ServiceInstance

QUICK = {"port": 0, "lame_duck": 0.05}
PATIENT = BalancerPolicy(pick_timeout=WAIT_S)


async def test_a_server_is_published_watched_and_ended_in_order(make_aio_shop, memory):
    async with aio.Kit(timeout=WAIT_S, heartbeat=10.0, idle=180.0, registry=60.0) as kit:
        server = make_aio_shop(interceptors=kit.server_interceptors()).server
        async with kit.serve(server, publish=memory, service=SERVICE, **QUICK) as published:
            assert isinstance(published, aio.Publisher)
            assert published.registries[0].policy.lease_ttl == 60.0
            assert await published.wait_published(WAIT_S)
            (detector,) = kit._detectors
            url = f"{memory}/{SERVICE}"
            for channel in (
                kit.channel(url, balancer=PATIENT),
                aio.insecure_channel(url, policy=PATIENT),
            ):
                async with channel:
                    assert await channel.unary_unary(WHO)(b"", timeout=WAIT_S) == b"a"
            published.begin_stop()
            assert await server.wait_for_termination(WAIT_S) is False
        assert detector.closed


async def test_a_channel_by_name_takes_what_only_a_name_can_have(memory):
    async with aio.Kit() as kit:
        async with kit.channel(memory, service=SERVICE, lb_policy="least_request", zone="eu-1"):
            pass
        with pytest.raises(ConfigurationError, match="only for a service in a registry"):
            kit.channel("127.0.0.1:50051", service=SERVICE)


async def test_the_heartbeat_of_a_subchannel_ends_when_its_instance_is_gone(make_aio_shop, memory):
    shop = make_aio_shop()
    policy = PATIENT.replace(self_preservation=False)
    instance = ServiceInstance(service=SERVICE, host="127.0.0.1", port=shop.listen())
    await shop.server.start()
    async with aio.open_registry(memory) as registry, aio.Kit(heartbeat=60.0) as kit:
        await registry.register(instance, wait=WAIT_S)
        async with kit.channel(f"{memory}/{SERVICE}", balancer=policy) as channel:
            call = channel.unary_unary(HOLD)(b"", timeout=WAIT_S)
            waiting = asyncio.ensure_future(call)
            await asyncio.wait_for(shop.held.wait(), WAIT_S)
            (heartbeat,) = kit.heartbeats
            await registry.unregister(instance, wait=WAIT_S)
            await aio_wait_until(lambda: heartbeat.state is HeartbeatState.WITHDRAWN)
            shop.release.set()
            assert await waiting == b"a"
            await aio_wait_until(lambda: heartbeat.state is HeartbeatState.CLOSED)
            assert kit.heartbeats == ()
