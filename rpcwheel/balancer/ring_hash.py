"""Ring hash: calls with the same key go to the same subchannel (gRFC A42).

Each subchannel has points on a circle of 64-bit hashes, in proportion to its weight. It owns the
keys between each of its points and the previous point. The hashes of ids and keys are the same in
every process, so that all clients find the same owner.

A ring of 2,000 subchannels has 320,000 points and takes 0.4 s to build. If only a few subchannels
change, the previous ring is updated, which takes 0.01 s for each of them.
"""

from __future__ import annotations

import itertools
import random
import struct
from array import array
from bisect import bisect_left
from collections.abc import Callable
from hashlib import blake2b
from operator import itemgetter
from typing import TYPE_CHECKING, Any, ClassVar, Final, TypeAlias

from grpc import ChannelConnectivity

from rpcwheel._grpc.calls import METADATA_KEY
from rpcwheel.errors import ConfigurationError, safe_repr

from .pickers import Pick, Picker, SubchannelT

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

Key: TypeAlias = Callable[[str, Any, Any], str | bytes | int | None]

FAILED: Final = (ChannelConnectivity.TRANSIENT_FAILURE, ChannelConnectivity.SHUTDOWN)

DEFAULT_WEIGHT: Final = 100
DEFAULT_POINTS: Final = 160
"""Points of a subchannel of the default weight; Dubbo's `hash.nodes`."""

MAX_POINTS: Final = 1600

HASHES: Final = struct.Struct(">8Q")
"""The hashes in one digest."""

HASHES_PER_DIGEST: Final = 8

MAX_UPDATES: Final = 32
"""If more subchannels change at once, it is faster to build a new ring."""

MAX_STEPS: Final = 8
"""How many points along the ring are examined, one state at each, before all states are read."""


class RingHash(Picker):
    """Sends calls with the same key to the same subchannel, in every process (gRFC A42).

    If a subchannel is removed, only its keys move to others; if it returns, they move back. If the
    owner of a key is IDLE or CONNECTING, the call waits for it. If the owner is in
    TRANSIENT_FAILURE, the call goes to the next owner along the ring that is not. For calls without
    a key the subchannels take turns, without regard to weights.

    Args:
        key: The name of the metadata header whose value is the key, such as `"x-user-id"`; or a
            function `key(method, request, metadata)` that returns the key, or None. (For a call
            with a stream of requests `request` is None.) The function is called on the thread of
            the caller. An exception of it is raised to the caller of the RPC.

    Raises:
        TypeError: `key` is neither.
        ConfigurationError: `key` is not the name of a header.
    """

    sees_all_states: ClassVar[bool] = True

    def __init__(self, key: str | Key) -> None:
        self._name = key
        self._key: Key = _key_in_header(key) if isinstance(key, str) else key
        if not callable(self._key):
            raise TypeError(
                "key must be the name of a metadata header, such as 'x-user-id', or a function "
                f"key(method, request, metadata), not {key!r}"
            )
        self._ring = Ring()

    def prepare(
        self, subchannels: Sequence[SubchannelT], weights: Sequence[int]
    ) -> Pick[SubchannelT]:
        """Return a function that finds the owner of the call's key on the ring."""
        members, size, key_of = tuple(subchannels), len(subchannels), self._key
        counts = {
            subchannel.id: point_count(weight)
            for subchannel, weight in zip(members, weights, strict=True)
        }
        self._ring = ring = self._ring.updated(counts)
        points, owner_ids, by_id = (
            ring.points,
            ring.owner_ids,
            {subchannel.id: subchannel for subchannel in members},
        )
        next_turn = itertools.count(random.randrange(size)).__next__  # needs no lock: atomic in C

        def pick(method: str, request: Any, metadata: Any) -> SubchannelT:
            key = key_of(method, request, metadata)
            if key is None:
                owner = members[next_turn() % size]
                if owner.state in FAILED:
                    others = (members[next_turn() % size] for _ in members)
                    return _next_usable(owner, others, members)
                return owner
            at = bisect_left(points, hash_of(key)) - len(points)  # negative: wraps at the end
            owner = by_id[owner_ids[at]]
            if owner.state in FAILED:
                along = (by_id[owner_ids[place]] for place in range(at + 1, at + len(points)))
                return _next_usable(owner, along, members)
            return owner

        return pick

    @safe_repr
    def __repr__(self) -> str:
        return f"RingHash({self._name!r})"


def _key_in_header(name: str) -> Key:
    wanted = name.lower()
    if not METADATA_KEY.fullmatch(wanted):
        raise ConfigurationError(
            f"key must be the name of a metadata header, such as 'x-user-id', not {name!r}"
        )

    def key(_: str, __: Any, metadata: Any) -> str | bytes | None:
        for pair in metadata or ():
            if pair[0] == wanted:
                value: str | bytes = pair[1]
                return value
        return None

    return key


def _next_usable(
    failed: SubchannelT, others: Iterator[SubchannelT], subchannels: Sequence[SubchannelT]
) -> SubchannelT:
    """Return the first of `others` that has not failed; `failed` if all subchannels have.

    Reads one state at a time; after `MAX_STEPS` failed ones, reads each state once.
    """
    for each in itertools.islice(others, MAX_STEPS):
        if each.state not in FAILED:
            return each
    usable = {each.id for each in subchannels if each.state not in FAILED}
    if not usable:
        return failed
    return next(each for each in itertools.chain(others, subchannels) if each.id in usable)


class Ring:
    """The sorted points of all subchannels and the owner of each point. Immutable."""

    __slots__ = ("_counts", "owner_ids", "points")

    def __init__(self) -> None:
        self.points = array("Q")
        self.owner_ids: list[str] = []
        self._counts: dict[str, int] = {}

    def updated(self, counts: Mapping[str, int]) -> Ring:
        """Return a ring with these numbers of points by id; self if nothing changes."""
        before = self._counts
        ids = dict.fromkeys([*before, *counts])
        changed = [id_ for id_ in ids if before.get(id_) != counts.get(id_)]
        if not changed:
            return self
        ring = Ring()
        ring._counts = dict(counts)
        if len(changed) > MAX_UPDATES:
            owners = {
                point: id_ for id_, count in counts.items() for point in points_of(id_, count)
            }
            ring.points = array("Q", sorted(owners))
            ring.owner_ids = [owners[point] for point in ring.points]
            return ring
        changes = []
        for id_ in changed:
            had, has = before.get(id_, 0), counts.get(id_, 0)
            points = points_of(id_, max(had, has))[min(had, has) :]
            changes += [(point, id_ if has > had else None) for point in points]
        begin = 0
        for point, owner_id in sorted(changes, key=itemgetter(0)):  # each point is copied once
            at = bisect_left(self.points, point, begin)
            ring.points += self.points[begin:at]
            ring.owner_ids += self.owner_ids[begin:at]
            if owner_id is None:
                begin = at + 1
            else:
                begin = at
                ring.points.append(point)
                ring.owner_ids.append(owner_id)
        ring.points += self.points[begin:]
        ring.owner_ids += self.owner_ids[begin:]
        return ring


def point_count(weight: int) -> int:
    """Return the number of points for a weight.

    It does not depend on the weights of other subchannels. Otherwise all keys would move if the
    subchannel with the greatest weight is removed.
    """
    digests = DEFAULT_POINTS * weight // DEFAULT_WEIGHT // HASHES_PER_DIGEST
    return min(max(digests, 1) * HASHES_PER_DIGEST, MAX_POINTS)


def points_of(id_: str, count: int) -> list[int]:
    """Return the points of an id. With a smaller count it returns a prefix of the same list."""
    digests = range(count // HASHES_PER_DIGEST)
    return [point for number in digests for point in _hashes(f"{id_}#{number}")]


def hash_of(key: object) -> int:
    """Return the position of a key on the circle."""
    return _hashes(key)[0]


def _hashes(value: object) -> tuple[int, ...]:
    data = value if isinstance(value, bytes) else str(value).encode(errors="surrogatepass")
    return HASHES.unpack(blake2b(data).digest())
