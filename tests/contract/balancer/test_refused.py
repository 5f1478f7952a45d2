"""Calls that a server refuses before their handlers go to another server."""

from contextlib import suppress

import grpc
import pytest

from fixtures.balanced_channels import (
    First,
    blocking,
    by_a_stream,
    by_an_object,
    connect,
    counts,
    in_front_of,
    subchannel_of,
)
from fixtures.shop import Fail, Hang, Refuse
from fixtures.waiting import WAIT_S, in_thread, wait_until
from rpcwheel import ConcurrencyPolicy, HedgingPolicy, RetryPolicy
from rpcwheel.balancer import OutlierEjectionPolicy

RETRY = RetryPolicy(retry_on="UNAVAILABLE", backoff=1000.0, retry_budget=None, max_attempts=4)
LONG = Refuse(after_ms=5000)
"""A refusal by a server that asks to wait for as long as a test never does."""


@pytest.fixture
def open_retried(world, open_balanced, timer):
    """Opens a balanced channel, and one in front of it whose calls are retried."""

    def open_both(*targets, idempotent=False, retry=RETRY, hedging=None, **settings):
        channel = open_balanced(*targets, **settings)
        connect(world, channel)
        settings = {"retry": retry, "hedging": hedging, "idempotent": idempotent}
        return channel, in_front_of(world, channel, timer=timer, **settings)

    return open_both


@pytest.mark.parametrize(
    ("lb_policy", "idempotent", "call"),
    [
        ("round_robin", False, blocking),
        ("round_robin", True, by_an_object),
        ("ring_hash:user", False, by_an_object),
        ("ring_hash:user", True, blocking),
        ("ring_hash:user", False, by_a_stream),
    ],
)
def test_a_refused_call_goes_to_each_other_server_at_once(
    world, shops, open_retried, lb_policy, idempotent, call, timer
):
    _, retried = open_retried(*shops, idempotent=idempotent, lb_policy=lb_policy)
    for shop in shops:
        shop.then(LONG)
    waiting = in_thread(call, world, retried)
    wait_until(lambda: counts(shops) == [1, 1, 1])
    wait_until(lambda: timer.pending == 1)  # all have refused: it waits for the pushback
    assert not waiting.done()
    timer.advance(5.0)
    assert waiting.result(WAIT_S) == b"x"
    assert sum(counts(shops)) == 4


@pytest.mark.parametrize("call", [blocking, by_an_object, by_a_stream])
def test_the_second_server_answers_a_call_that_the_first_one_refuses(
    world, shops, open_retried, call, timer
):
    _, retried = open_retried(*shops[:2], lb_policy="ring_hash:user")
    call(world, retried)
    first = shops[counts(shops).index(1)]
    first.then(LONG)
    assert call(world, retried) == b"x"
    assert sorted(counts(shops[:2])) == [1, 2]
    assert call(world, retried) == b"x"  # the next call begins where the picker says
    assert len(first.calls) == 3
    assert timer.pending == 0


@pytest.mark.parametrize("kind", ["unary_unary", "stream_unary"])
def test_a_refused_call_that_has_waited_for_admission_goes_to_another_server_at_once(
    world, shops, open_balanced, timer, kind
):
    channel = open_balanced(*shops[:2], lb_policy=First())
    concurrency = ConcurrencyPolicy(max_calls=1, max_wait=60.0)
    connect(world, channel)
    retried = in_front_of(world, channel, retry=RETRY, concurrency=concurrency, timer=timer)
    blocking(world, retried)
    first = shops[counts(shops).index(1)]
    first.then(hang := Hang(), LONG)
    running = world.call(retried, kind)
    assert hang.begun.wait(WAIT_S)
    waiting = world.call(retried, kind)
    wait_until(lambda: timer.pending == 1)
    first.calls[1].ended.set()
    running.result()
    assert waiting.result() == b"x"
    assert sorted(counts(shops)) == [0, 1, 3]


def test_a_server_that_is_not_connected_does_not_count_as_another_one(
    world, shops, dead, open_balanced, timer
):
    channel = open_balanced(shops[0], dead)
    retried = in_front_of(world, channel, retry=RETRY, timer=timer)
    blocking(world, retried)
    shops[0].then(LONG)
    call = world.call(retried)
    wait_until(lambda: timer.pending)
    assert len(shops[0].calls) == 2
    call.cancel()


def test_a_refused_hedge_goes_to_another_server_at_once(world, shops, open_retried):
    hedging = HedgingPolicy(delay=1000.0, max_attempts=3, retry_budget=None)
    _, hedged = open_retried(*shops, retry=None, hedging=hedging, idempotent=True)
    for shop in shops:
        shop.then(LONG)
    with pytest.raises(grpc.RpcError):
        blocking(world, hedged)
    assert counts(shops) == [1, 1, 1]
    assert blocking(world, hedged) == b"x"


def test_a_refused_hedge_does_not_go_where_another_attempt_runs(world, shops, open_retried, timer):
    hedging = HedgingPolicy(delay=1.0, max_attempts=3, max_pushback=1.0, retry_budget=None)
    _, hedged = open_retried(*shops[:2], retry=None, hedging=hedging, idempotent=True)
    for shop in shops[:2]:
        shop.then(Hang(code="INTERNAL"))
    call = world.call(hedged)
    wait_until(lambda: sum(counts(shops)) == 1)
    first, other = shops[:2] if shops[0].calls else shops[1::-1]
    other.reset()
    other.then(LONG)
    timer.advance(1.0)
    wait_until(lambda: other.calls and other.calls[0].ended.is_set())
    for _ in range(4):  # meanwhile the client has seen the refusal
        blocking(world, hedged)
    first.calls[0].ended.set()
    assert call.error().code() is grpc.StatusCode.INTERNAL
    # The server asks to wait longer than max_pushback, so there was no third attempt.
    assert sum(shop.count_calls(**{"x-retry-attempt": "2"}) for shop in shops) == 0


def test_a_server_that_refuses_is_not_unhealthy(world, shops, open_retried, events):
    ejection = OutlierEjectionPolicy(consecutive_failures=2)
    policy = {"outlier_ejection": ejection}
    channel, retried = open_retried(*shops[:2], retry=None, policy=policy)
    for _ in range(10):
        shops[0].then(Refuse())
        shops[1].then(Refuse())
        for _ in range(2):
            with pytest.raises(grpc.RpcError):
                blocking(world, retried)
    assert all(subchannel_of(channel, shop).healthy for shop in shops[:2])
    assert events == []


@pytest.mark.parametrize("failure", [Refuse(), Fail("INTERNAL")], ids=["refused", "failed"])
def test_least_request_spares_a_server_whose_calls_fail_at_once(
    world, shops, open_balanced, failure
):
    broken, working = shops[:2]
    channel = open_balanced(broken, working, lb_policy="least_request")
    connect(world, channel)
    broken.then(*[failure] * 1000)
    working.then(Hang(), Hang())
    calls = []
    while len(working.calls) < 2:
        calls.append(world.call(channel))
        assert wait_until(lambda: sum(counts(shops)) == len(calls))
    before = len(broken.calls)
    for _ in range(60):
        with suppress(grpc.RpcError):
            blocking(world, channel)  # a future may end before its failure is counted
    # Until two have failed, that server has the fewest calls. (The time stands still.)
    assert len(broken.calls) - before <= 20  # of 60
    for seen in working.calls[:2]:
        seen.ended.set()
