"""What the events of a circuit breaker say, and rules for times that random attempts seldom reach.

`test_breaker_model.py` compares any sequence of attempts with a reference.
"""

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


def test_servers_that_are_lost_one_after_the_other_do_not_open_a_breaker():
    breaker = Breaker(BreakerPolicy(), lambda: 0.0)
    for second in range(1, 60, 3):
        tokens = [breaker.enter() for _ in range(40)]
        for number, token in enumerate(tokens):
            assert breaker.ended(token, "UNAVAILABLE", S // 10, second * S + number) is None
        for _ in range(10):
            assert breaker.ended(breaker.enter(), "OK", 0, second * S + S // 2) is None
