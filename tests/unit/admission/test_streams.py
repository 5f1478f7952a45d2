"""When streams count for the breaker and the throttle of their method."""

import threading

import pytest

from rpcwheel.admission import BreakerPolicy, ThrottlePolicy
from rpcwheel.admission.breaker import BreakerState
from rpcwheel.admission.circuit import CircuitBreaker
from rpcwheel.admission.method import Admitted, MethodAdmission
from rpcwheel.admission.throttle import Throttle


def make(timer, *, breaker=None, throttle=None):
    if breaker is not None:
        breaker = CircuitBreaker(breaker, target="shop", method="/shop.Orders/Watch", timer=timer)
    if throttle is not None:
        throttle = Throttle(throttle, lambda: 0.0)
    return MethodAdmission(
        "shop", "/shop.Orders/Watch", breaker, throttle, None, None,
        is_stream=True, lock=threading.RLock(), timer=timer,
    )  # fmt: skip


def run(method, timer, code, seconds, number):
    """Let streams run one after the other; returns how many of them were sent."""
    sent = 0
    for _ in range(number):
        entered = method.enter()
        timer.advance(seconds)
        if isinstance(entered, Admitted):
            sent += 1
            method.end(entered, code)
    return sent


@pytest.mark.parametrize("seconds", [0.5, 2.0, 5.0])
def test_streams_that_fail_late_are_throttled(timer, seconds):
    """They are not accepted by the server: a proxy cannot reach it."""
    method = make(timer, throttle=ThrottlePolicy(window=60.0))
    assert run(method, timer, "UNAVAILABLE", seconds, 200) < 80


def test_streams_that_go_on_let_others_be_sent(timer):
    method = make(timer, throttle=ThrottlePolicy(window=10.0))
    run(method, timer, "UNAVAILABLE", 0.1, 100)
    assert method.status().rejection > 0.9
    for _ in range(1000):
        entered = method.enter()  # goes on, if it is sent
        timer.advance(0.05)
    assert isinstance(entered, Admitted)
    assert method.status().rejection == 0.0


@pytest.mark.parametrize("throttle", [None, ThrottlePolicy()], ids=["breaker", "and throttle"])
def test_streams_that_are_lost_with_one_server_after_another_are_sent_again(timer, throttle):
    """None of them has ended: they go on until their server is restarted."""
    method = make(timer, breaker=BreakerPolicy(), throttle=throttle)
    timer.advance(100.0)
    for _ in range(5):
        streams = [method.enter() for _ in range(200)]
        assert all(isinstance(stream, Admitted) for stream in streams)
        timer.advance(20.0)
        for number, stream in enumerate(streams):
            timer.advance(0.001 if number < 2 else 0.0)
            method.end(stream, "UNAVAILABLE")
    assert method.breaker.state is BreakerState.CLOSED


def test_a_stream_that_has_counted_for_the_throttle_counts_for_the_breaker_when_it_ends(timer):
    policy = BreakerPolicy(window_calls=10, minimum_calls=10)
    method = make(timer, breaker=policy, throttle=ThrottlePolicy(window=60.0, multiplier=100.0))
    run(method, timer, "UNAVAILABLE", 0.1, 1)
    run(method, timer, "INTERNAL", 3.0, 9)
    assert method.breaker.state is BreakerState.OPEN
