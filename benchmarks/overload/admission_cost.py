"""What a throttle and a circuit breaker cost an attempt that is sent and succeeds, without gRPC.

    python -m benchmarks.overload.admission_cost

Each is timed alone, without its lock: the question before the attempt, and the report of its end.
A window with failures costs more than one without. The figures are the best of many rounds, less
those of an empty loop.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from random import random
from timeit import Timer

from rpcwheel.admission import BreakerPolicy, ThrottlePolicy
from rpcwheel.admission.breaker import Breaker
from rpcwheel.admission.throttle import Throttle

CALLS, ROUNDS = 50_000, 41

NOW_NS = 10**18


def throttled(throttle: Throttle) -> Callable[[], object]:
    """Returns an attempt through a throttle."""

    def attempt() -> None:
        throttle.refuses(NOW_NS)
        throttle.ended(NOW_NS, "OK", NOW_NS)

    return attempt


def broken(breaker: Breaker) -> Callable[[], object]:
    """Returns an attempt through a circuit breaker."""

    def attempt() -> None:
        token = breaker.enter()
        breaker.ended(token or 0, "OK", 5_000_000, NOW_NS)

    return attempt


def subjects() -> dict[str, Callable[[], object]]:
    """The attempts by name."""
    throttle, failing_throttle = (Throttle(ThrottlePolicy(), random) for _ in range(2))
    failing_throttle.ended(NOW_NS, "UNAVAILABLE", NOW_NS)
    failing_throttle.ended(NOW_NS, "OK", NOW_NS)
    policies = BreakerPolicy(), BreakerPolicy(window=10.0), BreakerPolicy(slow_call=1.0)
    by_calls, by_time, failing = (Breaker(policy, random) for policy in policies)
    for number in range(50):
        failing.ended(0, "OK" if number % 5 else "UNAVAILABLE", 0, NOW_NS)
    return {
        "throttle": throttled(throttle),
        "throttle, failures in its window": throttled(failing_throttle),
        "breaker": broken(by_calls),
        "breaker, window of time": broken(by_time),
        "breaker, failures in its window": broken(failing),
    }


def main() -> int:
    """Measure, and print a line for each."""

    def nothing() -> None: ...

    timers = {name: Timer(attempt) for name, attempt in subjects().items()}
    rounds: dict[str, list[float]] = {}
    for _ in range(ROUNDS):
        for name, timer in {"": Timer(nothing), **timers}.items():
            rounds.setdefault(name, []).append(timer.timeit(CALLS))
    empty_s = min(rounds.pop(""))
    for name, seconds in rounds.items():
        print(f"{name}: {(min(seconds) - empty_s) / CALLS * 1e6:.2f} us")
    return 0


if __name__ == "__main__":
    sys.exit(main())
