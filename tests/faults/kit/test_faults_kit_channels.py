"""Channels of a kit, by address and by name, to servers that freeze."""

import rpcwheel
from fixtures.server_process import PING
from fixtures.shops import SERVICE
from fixtures.waiting import WAIT_S, wait_until
from rpcwheel import HeartbeatPolicy, RetryPolicy
from rpcwheel.balancer import BalancerPolicy
from rpcwheel.events import ConnectionReplaced, SubchannelHealthy, SubchannelUnhealthy
from rpcwheel.heartbeat import HeartbeatState
from rpcwheel.registry import ServiceInstance

QUICK = HeartbeatPolicy(interval=0.2, timeout=0.8)


def opened(world, target, *, balancer_policy=None, **settings):
    """A kit, and a channel of it to a target."""
    kit = world.keep(world.do(world.api.Kit, **settings))
    options = {"balancer_policy": balancer_policy} if balancer_policy else {}
    return kit, world.keep(world.do(kit.channel, target, **options))


def test_a_channel_reconnects_after_its_connection_froze(world, shop, events):
    server, _ = shop
    retry = RetryPolicy(retry_on="UNAVAILABLE", max_attempts=100, backoff=0.2, retry_budget=None)
    settings = {"timeout": WAIT_S, "heartbeat": QUICK, "retry": retry, "idempotent": True}
    kit, channel = opened(world, server.target, **settings)
    first = world.call(channel, method=PING).result()
    server.stop()
    late = world.call(channel, method=PING)
    assert wait_until(lambda: events.of(ConnectionReplaced))
    server.cont()
    assert late.result() == first
    (heartbeat,) = world.do(lambda: kit.heartbeats)
    assert heartbeat.replaced >= 1
    assert wait_until(lambda: heartbeat.state is HeartbeatState.ALIVE)
    world.do(channel.close)
    world.do(kit.close)
    assert kit.heartbeats == ()


def test_a_frozen_server_gets_no_calls_until_it_answers(world, shop, memory, events):
    """Its heartbeat reports it before any call has failed."""
    frozen, other = shop
    with rpcwheel.open_registry(memory) as registry:
        for one in shop:
            instance = ServiceInstance(service=SERVICE, host="127.0.0.1", port=one.port)
            registry.register(instance, wait=WAIT_S)
        policy = BalancerPolicy(health_check_backoff=600)
        kit, channel = opened(world, f"{memory}/{SERVICE}", balancer_policy=policy, heartbeat=0.6)

        def pids():
            calls = (world.call(channel, method=PING, timeout=WAIT_S) for _ in range(4))
            return {int(call.result()) for call in calls}

        assert wait_until(lambda: pids() == {frozen.pid, other.pid})
        assert len(world.do(lambda: kit.heartbeats)) == 2
        frozen.stop()
        assert wait_until(lambda: events.of(SubchannelUnhealthy))
        assert pids() == {other.pid}
        frozen.cont()
        assert wait_until(lambda: events.of(SubchannelHealthy))
        assert wait_until(lambda: pids() == {frozen.pid, other.pid})
