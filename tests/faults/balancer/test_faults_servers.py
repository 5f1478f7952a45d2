"""Balanced channels under load while their servers are killed, frozen and started again."""

import contextlib

import grpc
import pytest

from fixtures.fault_worlds import Load
from fixtures.server_process import PING, KillableServer
from fixtures.waiting import WAIT_S, wait_until
from rpcwheel.balancer import BalancedChannel, BalancerPolicy, OutlierEjectionPolicy
from rpcwheel.balancer.aio_channel import BalancedChannel as AioBalancedChannel
from rpcwheel.events import SubchannelHealthy, SubchannelUnhealthy
from rpcwheel.registry import ServiceInstance

DEADLINE_S = 12.0
"""Of calls to a server that is frozen; longer than a busy machine stands still."""


@pytest.fixture
def servers():
    with contextlib.ExitStack() as started:
        yield [started.enter_context(KillableServer()) for _ in range(3)]


def instances_of(servers):
    return [
        ServiceInstance(service="shop.Orders", host="127.0.0.1", port=one.port) for one in servers
    ]


def pids_of(*servers):
    return [str(one.pid).encode() for one in servers]


def load_on(servers, policy=None, **settings):
    instances = instances_of(servers)
    return Load(
        lambda: BalancedChannel("shop.Orders", instances, balancer_policy=policy),
        lambda: AioBalancedChannel("shop.Orders", instances, balancer_policy=policy),
        method=PING,
        **settings,
    )


def test_a_frozen_server_is_ejected_and_taken_back_when_it_answers(servers, events):
    frozen, *others = servers
    ejection = OutlierEjectionPolicy(consecutive_failures=1, base_ejection_time=0.5)
    policy = BalancerPolicy(outlier_ejection=ejection, health_check_backoff=0.5)

    def channels_that_reported(kind):
        return sum(isinstance(event, kind) for event in tuple(events))

    with load_on(servers, policy, timeout=DEADLINE_S) as load:
        assert load.wait_for_answers_of(*pids_of(*servers))
        frozen.stop()
        assert wait_until(lambda: channels_that_reported(SubchannelUnhealthy) == 2)
        # One for each channel: its threshold. The event comes before the caller has its error.
        assert wait_until(lambda: len(load.failures) == 2)
        assert {error.code() for error in load.failures} == {grpc.StatusCode.DEADLINE_EXCEEDED}
        load.failures.clear()
        assert load.wait_for_answers_of(*pids_of(*others))
        frozen.cont()
        assert wait_until(lambda: channels_that_reported(SubchannelHealthy) == 2)
        assert load.wait_for_answers_of(*pids_of(*servers))
        assert load.failures == []


def test_calls_fail_at_once_with_the_reason_while_all_servers_are_down(world, servers, set_limit):
    set_limit("balancer.health.EXPLAIN_TIMEOUT_S", WAIT_S)  # a busy machine needs over 30 ms
    instances, policy = instances_of(servers), BalancerPolicy(pick_timeout=WAIT_S)
    make = world.module("balancer").BalancedChannel
    channel = world.keep(world.do(make, "shop.Orders", instances, balancer_policy=policy))
    ping = channel.unary_unary(PING)
    assert world.do(ping, b"", timeout=WAIT_S)
    for server in servers:
        server.kill()
    failing = grpc.ChannelConnectivity.TRANSIENT_FAILURE
    assert wait_until(lambda: world.do(channel.get_state, try_to_connect=True) is failing)
    for call in (lambda: world.do(ping, b""), lambda: world.call(channel, method=PING).result()):
        with pytest.raises(grpc.RpcError, match="Connection refused") as failure:
            call()
        assert failure.value.code() is grpc.StatusCode.UNAVAILABLE
        assert servers[0].target in failure.value.details()
    waiting = world.call(channel, method=PING, timeout=WAIT_S, wait_for_ready=True)
    servers[1].restart()
    assert waiting.result() == pids_of(servers[1])[0]
