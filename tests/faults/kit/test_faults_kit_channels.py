"""Channels of a kit, by address and by name, to servers that freeze."""

import asyncio

import rpcwheel
from fixtures.server_process import PING, KillableServer
from fixtures.shops import SERVICE
from fixtures.waiting import WAIT_S, aio_wait_until, wait_until
from rpcwheel import HeartbeatPolicy, Kit, RetryPolicy, aio
from rpcwheel.balancer import BalancerPolicy
from rpcwheel.events import ConnectionReplaced, SubchannelHealthy, SubchannelUnhealthy
from rpcwheel.heartbeat import HeartbeatState
from rpcwheel.registry import ServiceInstance

QUICK = HeartbeatPolicy(interval=0.2, timeout=0.8)


def has(events, kind):
    return any(isinstance(event, kind) for event in tuple(events))


def test_a_channel_reconnects_after_its_connection_froze(events):
    with (
        KillableServer() as server,
        Kit(
            timeout=WAIT_S,
            heartbeat=QUICK,
            retry=RetryPolicy(
                retry_on="UNAVAILABLE", max_attempts=100, backoff=0.2, retry_budget=None
            ),
            idempotent=True,
        ) as kit,
        kit.channel(server.target) as channel,
    ):
        ping = channel.unary_unary(PING)
        first = ping(b"")
        server.stop()
        late = ping.future(b"")
        assert wait_until(lambda: has(events, ConnectionReplaced))
        server.cont()
        assert late.result(WAIT_S) == first
        (heartbeat,) = kit.heartbeats
        assert heartbeat.replaced >= 1
        assert wait_until(lambda: heartbeat.state is HeartbeatState.ALIVE)
    assert kit.heartbeats == ()


async def test_an_aio_channel_reconnects_after_its_connection_froze(events):
    retry = RetryPolicy(retry_on="UNAVAILABLE", max_attempts=100, backoff=0.2, retry_budget=None)
    with KillableServer() as server:
        target = server.target
        async with (
            aio.Kit(timeout=WAIT_S, heartbeat=QUICK, retry=retry, idempotent=True) as kit,
            kit.channel(target) as channel,
        ):
            ping = channel.unary_unary(PING)
            first = await ping(b"")
            server.stop()
            late = ping(b"")
            await aio_wait_until(lambda: has(events, ConnectionReplaced))
            server.cont()
            assert await late == first
            (heartbeat,) = kit.heartbeats
            assert heartbeat.replaced >= 1
            await aio_wait_until(lambda: heartbeat.state is HeartbeatState.ALIVE)
        assert kit.heartbeats == ()


def test_a_frozen_server_gets_no_calls_until_it_answers(memory, events):
    """Its heartbeat reports it before any call has failed."""
    frozen, other = KillableServer(), KillableServer()
    try:
        with rpcwheel.open_registry(memory) as registry, Kit(heartbeat=0.6) as kit:
            for one in (frozen, other):
                instance = ServiceInstance(service=SERVICE, host="127.0.0.1", port=one.port)
                registry.register(instance, wait=WAIT_S)
            balancer = BalancerPolicy(health_check_backoff=600)
            with kit.channel(f"{memory}/{SERVICE}", balancer_policy=balancer) as channel:
                ping = channel.unary_unary(PING)

                def pids():
                    return {int(ping(b"", timeout=WAIT_S)) for _ in range(4)}

                assert wait_until(lambda: pids() == {frozen.pid, other.pid})
                assert len(kit.heartbeats) == 2
                frozen.stop()
                assert wait_until(
                    lambda: [one for one in events if isinstance(one, SubchannelUnhealthy)]
                )
                assert pids() == {other.pid}
                frozen.cont()
                assert wait_until(
                    lambda: [one for one in events if isinstance(one, SubchannelHealthy)]
                )
                assert wait_until(lambda: pids() == {frozen.pid, other.pid})
    finally:
        frozen.kill()
        other.kill()


async def test_a_frozen_server_gets_no_aio_calls_until_it_answers(memory, events):
    frozen, other = KillableServer(), KillableServer()
    try:
        async with aio.open_registry(memory) as registry, aio.Kit(heartbeat=0.6) as kit:
            for one in (frozen, other):
                instance = ServiceInstance(service=SERVICE, host="127.0.0.1", port=one.port)
                await registry.register(instance, wait=WAIT_S)
            balancer = BalancerPolicy(health_check_backoff=600)
            async with kit.channel(f"{memory}/{SERVICE}", balancer_policy=balancer) as channel:
                ping = channel.unary_unary(PING)

                async def pids():
                    return {int(await ping(b"", timeout=WAIT_S)) for _ in range(4)}

                async def at_last(wanted):
                    async with asyncio.timeout(WAIT_S):
                        while await pids() != wanted:  # noqa: ASYNC110 - there is no event
                            await asyncio.sleep(0.01)

                await at_last({frozen.pid, other.pid})
                assert len(kit.heartbeats) == 2
                frozen.stop()
                await aio_wait_until(
                    lambda: any(isinstance(one, SubchannelUnhealthy) for one in events)
                )
                assert await pids() == {other.pid}
                frozen.cont()
                await aio_wait_until(
                    lambda: any(isinstance(one, SubchannelHealthy) for one in events)
                )
                await at_last({frozen.pid, other.pid})
    finally:
        frozen.kill()
        other.kill()
