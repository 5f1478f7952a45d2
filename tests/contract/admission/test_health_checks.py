"""A circuit breaker that asks the server whether it serves, before it sends calls again."""

import pytest

from fixtures.heartbeats import NOT_SERVING, SERVING, HealthServer
from fixtures.shop import Shop
from fixtures.waiting import wait_until
from rpcwheel.admission import BreakerPolicy

BREAKER = BreakerPolicy(window_calls=2, minimum_calls=2, half_open_calls=1, open_duration=10.0)


@pytest.fixture
def shop():
    """A server that is not serving."""
    with HealthServer() as shop:
        shop.answer = NOT_SERVING
        yield shop


def open_breaker(shop, world, channel):
    shop.then("UNAVAILABLE", "UNAVAILABLE")
    for _ in range(2):
        world.call(channel).error()


def test_no_call_is_sent_to_a_server_that_is_not_serving(shop, world, timer):
    kit = world.do(world.api.Kit, breaker=BREAKER, timer=timer)
    channel = world.keep(world.do(kit.channel, shop.target))
    open_breaker(shop, world, channel)
    for checks, open_s in ((1, 10.0), (2, 20.0)):
        wait_until(lambda: timer.pending == 1)
        timer.advance(open_s)
        wait_until(lambda checks=checks: len(shop.checks) == checks)
        assert world.call(channel).error().details().startswith("not sent")
    shop.answer = SERVING
    wait_until(lambda: timer.pending == 1)
    timer.advance(40.0)
    (breaker,) = kit.breakers
    wait_until(lambda: breaker.state.value == "half_open")
    assert world.call(channel).result() == b"x"
    assert len(shop.calls) == 3
    world.do(kit.close)


def test_a_call_is_sent_to_a_server_without_health_checks(world, timer):
    with Shop() as shop:
        kit = world.do(world.api.Kit, breaker=BREAKER, timer=timer)
        channel = world.keep(world.do(kit.channel, shop.target))
        open_breaker(shop, world, channel)
        wait_until(lambda: timer.pending == 1)
        timer.advance(10.0)
        (breaker,) = kit.breakers
        wait_until(lambda: breaker.state.value == "half_open")
        assert world.call(channel).result() == b"x"
        world.do(kit.close)


def test_a_channel_without_a_call_leaves_the_health_check_to_another(shop, world, timer):
    """A channel of `grpc.aio` knows its event loop from its first call."""
    kit = world.do(world.api.Kit, breaker=BREAKER, timer=timer)
    channels = [world.keep(world.do(kit.channel, shop.target)) for _ in range(8)]
    open_breaker(shop, world, channels[4])
    wait_until(lambda: timer.pending == 1)
    timer.advance(10.0)
    wait_until(lambda: len(shop.checks) == 1)
    wait_until(lambda: timer.pending == 1)
    (breaker,) = kit.breakers
    assert breaker.state.value == "open"
    world.do(kit.close)
