"""What the events and the users of a circuit breaker see of its changes."""

import random

import pytest

from rpcwheel.admission import BreakerPolicy
from rpcwheel.admission.breaker import Breaker, BreakerState

S = 1_000_000_000


def run(breaker, *codes, duration_ns=0):
    """Run attempts one after the other; returns the last transition."""
    transitions = [breaker.ended(breaker.enter(), code, duration_ns, 0) for code in codes]
    return transitions[-1]


def test_a_transition_says_how_many_calls_failed():
    breaker = Breaker(BreakerPolicy(), lambda: 0.0)
    assert (
        run(breaker, *["OK"] * 8, *["UNAVAILABLE"] * 12).reason
        == "12 of 20 calls failed: UNAVAILABLE"
    )
    breaker.half_open(S)
    assert run(breaker, "INTERNAL").reason == "1 of 1 calls failed: INTERNAL"
    breaker.half_open(S)
    assert run(breaker, *["OK"] * 4, "UNKNOWN").reason == "1 of 5 calls failed: UNKNOWN"


def test_a_transition_says_how_many_calls_were_slow():
    breaker = Breaker(BreakerPolicy(slow_call=1.0), lambda: 0.0)
    reason = run(breaker, *["OK"] * 20, duration_ns=S + 1).reason
    assert reason == "0 of 20 calls failed, 20 were slow"


def test_a_breaker_that_stays_half_open_says_why_it_opens():
    breaker = Breaker(BreakerPolicy(minimum_calls=1), lambda: 0.0)
    run(breaker, "UNAVAILABLE")
    breaker.half_open(S)
    assert (breaker.enter(), breaker.enter()) == (2, None)
    assert breaker.give_up(100 * S) is None  # the first refusal
    assert breaker.give_up(159 * S) is None
    assert breaker.give_up(160 * S).reason == "its calls have not ended in time"


def test_a_breaker_stays_half_open_for_as_long_as_its_calls_may_take():
    breaker = Breaker(BreakerPolicy(minimum_calls=1), lambda: 0.0)
    run(breaker, "OK", duration_ns=100 * S)
    run(breaker, "UNAVAILABLE")
    breaker.half_open(S)
    assert (breaker.enter(), breaker.enter()) == (2, None)
    assert breaker.give_up(100 * S) is None
    assert breaker.give_up(299 * S) is None
    assert breaker.give_up(300 * S).after is BreakerState.OPEN


def test_calls_that_are_lost_together_do_not_open_a_breaker():
    """They ran on one server of many, or on one that is restarted."""
    breaker = Breaker(BreakerPolicy(), lambda: 0.0)
    run(breaker, *["OK"] * 50)
    tokens = [breaker.enter() for _ in range(200)]
    for number, token in enumerate(tokens):
        assert breaker.ended(token, "UNAVAILABLE", S // 10, S + number) is None
    assert breaker.window.failures == 1
    transitions = []
    for number in range(24):  # calls that begin after it was lost
        began_ns = S + number * 1000
        now_ns = began_ns + 900
        transitions.append(breaker.ended(breaker.enter(), "UNAVAILABLE", 900, now_ns))
    assert transitions[-1].after is BreakerState.OPEN


def test_servers_that_are_lost_one_after_the_other_do_not_open_a_breaker():
    breaker = Breaker(BreakerPolicy(), lambda: 0.0)
    for second in range(1, 60, 3):
        tokens = [breaker.enter() for _ in range(40)]
        for number, token in enumerate(tokens):
            assert breaker.ended(token, "UNAVAILABLE", S // 10, second * S + number) is None
        for _ in range(10):
            assert breaker.ended(breaker.enter(), "OK", 0, second * S + S // 2) is None


@pytest.mark.parametrize("in_flight", [10, 100])
@pytest.mark.parametrize("share", [0.6, 0.9])
def test_failures_that_are_mixed_with_successes_count_each(in_flight, share):
    """As of a proxy that cannot reach some of its servers, or a handler that aborts."""
    breaker, pattern = Breaker(BreakerPolicy(), lambda: 0.0), random.Random(3)
    transitions = []
    for number in range(600):  # one each millisecond
        now_ns = S + number * S // 1000
        code = "UNAVAILABLE" if pattern.random() < share else "OK"
        duration_ns = in_flight * S // 1000
        transitions.append(breaker.ended(breaker.generation, code, duration_ns, now_ns))
    assert any(transitions)


def test_the_second_round_of_calls_opens_a_breaker_if_no_server_can_be_reached():
    """As of 100 threads whose calls fail after 5 s, because a proxy cannot connect."""
    breaker = Breaker(BreakerPolicy(), lambda: 0.0)
    run(breaker, *["OK"] * 50)
    transitions = [
        breaker.ended(breaker.generation, "UNAVAILABLE", 5 * S, 5 * second * S + number)
        for second in (1, 2)
        for number in range(100)
    ]
    assert [each.after for each in transitions if each] == [BreakerState.OPEN]


def test_a_breaker_whose_timer_is_lost_is_half_open_in_the_end():
    breaker = Breaker(BreakerPolicy(minimum_calls=1), lambda: 0.0)
    run(breaker, "UNAVAILABLE")
    assert breaker.give_up(3 * S) is None
    assert breaker.give_up(4 * S).after is BreakerState.HALF_OPEN


def test_a_slow_attempt_does_not_let_more_attempts_be_sent_at_a_time():
    breaker = Breaker(BreakerPolicy(minimum_calls=1, slow_call=1.0), lambda: 0.0)
    run(breaker, "UNAVAILABLE")
    breaker.half_open(S)
    run(breaker, "OK", duration_ns=2 * S)
    assert (breaker.enter(), breaker.enter()) == (2, None)
