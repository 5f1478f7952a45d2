"""Which member serves the next call: Dubbo's four ways to balance a load.

A picker is asked once for each change, and makes a function that is asked for each call: it looks
at an immutable list, takes no lock, and may be called on any number of threads at once. One picker
may serve several channels.

==================  ==============  ================================================================
`RoundRobin`        O(1)            In turn; by weight, as gRFC A58 has it (static stride).
                    O(log members)  If one is much heavier than most.
`WeightedRandom`    O(log members)  At random by weight.
`LeastActive`       O(members)      Who has the fewest calls in flight; among those by weight. Of
                                    more than 32 members it looks at 16 at random.
`ConsistentHash`    O(log members)  The same key, the same member; if that leaves, only its keys
                                    move.
==================  ==============  ================================================================
"""

from __future__ import annotations

import difflib
import itertools
import random
from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias, TypeVar

from rpcwheel.errors import ConfigurationError

from ._ring import Ring, nodes_of, point_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = [
    "Candidate",
    "ConsistentHash",
    "LeastActive",
    "Pick",
    "Picker",
    "RoundRobin",
    "WeightedRandom",
    "checked_picker",
]


class Candidate(Protocol):
    """What a picker may look at in a member."""

    @property
    def id(self) -> str:
        """Known by in its service, and unlike all others'."""

    @property
    def calls(self) -> int:
        """Calls in flight, at this moment."""


M = TypeVar("M", bound=Candidate)
Pick: TypeAlias = Callable[[str, Any, Any], M]
"""`pick(method, request, metadata)`; of a call with a stream of requests `request` is None."""

Key: TypeAlias = Callable[[str, Any, Any], str | bytes | int | None]


MOST_LOOKS: Final = 8
"""Members that strides may look at for a pick, on average."""

MOST_COMPARED: Final = 32
"""Members that `LeastActive` compares one by one."""

LOOKS: Final = 16
"""At so many, at random, it looks where there are more. Two would spread load evenly, but for a
factor of log log (Mitzenmacher 2001, "The Power of Two Choices"); more find sooner who is free."""

WHOLE: Final = 1 << 64
GOLDEN: Final = 0x9E3779B97F4A7C15
"""That part of it by whose multiples any number of things is spread evenly over a circle."""


class Picker(ABC):
    """A way to balance load; write your own by this one method."""

    @abstractmethod
    def prepare(self, members: Sequence[M], weights: Sequence[int]) -> Pick[M]:
        """Make the function that picks among these; called anew whenever they change.

        Args:
            members: One at least. Not to be changed.
            weights: Theirs, in the same order; all of them 1 or more.

        Returns:
            What is called for each call, on its thread or loop: it must not block, and may be
            called on many threads at once.
        """


class RoundRobin(Picker):
    """In turn, each as often as its weight says. It begins anywhere, or all clients would at one.

    Args:
        rng: For tests: where chance comes from.
    """

    def __init__(self, rng: random.Random | None = None) -> None:
        self._rng = rng or random.Random()

    def prepare(self, members: Sequence[M], weights: Sequence[int]) -> Pick[M]:
        """Equal weights: the next of the list. Others: see `_stride` and `_evenly`."""
        heaviest, size, row = max(weights), len(members), tuple(members)
        is_even = min(weights) == heaviest
        turns = size if is_even else size * heaviest
        turn = itertools.count(self._rng.randrange(turns)).__next__  # one step of C
        if is_even:
            return _in_turn(row, turn)
        spread = _evenly if turns > MOST_LOOKS * sum(weights) else _stride
        return spread(row, tuple(weights), turn)

    def __repr__(self) -> str:
        return "RoundRobin()"


def _in_turn(members: tuple[M, ...], turn: Callable[[], int]) -> Pick[M]:
    size = len(members)

    def pick(_: str, __: Any, ___: Any) -> M:
        return members[turn() % size]

    return pick


def _stride(members: tuple[M, ...], weights: tuple[int, ...], turn: Callable[[], int]) -> Pick[M]:
    """Go round and round; who has half the greatest weight is passed over every second time.

    In as many rounds as the greatest weight, each is picked exactly as often as its own. Each has
    an offset, so that light ones do not come all in the same round.
    """
    size, heaviest = len(members), max(weights)

    def pick(_: str, __: Any, ___: Any) -> M:
        while True:
            lap, place = divmod(turn(), size)
            weight = weights[place]
            if (weight * (lap + place)) % heaviest >= heaviest - weight:
                return members[place]

    return pick


def _evenly(members: tuple[M, ...], weights: tuple[int, ...], turn: Callable[[], int]) -> Pick[M]:
    """Step over the weights, laid end to end, by the golden ratio: no part is missed for long.

    For weights that are far apart, where strides pass over many light ones for each pick. Each is
    picked as often as its weight says but for a few times, at distances that hardly differ.
    """
    sums = tuple(itertools.accumulate(weights))
    total = sums[-1]

    def pick(_: str, __: Any, ___: Any) -> M:
        at = turn() * GOLDEN % WHOLE  # whole numbers: fractions lose their last digits in time
        return members[bisect_right(sums, at * total // WHOLE)]

    return pick


class WeightedRandom(Picker):
    """At random, each as often as its weight says.

    Args:
        rng: For tests: where chance comes from.
    """

    def __init__(self, rng: random.Random | None = None) -> None:
        self._rng = rng or random.Random()

    def prepare(self, members: Sequence[M], weights: Sequence[int]) -> Pick[M]:
        """By prefix sums."""
        return _at_random(tuple(members), weights, self._rng.random)

    def __repr__(self) -> str:
        return "WeightedRandom()"


def _at_random(
    members: tuple[M, ...], weights: Sequence[int], chance: Callable[[], float]
) -> Pick[M]:
    sums = tuple(itertools.accumulate(weights))
    total = sums[-1]

    def pick(_: str, __: Any, ___: Any) -> M:
        return members[bisect_right(sums, int(chance() * total))]

    return pick


class LeastActive(Picker):
    """Who has the fewest calls in flight from here; of several at random, by weight.

    Slow members get less, without any measuring. Looks at every member for each call, unless it
    finds one without any first. Of more than 32 members it looks at 16 only, at random by weight,
    with one of the fewest calls among them.

    Args:
        rng: For tests: where chance comes from.
    """

    def __init__(self, rng: random.Random | None = None) -> None:
        self._rng = rng or random.Random()

    def prepare(self, members: Sequence[M], weights: Sequence[int]) -> Pick[M]:
        """Dubbo's `leastactive`."""
        row, chance = tuple(members), self._rng.random
        if len(row) > MOST_COMPARED:
            return _least_of_some(row, weights, chance)
        if min(weights) == max(weights):
            return _least_alike(row, chance)
        return _least(row, tuple(weights), chance)

    def __repr__(self) -> str:
        return "LeastActive()"


def _least_alike(members: tuple[M, ...], chance: Callable[[], float]) -> Pick[M]:
    """Begins anywhere and goes round; the first without any calls is taken at once."""
    size, around = len(members), members * 2

    def pick(_: str, __: Any, ___: Any) -> M:
        first = int(chance() * size)
        best, fewest = around[first], around[first].calls
        for member in around[first + 1 : first + size] if fewest else ():
            calls = member.calls
            if calls < fewest:
                best, fewest = member, calls
                if not calls:
                    break
        return best

    return pick


def _least(
    members: tuple[M, ...], weights: tuple[int, ...], chance: Callable[[], float]
) -> Pick[M]:
    def pick(_: str, __: Any, ___: Any) -> M:
        calls = [member.calls for member in members]
        fewest = min(calls)
        if calls.count(fewest) == 1:
            return members[calls.index(fewest)]
        both = zip(weights, calls, strict=True)
        sums = tuple(itertools.accumulate([weight * (count == fewest) for weight, count in both]))
        return members[bisect_right(sums, int(chance() * sums[-1]))]

    return pick


def _least_of_some(
    members: tuple[M, ...], weights: Sequence[int], chance: Callable[[], float]
) -> Pick[M]:
    """Draws some, by weight, and takes who has the fewest; the first without any at once."""
    sums = tuple(itertools.accumulate(weights))
    total = sums[-1]

    def pick(_: str, __: Any, ___: Any) -> M:
        best = members[bisect_right(sums, int(chance() * total))]
        fewest = best.calls
        for _look in range(LOOKS - 1) if fewest else ():
            member = members[bisect_right(sums, int(chance() * total))]
            calls = member.calls
            if calls < fewest:
                best, fewest = member, calls
                if not calls:
                    break
        return best

    return pick


class ConsistentHash(Picker):
    """The same key goes to the same member, in every process; if it leaves, only its keys move.

    Args:
        key: The name of a metadata header whose value is the key, such as `"x-user-id"`; or a
            function `key(method, request, metadata)` that gives the key, None for none (`request`
            is None where requests are streamed). Calls without a key go in turn. It runs on the
            caller's thread; what it raises is the caller's.

    Raises:
        TypeError: It is neither.
        ConfigurationError: It is no name of a header.
    """

    def __init__(self, key: str | Key) -> None:
        self._said = key
        self._key: Key = _header(key) if isinstance(key, str) else key
        if not callable(self._key):
            raise TypeError(
                "key must be the name of a metadata header, such as 'x-user-id', or a function "
                f"key(method, request, metadata), not {key!r}"
            )
        self._ring = Ring({})

    def prepare(self, members: Sequence[M], weights: Sequence[int]) -> Pick[M]:
        """A ring of places, of which each member has some; a key is at the next place."""
        nodes = {one.id: nodes_of(each) for one, each in zip(members, weights, strict=True)}
        self._ring = ring = self._ring.turned(nodes)
        there = {one.id: one for one in members}.get
        key_of, keyless = self._key, RoundRobin().prepare(members, weights)
        points, owners, size = ring.points, ring.owners, len(ring.points)

        def pick(method: str, request: Any, metadata: Any) -> M:
            key = key_of(method, request, metadata)
            if key is None:
                return keyless(method, request, metadata)
            at = bisect_left(points, point_of(key))
            while True:
                member = there(owners[points[at % size]])
                if member is not None:
                    return member
                at += 1  # its owner is not among them now

        return pick

    def __repr__(self) -> str:
        return f"ConsistentHash({self._said!r})"


def _header(name: str) -> Key:
    """Reads the key out of a call's metadata."""
    if not name or name != name.strip() or not name.isascii():
        raise ConfigurationError(f"key must be the name of a header: 'x-user-id', not {name!r}")
    wanted = name.lower()

    def key(_: str, __: Any, metadata: Any) -> str | bytes | None:
        for pair in metadata or ():
            if pair[0] == wanted:
                value: str | bytes = pair[1]
                return value
        return None

    return key


BY_NAME: Final[dict[str, Callable[[], Picker]]] = {
    "round_robin": RoundRobin,
    "weighted_random": WeightedRandom,
    "least_active": LeastActive,
}


def checked_picker(balance: str | Picker) -> Picker:
    """What it stands for: a picker; the name of one; `"consistent_hash:x-user-id"`.

    Raises:
        TypeError: It is neither a name nor a picker.
        ConfigurationError: There is no picker of this name.
    """
    if isinstance(balance, Picker):
        return balance
    if not isinstance(balance, str):
        raise TypeError(f"balance must be a name or a rpcwheel.Picker, not {balance!r}")
    name, colon, header = balance.partition(":")
    if name in BY_NAME and not colon:
        return BY_NAME[name]()
    if name == "consistent_hash":
        if header:
            return ConsistentHash(header)
        raise ConfigurationError(
            "balance='consistent_hash' needs a key: ConsistentHash('x-user-id'), or "
            "'consistent_hash:x-user-id' for a metadata header of that name"
        )
    raise ConfigurationError(f"balance: there is no {balance!r}; {_near(name, BY_NAME)}")


def _near(name: str, names: Iterable[str]) -> str:
    known = [*names, "consistent_hash:HEADER"]
    close = difflib.get_close_matches(name.lower().replace("-", "_"), known, n=1)
    return f"did you mean {close[0]!r}?" if close else f"there are {', '.join(known)}"
