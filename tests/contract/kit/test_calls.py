"""A kit in calls to a real server."""

import pytest

from fixtures.failback_queues import in_world
from fixtures.shop import UNARY_UNARY
from fixtures.waiting import WAIT_S, wait_until
from rpcwheel import FailbackPolicy, RetryPolicy
from rpcwheel.errors import FailbackClosed
from rpcwheel.events import DeadLetterFailed

RETRY = RetryPolicy(retry_on="UNAVAILABLE", backoff=0)
PATIENT = FailbackPolicy(retry_on="UNAVAILABLE", backoff=60)


def by_interceptors(world, kit, shop):
    return world.channel(shop.target, interceptors=world.do(kit.client_interceptors))


def in_front(world, kit, shop):
    return world.do(kit.intercept_channel, world.channel(shop.target))


@pytest.fixture
def kit(world):
    """Makes kits, which are closed at the end."""
    return lambda **settings: world.keep(world.api.Kit(**settings))


def test_close_returns_undelivered_calls_once(shop, world, kit):
    made = kit(failback=PATIENT)
    channel = in_front(world, made, shop)
    shop.then("UNAVAILABLE", "UNAVAILABLE")
    assert world.call(channel).result() is None
    assert made.pending == 1
    assert [entry.function for entry in made.entries()["*"]] == [UNARY_UNARY]
    undelivered = world.do(made.close, drain_timeout=0)
    assert [failed.attempts for failed in undelivered] == [1]
    assert world.do(made.close) == []
    with pytest.raises(FailbackClosed):
        world.call(channel).result()
    assert world.call(channel).result() == b"x"


def test_close_inside_a_hook_of_a_queue_closes_nothing(shop, world, kit, events):
    hook = in_world(world, lambda _: made.close())
    failback = FailbackPolicy(retry_on="UNAVAILABLE", backoff=0, max_attempts=2, dead_letter=hook)
    made = kit(failback=failback, heartbeat=10.0, status_port=0)
    address, channel = made.status_address, in_front(world, made, shop)
    shop.then("UNAVAILABLE", "UNAVAILABLE")
    assert world.call(channel).result() is None
    wait_until(lambda: events.of(DeadLetterFailed))
    assert "close() inside an attempt" in str(events.of(DeadLetterFailed)[0].error)
    assert made.status_address == address is not None
    world.keep(world.do(made.channel, shop.target))  # a closed kit with heartbeats makes none


def test_the_end_of_the_with_block_delivers_queued_calls_and_closes(shop, world, kit):
    made = kit(failback=PATIENT)
    channel = in_front(world, made, shop)
    exit_block = getattr(made, "__exit__", None) or made.__aexit__
    shop.then("UNAVAILABLE")
    assert world.call(channel).result() is None
    world.do(exit_block, None, None, None)
    assert made.pending == 0
    assert [seen.requests for seen in shop.calls] == [[b"x"]] * 2
    shop.then("UNAVAILABLE")
    with pytest.raises(FailbackClosed):
        world.call(channel).result()


def test_the_channels_of_a_kit_share_its_queues_and_its_timer(shop, world, kit, timer):
    made = kit(failback=PATIENT, timer=timer)
    shop.then("UNAVAILABLE", "UNAVAILABLE")
    for through in (by_interceptors, in_front):
        assert world.call(through(world, made, shop)).result() is None
    assert made.pending == timer.pending == 2
    timer.advance(60)
    wait_until(lambda: made.pending == 0)
    assert world.do(made.flush, WAIT_S)
    assert made.stats()["*"].redelivered == 2
    assert [seen.requests for seen in shop.calls] == [[b"x"]] * 4


def test_each_channel_has_its_own_retry_budget(shop, world, kit):
    retry = RETRY.replace(max_attempts=2, retry_budget=0.0, min_retries=1)
    made = kit(retry=retry, idempotent=True)
    one, other = (by_interceptors(world, made, shop) for _ in "ab")
    shop.then(*["UNAVAILABLE"] * 3)
    world.call(one).error()
    world.call(one).error()  # its one retry is spent
    shop.then("UNAVAILABLE")
    assert world.call(other).result() == b"x"
    assert len(shop.calls) == 5
