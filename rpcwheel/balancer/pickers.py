"""Pickers: which subchannel gets the next call.

`Picker.prepare` makes a function from a list of subchannels and their weights. The function is
called for each call. It takes no lock and may be called on several threads at once. Several
channels may share one picker.

======================  ==============  ===========================================================
`RoundRobin`            O(1)            In turn. Weights are ignored.
`WeightedRoundRobin`    O(log n)        In turn, in proportion to the weights (gRFC A58).
`WeightedRandom`        O(log n)        At random, in proportion to the weights.
`LeastRequest`          O(log n)        Draws eight by weight and picks the one with the fewest
                                        calls in flight (gRFC A48).
`RingHash`              O(log n)        Calls with the same key go to the same subchannel (gRFC
                                        A42). In `rpcwheel.balancer.ring_hash`.
======================  ==============  ===========================================================

n is the number of subchannels.
"""

from __future__ import annotations

import itertools
import random
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, Final, Protocol, TypeAlias, TypeVar

if TYPE_CHECKING:
    from collections.abc import Sequence

    import grpc

__all__ = [
    "Candidate",
    "LeastRequest",
    "Pick",
    "Picker",
    "RoundRobin",
    "WeightedRandom",
    "WeightedRoundRobin",
]


class Candidate(Protocol):
    """The attributes of a subchannel that a picker may read."""

    @property
    def id(self) -> str:
        """Unique within the channel, and the same after a reconnect."""

    @property
    def calls(self) -> int:
        """Calls in flight now."""

    @property
    def state(self) -> grpc.ChannelConnectivity:
        """Its state now."""


M = TypeVar("M", bound=Candidate)
Pick: TypeAlias = Callable[[str, Any, Any], M | None]
"""`pick(method, request, metadata)` returns a subchannel, or None to let the call wait.

For a call with a stream of requests `request` is None.
"""

CHOICE_COUNT: Final = 8
"""Subchannels that `LeastRequest` draws for one pick. gRFC A48 allows 2 to 10; its default is 2.

The 99th percentile of the latency, divided by the mean service time, in simulations in which some
subchannels are five times slower, with 2, 8 and all subchannels drawn: 3 subchannels of which 1 is
slow: 99, 14, 14; 32 of which 3 are slow: 7.9, 5.9, 5.8; 200 of which 20 are slow: 7.6, 6.0, 5.8.
"""

CIRCLE: Final = 1 << 64
GOLDEN_STEP: Final = 0x9E3779B97F4A7C15
"""`CIRCLE` divided by the golden ratio. Any number of steps of this length are spread evenly over
the circle."""


class Picker(ABC):
    """A load balancing policy. Derive from it to write your own."""

    sees_all_states: ClassVar[bool] = False
    """Whether `prepare` gets the subchannels of all states, or only those that are READY.

    If True, the state of the returned subchannel decides what happens to the call. READY: the call
    is sent. IDLE or CONNECTING: the subchannel is connected, and the call waits for it.
    TRANSIENT_FAILURE: the call fails; return such a subchannel only if all are in that state.
    """

    @abstractmethod
    def prepare(self, subchannels: Sequence[M], weights: Sequence[int]) -> Pick[M]:
        """Return the function that picks among these subchannels.

        It is called again whenever the subchannels or their weights change.

        Args:
            subchannels: At least one. Must not be changed.
            weights: Their weights in the same order, each 1 or more.

        Returns:
            `pick(method, request, metadata)`, which returns one of the subchannels, or None to let
            the call wait. It is called for each call, on the thread or event loop of the caller. It
            must not block, and may be called on several threads at once. The call raises its
            exceptions.
        """

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class RoundRobin(Picker):
    """Picks the subchannels in turn. Weights are ignored.

    Begins at a random subchannel; otherwise all clients would begin at the same one.
    """

    def prepare(self, subchannels: Sequence[M], weights: Sequence[int]) -> Pick[M]:
        """Return a function that picks in the order of the list."""
        row, size = tuple(subchannels), len(subchannels)
        turn = itertools.count(random.randrange(size)).__next__  # atomic

        def pick(_: str, __: Any, ___: Any) -> M:
            return row[turn() % size]

        return pick


class WeightedRoundRobin(Picker):
    """Picks the subchannels in turn, in proportion to their weights, spread evenly over time.

    With equal weights this is `RoundRobin`. With others, the number of picks of a subchannel is
    always within a few picks of its share. gRFC A58 has the same policy with static strides.
    Strides skip subchannels with small weights, up to all of them for one pick if one weight is
    much greater than the others (measured: 13 us a pick with one weight of 100 and 1,999 of 1; here
    0.3 us).
    """

    def prepare(self, subchannels: Sequence[M], weights: Sequence[int]) -> Pick[M]:
        """Return a function that walks in golden steps along a circle divided by the weights."""
        if min(weights) == max(weights):
            return RoundRobin().prepare(subchannels, weights)
        row, total = tuple(subchannels), sum(weights)
        ends = tuple(end * CIRCLE // total for end in itertools.accumulate(weights))
        turn = itertools.count(random.getrandbits(32)).__next__  # atomic

        def pick(_: str, __: Any, ___: Any) -> M:
            return row[bisect_right(ends, turn() * GOLDEN_STEP % CIRCLE)]

        return pick


class WeightedRandom(Picker):
    """Picks at random, in proportion to the weights."""

    def prepare(self, subchannels: Sequence[M], weights: Sequence[int]) -> Pick[M]:
        """Return a function that draws a subchannel."""
        draw = _weighted_draw(subchannels, weights)

        def pick(_: str, __: Any, ___: Any) -> M:
            return draw()

        return pick


class LeastRequest(Picker):
    """Draws eight subchannels by weight and picks the one with the fewest calls in flight.

    Slow servers get fewer calls without any measurement. The first drawn subchannel without calls
    in flight is picked at once.
    """

    def prepare(self, subchannels: Sequence[M], weights: Sequence[int]) -> Pick[M]:
        """Return a function that draws several and compares their calls."""
        draw = _weighted_draw(subchannels, weights)

        def pick(_: str, __: Any, ___: Any) -> M:
            best = draw()
            fewest = best.calls
            for _draw in range(CHOICE_COUNT - 1):
                if not fewest:
                    break
                drawn = draw()
                calls = drawn.calls
                if calls < fewest:
                    best, fewest = drawn, calls
            return best

        return pick


def _weighted_draw(subchannels: Sequence[M], weights: Sequence[int]) -> Callable[[], M]:
    row, ends = tuple(subchannels), tuple(itertools.accumulate(weights))
    total = ends[-1]

    def draw() -> M:
        return row[bisect_right(ends, random.random() * total)]

    return draw
