"""The ring of a consistent hash: who owns which part of all keys. Pure.

Each member has some places on it, by its weight, and owns what lies before them. A ring of a
thousand members has 160,000 places: to make one takes a fifth of a second, so that another one is
made of it by its changes alone. Who is away for a while stays on it and is passed over.
"""

from __future__ import annotations

import itertools
import struct
from hashlib import blake2b
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Ring", "nodes_of", "point_of"]

NODES: Final = 160
"""Places on the ring of a member of weight 100; Dubbo's `hash.nodes`."""

USUAL_WEIGHT: Final = 100
LEAST_NODES: Final = 8
MOST_NODES: Final = 1600
WORD: Final = 8
"""Bytes of a place on the ring; a digest has eight of them."""

WORDS: Final = struct.Struct(">8Q")


class Ring:
    """The places of some members, in order. Immutable."""

    __slots__ = ("_nodes", "_places", "owners", "points")

    _nodes: dict[str, int]
    _places: dict[str, list[int]]
    owners: dict[int, str]
    points: list[int]

    def __init__(self, nodes: Mapping[str, int], before: Ring | None = None) -> None:
        """Put members on it.

        Args:
            nodes: How many places each has, by its id.
            before: One that is much the same.
        """
        had: Mapping[str, int] = {} if before is None else before._nodes  # noqa: SLF001 - its own
        known = {} if before is None else before._places  # noqa: SLF001
        self._nodes = dict(nodes)
        self._places = {
            name: known[name] if len(known.get(name, ())) >= count else _places(name, count)
            for name, count in nodes.items()
        }
        """All that were ever found of each: a lighter one has the first of a heavier one's."""
        gone: set[int] = set()
        for name, count in had.items():
            gone.update(known[name][nodes.get(name, 0) : count])
        self.owners = {} if before is None else before.owners.copy()
        """By place."""
        for place in gone:
            self.owners.pop(place, None)
        come: list[int] = []
        for name, count in nodes.items():
            mine = self._places[name][had.get(name, 0) : count]
            come += mine
            self.owners.update(dict.fromkeys(mine, name))
        kept: list[int] = [] if before is None else before.points
        if gone:
            kept = [place for place in kept if place not in gone]
        come.sort()
        self.points = sorted(kept + come) if come else kept  # two runs, which sort in one pass
        """In order."""

    def turned(self, nodes: Mapping[str, int]) -> Ring:
        """The one for these members: itself, if they are on it and not too few others are."""
        had = self._nodes
        if 2 * len(nodes) < len(had):
            return Ring(nodes)
        if all(had.get(name) == count for name, count in nodes.items()):
            return self
        wanted = {**had, **nodes}
        return Ring(wanted if len(wanted) <= 2 * len(nodes) else nodes, self)


def nodes_of(weight: int) -> int:
    """By the weight alone, not by others': or all keys would move when the heaviest leaves."""
    nodes = NODES * weight // USUAL_WEIGHT // LEAST_NODES * LEAST_NODES
    return min(max(nodes, LEAST_NODES), MOST_NODES)


def point_of(key: object) -> int:
    """Where on the ring a key is."""
    data = key if isinstance(key, bytes) else str(key).encode(errors="surrogatepass")
    return int.from_bytes(blake2b(data, digest_size=WORD).digest(), "big")


def _places(name: str, nodes: int) -> list[int]:
    found: list[int] = []
    for number in itertools.count():
        digest = blake2b(f"{name}#{number}".encode(errors="surrogatepass")).digest()
        found += WORDS.unpack(digest)
        if len(found) >= nodes:
            break
    return found
