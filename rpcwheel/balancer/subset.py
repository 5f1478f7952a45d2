"""The instances of a channel, and which of them get a subchannel. Pure.

With many instances each channel uses a subset (gRFC A68). It is chosen by rendezvous hashing with a
random seed for each channel, so a change replaces as few subchannels as possible. Instances of
other zones rank after those of the preferred zone. DRAINING instances and those with weight 0 rank
last. Each tag of Dubbo's has a subset of its own, as calls with a tag use no other instances.
The cost of an update is proportional to the number of changed instances.
"""

from __future__ import annotations

import secrets
from bisect import bisect_left, insort
from hashlib import blake2b
from typing import TYPE_CHECKING, Final

from rpcwheel.instance import ServiceInstance, differences

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    Rank = tuple[bool, bool, bytes, str]

SPARE_SHARE: Final = 4
"""One in four places of a subset is for other zones, if it would have only the preferred zone."""


class InstanceSubset:
    """All instances of a channel, ranked. Not thread-safe."""

    def __init__(
        self,
        *,
        size: int | None,
        zone: str,
        protocol: str,
        tag_of: Callable[[ServiceInstance], str],
    ) -> None:
        """Make a subset without instances.

        Args:
            size: The size of the subset of each tag; None for no limit.
            zone: The preferred zone; "" for no preference.
            protocol: The protocol that instances must have; "" for any.
            tag_of: Returns the tag of an instance; "" for none.
        """
        self.by_id: dict[str, ServiceInstance] = {}
        """All instances, by id."""
        self.usable: dict[str, ServiceInstance] = {}
        """The instances of the protocol, by id."""
        self._size = size
        self._zone = zone
        self._protocol = protocol
        self._tag_of = tag_of
        self._seed = secrets.token_bytes(8)
        self._source: tuple[ServiceInstance, ...] = ()
        # Of the usable instances; empty without a size.
        self._rankings: dict[str, list[Rank]] = {}  # by tag
        self._ranks: dict[str, tuple[str, Rank]] = {}  # with the tag, by id

    def update(self, instances: Iterable[ServiceInstance]) -> None:
        """Set the instances. Of several with the same id the last one counts.

        Raises:
            TypeError: An element is not a `ServiceInstance`; nothing has changed.
        """
        new = tuple(instances)
        removed, added = differences(self._source, new)
        for instance in added:
            if not isinstance(instance, ServiceInstance):
                raise TypeError(
                    f"instances must be rpcwheel.registry.ServiceInstance, not {instance!r}"
                )
        gone, ids = {instance.id for instance in removed}, {instance.id for instance in added}
        if len(ids) != len(added) or any(id_ in self.by_id for id_ in ids - gone):
            # an id occurs twice
            new = tuple({instance.id: instance for instance in new}.values())
            removed, added = differences(self._source, new)
        self._source = new
        for instance in removed:
            self._remove(instance.id)
        for instance in added:
            self._add(instance)

    def chosen(self, *, beside: int = 0) -> list[ServiceInstance]:
        """Return the instances that get a subchannel; stale ones have taken `beside` places."""
        if self._size is None:
            return list(self.usable.values())
        size = max(1, self._size - beside)
        if len(self.usable) <= size:
            return list(self.usable.values())
        ranks = [rank for ranking in self._rankings.values() for rank in self._best(ranking, size)]
        return [self.usable[rank[-1]] for rank in ranks]

    def _best(self, ranking: list[Rank], size: int) -> list[Rank]:
        ranks = ranking[:size]
        if self._zone and len(ranking) > size and ranks[-1][:2] == (False, False):
            # only of the zone
            first = bisect_left(ranking, (False, True))
            last = bisect_left(ranking, (True,))
            spare = ranking[first : min(last, first + size // SPARE_SHARE)]
            ranks[size - len(spare) :] = spare
        return ranks

    def protocol_problem(self, name: str) -> str:
        """Return why no instance of the service `name` may be used; "" if they may be.

        If an instance requires TLS, a channel without TLS connects to none. Otherwise an attacker
        who can write to the registry could have requests sent in plain text.
        """
        total, usable = len(self.by_id), len(self.usable)
        if self._protocol == "grpc" and usable < total:
            which = "all" if not usable else f"{total - usable} of {total}"
            return (
                f"{which} instances of {name} require TLS, and this channel has no credentials; "
                "use rpcwheel.secure_channel(target, credentials)"
            )
        if self._protocol and total and not usable:
            return (
                f"no instance of {name} is published with TLS (protocol='grpcs'), and this channel "
                "has credentials; publish the servers with protocol='grpcs', or use "
                "rpcwheel.insecure_channel(target)"
            )
        return ""

    def hash_of(self, id_: str) -> bytes:
        """Return the hash that ranks an instance on this channel."""
        data = id_.encode(errors="surrogatepass")
        return blake2b(data, digest_size=8, key=self._seed).digest()

    def _remove(self, id_: str) -> None:
        self.by_id.pop(id_, None)
        instance = self.usable.pop(id_, None)
        if instance is not None and self._size is not None:
            tag, rank = self._ranks.pop(id_)
            ranking = self._rankings[tag]
            del ranking[bisect_left(ranking, rank)]
            if not ranking:
                del self._rankings[tag]

    def _add(self, instance: ServiceInstance) -> None:
        self.by_id[instance.id] = instance
        if self._protocol and instance.protocol != self._protocol:
            return
        self.usable[instance.id] = instance
        if self._size is None:
            return
        avoided = instance.status == "DRAINING" or not instance.weight
        other_zone = bool(self._zone) and instance.zone != self._zone
        rank = avoided, other_zone, self.hash_of(instance.id), instance.id
        tag = self._tag_of(instance)
        self._ranks[instance.id] = tag, rank
        insort(self._rankings.setdefault(tag, []), rank)
