"""A kit of `grpc.aio` publishes servers, and makes channels by name."""

import pytest

from fixtures.shops import SERVICE, WHO
from fixtures.waiting import WAIT_S
from rpcwheel import aio
from rpcwheel.aio import ConfigurationError
from rpcwheel.balancer import BalancerPolicy

QUICK = {"port": 0, "lame_duck": 0.05}
PATIENT = BalancerPolicy(pick_timeout=WAIT_S)


async def test_a_server_is_published_and_stopped_in_order(make_aio_shop, memory):
    async with aio.Kit(timeout=WAIT_S, heartbeat=10.0, idle=180.0, registry_policy=60.0) as kit:
        server = make_aio_shop(interceptors=kit.server_interceptors()).server
        async with kit.serve(server, publish=memory, service=SERVICE, **QUICK) as published:
            assert isinstance(published, aio.Publisher)
            assert published.registries[0].policy.lease_ttl == 60.0
            assert await published.wait_published(WAIT_S)
            (detector,) = kit.detectors
            url = f"{memory}/{SERVICE}"
            for channel in (
                kit.channel(url, balancer_policy=PATIENT),
                aio.insecure_channel(url, balancer_policy=PATIENT),
            ):
                async with channel:
                    assert await channel.unary_unary(WHO)(b"", timeout=WAIT_S) == b"a"
                    assert any(one.calls_total for one in await detector.connections())
            published.begin_stop()
            assert await server.wait_for_termination(WAIT_S) is False
        assert detector.closed
        assert kit.detectors == ()


async def test_settings_for_channels_by_name_are_refused_for_an_address(memory):
    async with aio.Kit() as kit:
        async with kit.channel(memory, service=SERVICE, lb_policy="least_request", zone="eu-1"):
            pass
        with pytest.raises(ConfigurationError, match="only for a service in a registry"):
            kit.channel("127.0.0.1:50051", service=SERVICE)
