"""Whether a client sends an attempt of a call, or refuses it itself.

`rpcwheel.Kit(throttle=2.0, breaker=0.5, concurrency="adaptive")` applies it to all calls; in a
`MethodPolicy`, to some methods. A refused attempt is not sent. It fails at once with a status whose
details begin with "not sent: ", and its call is not retried.

* `ThrottlePolicy`, `BreakerPolicy` and `ConcurrencyPolicy` have the settings; `RatePolicy`, the
  fourth, is in `rpcwheel.limit`, because servers have it too.
* `throttle` refuses attempts in proportion to those that fail.
* `breaker` refuses all attempts for a time after too many have failed or were slow.
* `concurrency` limits how many attempts run at the same time.
* `window` counts the outcomes of the last attempts, for `throttle` and `breaker`.
* `circuit` gives a breaker its lock, its timeout and its events: `CircuitBreaker`.
* `method` asks all of them about each attempt of a method.
* `targets` has the methods of a target, and `Breakers`, which is `kit.breakers`.

All but `circuit`, `method` and `targets` decide without I/O.
"""

from typing import TYPE_CHECKING

from rpcwheel._lazy import lazy_names

if TYPE_CHECKING:
    from .breaker import BreakerState
    from .circuit import CircuitBreaker
    from .policy import BreakerPolicy, ConcurrencyPolicy, ThrottlePolicy
    from .targets import Breakers
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            ".breaker": "BreakerState",
            ".circuit": "CircuitBreaker",
            ".policy": "BreakerPolicy ConcurrencyPolicy ThrottlePolicy",
            ".targets": "Breakers",
        },
    )

__all__ = [
    "BreakerPolicy",
    "BreakerState",
    "Breakers",
    "CircuitBreaker",
    "ConcurrencyPolicy",
    "ThrottlePolicy",
]
