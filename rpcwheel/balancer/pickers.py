"""Pickers: which subchannel gets the next attempt of a call.

A `Picker` is what gRPC calls a load balancing policy, and the function that its `prepare` returns
is what gRPC calls a picker. `prepare` makes the function from a list of subchannels and their
weights. The function is called for each attempt. It takes no lock and may be called on several
threads at once. Several channels may share one `Picker`.

======================  ==============  ===========================================================
`RoundRobin`            O(1)            In turn. Weights are ignored.
`WeightedRoundRobin`    O(log n)        In turn, in proportion to the weights (gRFC A58).
`WeightedRandom`        O(log n)        At random, in proportion to the weights.
`LeastRequest`          O(log n)        Draws eight by weight and picks the one with the fewest
                                        calls in flight (as gRFC A48, which has no weights), if
                                        none has failed.
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


class Candidate(Protocol):
    """A subchannel as a picker sees it: the attributes that it may read."""

    @property
    def id(self) -> str:
        """Unique within the channel, and the same after a reconnect."""

    @property
    def calls(self) -> int:
        """Calls in flight now."""

    @property
    def load(self) -> float:
        """Calls in flight now; more if calls have failed within about the last second."""

    @property
    def state(self) -> grpc.ChannelConnectivity:
        """Its state now."""


SubchannelT = TypeVar("SubchannelT", bound=Candidate)
Pick: TypeAlias = Callable[[str, Any, Any], SubchannelT | None]
"""`pick(method, request, metadata)` returns a subchannel, or None to let the call wait.

For a call with a stream of requests `request` is None. A call that waits is picked for again each
time the states were read, at least every 50 ms, until its deadline or `pick_timeout` has passed.
"""

CHOICE_COUNT: Final = 8
"""Subchannels that `LeastRequest` draws for one pick. gRFC A48 allows 2 to 10; its default is 2.

The 99th percentile of the latency, divided by the mean service time, in simulations in which some
subchannels are five times slower:

===========  ====  =======  =======  =========
subchannels  slow  draws 2  draws 8  draws all
===========  ====  =======  =======  =========
3            1     99       14       14
32           3     7.9      5.9      5.8
200          20    7.6      6.0      5.8
===========  ====  =======  =======  =========
"""

CIRCLE: Final = 1 << 64
"""The circumference of a circle on which each subchannel has an arc in proportion to its weight."""

GOLDEN_STEP: Final = 0x9E3779B97F4A7C15
"""`CIRCLE` divided by the golden ratio.

The multiples of it are a golden-ratio (low-discrepancy) sequence: however many there are, they are
evenly spread over the circle.
"""


class Picker(ABC):
    """A load balancing policy. Derive from it to write your own.

    (What gRPC calls a picker is the function that `prepare` returns.)
    """

    sees_all_states: ClassVar[bool] = False
    """Whether `prepare` gets the subchannels of all states, or only those that are READY.

    If True, the state of the returned subchannel decides what happens to the call. READY: the call
    is sent. IDLE or CONNECTING: the subchannel is connected, and the call waits for it.
    TRANSIENT_FAILURE: the call fails; return such a subchannel only if all are in that state.
    """

    @abstractmethod
    def prepare(
        self, subchannels: Sequence[SubchannelT], weights: Sequence[int]
    ) -> Pick[SubchannelT]:
        """Make the function that picks among these subchannels.

        Called again whenever the list or the weights change: by an update of the instances, and,
        unless `sees_all_states`, when a subchannel becomes READY or is no longer READY. If it
        raises, calls raise its exception until the next change.

        Args:
            subchannels: At least one. Must not be changed.
            weights: Their weights in the same order, each 1 or more.

        Returns:
            `pick(method, request, metadata)`, which returns one of the subchannels, or None to let
            the call wait. It is called for each attempt of a call, on the thread or event loop of
            the caller. It must not block, and may be called on several threads at once. An
            exception of it is raised to the caller of the RPC.
        """

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class RoundRobin(Picker):
    """Picks the subchannels in turn. Weights are ignored.

    Begins at a random subchannel; otherwise all clients would begin at the same one.
    """

    def prepare(
        self, subchannels: Sequence[SubchannelT], weights: Sequence[int]
    ) -> Pick[SubchannelT]:
        """Return a function that picks in the order of the list."""
        members, size = tuple(subchannels), len(subchannels)
        next_turn = itertools.count(random.randrange(size)).__next__  # needs no lock: atomic in C

        def pick(_method: str, _request: Any, _metadata: Any) -> SubchannelT:
            return members[next_turn() % size]

        return pick


class WeightedRoundRobin(Picker):
    """Picks the subchannels in turn, in proportion to their weights, spread evenly over time.

    With equal weights this is `RoundRobin`. Otherwise each pick takes the next point of a
    golden-ratio sequence, whose only state is a counter. The number of picks of a subchannel stays
    within a few picks of its share. gRFC A58 has the same policy with a static stride scheduler,
    which passes over subchannels with small weights, possibly over all of them for a single pick
    (measured with one weight of 100 and 1,999 weights of 1: 13 us a pick; here 0.3 us).
    """

    def prepare(
        self, subchannels: Sequence[SubchannelT], weights: Sequence[int]
    ) -> Pick[SubchannelT]:
        """Return a function that picks by the next point of a golden-ratio sequence."""
        if min(weights) == max(weights):
            return RoundRobin().prepare(subchannels, weights)
        members, total = tuple(subchannels), sum(weights)
        arc_ends = tuple(end * CIRCLE // total for end in itertools.accumulate(weights))
        next_turn = itertools.count(random.getrandbits(32)).__next__  # needs no lock: atomic in C

        def pick(_method: str, _request: Any, _metadata: Any) -> SubchannelT:
            return members[bisect_right(arc_ends, next_turn() * GOLDEN_STEP % CIRCLE)]

        return pick


class WeightedRandom(Picker):
    """Picks at random, in proportion to the weights."""

    def prepare(
        self, subchannels: Sequence[SubchannelT], weights: Sequence[int]
    ) -> Pick[SubchannelT]:
        """Return a function that draws a subchannel."""
        draw = _weighted_draw(subchannels, weights)

        def pick(_method: str, _request: Any, _metadata: Any) -> SubchannelT:
            return draw()

        return pick


class LeastRequest(Picker):
    """Draws eight subchannels by weight and picks the one with the fewest calls in flight.

    Slow servers get fewer calls without any measurement. If calls have failed within about the last
    second, those in flight are multiplied by the attempts that an answer takes: otherwise a server
    that refuses calls at once would have the fewest in flight, and get most of the calls. The first
    drawn subchannel without load is picked at once. One subchannel may be drawn several times.
    Unlike in gRFC A48 the number of draws is fixed.
    """

    def prepare(
        self, subchannels: Sequence[SubchannelT], weights: Sequence[int]
    ) -> Pick[SubchannelT]:
        """Return a function that draws several subchannels and compares their calls."""
        draw = _weighted_draw(subchannels, weights)

        def pick(_method: str, _request: Any, _metadata: Any) -> SubchannelT:
            best = draw()
            least = best.load
            for _ in range(CHOICE_COUNT - 1):
                if not least:
                    break
                drawn = draw()
                load = drawn.load
                if load < least:
                    best, least = drawn, load
            return best

        return pick


def _weighted_draw(
    subchannels: Sequence[SubchannelT], weights: Sequence[int]
) -> Callable[[], SubchannelT]:
    members, cumulative_weights = tuple(subchannels), tuple(itertools.accumulate(weights))
    total = cumulative_weights[-1]

    def draw() -> SubchannelT:
        # `random()` is at most 1 - 2**-53, so the product is less than `total`.
        return members[bisect_right(cumulative_weights, random.random() * total)]

    return draw
