"""Ring hash: calls with the same key go to the same subchannel (gRFC A42).

Each subchannel has points on a circle of 64-bit hashes, as many as its weight says, and owns the
keys between each of its points and the point before it. Ids and keys are hashed alike in every
process, so that all clients find the same owner.

A ring of 2,000 subchannels has 320,000 points, and to compute them takes half a second. Therefore
a ring is made from the one before it by their differences.
"""

from __future__ import annotations

import itertools
import random
import struct
from bisect import bisect_left
from collections.abc import Callable
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, ClassVar, Final, TypeAlias

from grpc import ChannelConnectivity

from rpcwheel.errors import ConfigurationError

from .pickers import M, Pick, Picker

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

__all__ = ["RingHash"]

Key: TypeAlias = Callable[[str, Any, Any], str | bytes | int | None]

FAILED: Final = (ChannelConnectivity.TRANSIENT_FAILURE, ChannelConnectivity.SHUTDOWN)

DEFAULT_WEIGHT: Final = 100
DEFAULT_POINTS: Final = 160
"""Points of a subchannel of the default weight; Dubbo's `hash.nodes`."""

POINTS_STEP: Final = 8
"""Numbers of points are multiples of this; it is the least."""

MAX_POINTS: Final = 1600

HASH_BYTES: Final = 8
HASHES_OF_DIGEST: Final = struct.Struct(f">{POINTS_STEP}Q")


class RingHash(Picker):
    """The same key goes to the same subchannel, in every process (gRFC A42).

    When a subchannel leaves, only its keys move; when it returns, they come back. While the owner
    of a key is IDLE or CONNECTING, the call waits for it. While it is in TRANSIENT_FAILURE, the
    call goes to the next owner along the ring that is not. Calls without a key go in turn, weights
    ignored, in the same way.

    Args:
        key: The name of the metadata header whose value is the key, such as `"x-user-id"`; or a
            function `key(method, request, metadata)` that returns the key, or None for none. (For
            a call with a stream of requests `request` is None.) The function is called on the
            thread of the caller, who gets what it raises.

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

    def prepare(self, subchannels: Sequence[M], weights: Sequence[int]) -> Pick[M]:
        """Return a function that finds the owner of the call's key on the ring."""
        row, key_of = tuple(subchannels), self._key
        counts = {one.id: point_count(each) for one, each in zip(row, weights, strict=True)}
        self._ring = ring = self._ring.updated(counts)
        points, owner_ids, by_id = ring.points, ring.owner_ids, {one.id: one for one in row}
        turn = itertools.count(random.randrange(len(row))).__next__  # atomic

        def pick(method: str, request: Any, metadata: Any) -> M:
            key = key_of(method, request, metadata)
            if key is None:
                candidates = (row[turn() % len(row)] for _ in row)
            else:
                start = bisect_left(points, hash_of(key))
                around = range(start - len(points), start)  # negative indexes: on from the start
                candidates = (by_id[owner_ids[points[at]]] for at in around)
            return _first_not_failed(candidates, len(row))

        return pick

    def __repr__(self) -> str:
        return f"RingHash({self._name!r})"


def _key_in_header(name: str) -> Key:
    if not name or name != name.strip() or not name.isascii():
        raise ConfigurationError(
            f"key must be the name of a metadata header, such as 'x-user-id', not {name!r}"
        )
    wanted = name.lower()

    def key(_: str, __: Any, metadata: Any) -> str | bytes | None:
        for pair in metadata or ():
            if pair[0] == wanted:
                value: str | bytes = pair[1]
                return value
        return None

    return key


def _first_not_failed(candidates: Iterator[M], count: int) -> M:
    first = next(candidates)
    if first.state not in FAILED:
        return first
    failed = {first.id}
    for each in candidates:
        if each.id in failed:
            continue
        if each.state not in FAILED:
            return each
        failed.add(each.id)
        if len(failed) == count:
            break
    return first


class Ring:
    """The points of all subchannels, sorted, and their owners. Immutable."""

    __slots__ = ("_points_of", "owner_ids", "points")

    def __init__(self) -> None:
        self.points: list[int] = []
        self.owner_ids: dict[int, str] = {}
        """By point."""
        self._points_of: dict[str, list[int]] = {}

    def updated(self, counts: Mapping[str, int]) -> Ring:
        """Return the ring of these ids with these numbers of points; self if nothing changes."""
        before = self._points_of
        now = {
            id_: before[id_] if len(before.get(id_, ())) == count else points_of(id_, count)
            for id_, count in counts.items()
        }
        removed = {point for id_ in before.keys() - now.keys() for point in before[id_]}
        added: dict[int, str] = {}
        for id_, points in now.items():
            if before.get(id_) is not points:
                removed.update(before.get(id_, ()))
                added.update(dict.fromkeys(points, id_))
        if not removed and not added:
            return self
        ring = Ring()
        ring._points_of = now
        ring.owner_ids = {
            **{point: id_ for point, id_ in self.owner_ids.items() if point not in removed},
            **added,
        }
        ring.points = sorted([*(point for point in self.points if point not in removed), *added])
        return ring


def point_count(weight: int) -> int:
    """Return the number of points for a weight.

    It does not depend on the weights of others: otherwise all keys would move when the heaviest
    subchannel leaves.
    """
    count = DEFAULT_POINTS * weight // DEFAULT_WEIGHT // POINTS_STEP * POINTS_STEP
    return min(max(count, POINTS_STEP), MAX_POINTS)


def points_of(id_: str, count: int) -> list[int]:
    """Return the points of an id; fewer are the first of more."""
    points: list[int] = []
    for number in range(count // POINTS_STEP):
        digest = blake2b(f"{id_}#{number}".encode(errors="surrogatepass")).digest()
        points += HASHES_OF_DIGEST.unpack(digest)
    return points


def hash_of(key: object) -> int:
    """Return the place of a key on the circle."""
    data = key if isinstance(key, bytes) else str(key).encode(errors="surrogatepass")
    return int.from_bytes(blake2b(data, digest_size=HASH_BYTES).digest(), "big")
