"""When a channel whose members are one list of gRPC's own gets another list. Pure.

`balance="core"`: one channel to `ipv4:10.0.0.1:50051,10.0.0.2:50051`, over which gRPC's own
round robin spreads the calls. gRPC can't be told of a change, so a channel of the new list takes
the place of the old one, which reconnects every member. So changes are gathered: for 0.1 s if
somebody is to be added or wants no new calls, for 0.5 s if somebody is only missed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, TypeAlias

from rpcwheel.durations import NEVER
from rpcwheel.errors import ConfigurationError
from rpcwheel.instance import joined
from rpcwheel.observe.events import RecordSkipped

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from rpcwheel.instance import ServiceInstance

__all__ = [
    "PLAIN",
    "LeftOut",
    "Listing",
    "Places",
    "one_protocol",
    "protocol_of",
    "spread",
    "wanted_of",
]

SOON_NS: Final = 100_000_000
LATER_NS: Final = 500_000_000

SPREAD: Final = ("grpc.lb_policy_name", "round_robin")
"""As an option, it leaves the user's service config alone."""

PLAIN: Final = "it is over TLS, and others in the list are not: give credentials"

Places: TypeAlias = frozenset[tuple[str, int]]


def wanted_of(instances: Sequence[ServiceInstance]) -> tuple[Places, Places]:
    """Whom calls go to, and who is left out for a reason: those that drain, unless all do."""
    willing = frozenset(one for one in instances if one.status != "DRAINING" and one.weight)
    chosen = willing or frozenset(one for one in instances if one.status != "DRAINING")
    chosen = chosen or frozenset(instances)
    everybody = {(one.host, one.port) for one in instances}
    places = frozenset((one.host, one.port) for one in chosen)
    return places, frozenset(everybody - places)


def one_protocol(
    instances: Sequence[ServiceInstance], *, credentials: bool
) -> tuple[list[ServiceInstance], Places]:
    """Those that one list can hold, and where those are that it can't.

    With credentials of the user's it is for all. Without, it is over TLS if all instances are, and
    without if any is not.
    """
    plain = [one for one in instances if one.protocol == "grpc"]
    if credentials or not plain:
        return list(instances), frozenset()
    others = frozenset((one.host, one.port) for one in instances if one.protocol != "grpc")
    return plain, others


def protocol_of(usable: Sequence[ServiceInstance], *, credentials: bool) -> str | None:
    """The protocol of such a list; None: it is no matter, or there is nobody to say so."""
    return None if credentials or not usable else usable[0].protocol


def spread(options: Sequence[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """Options of a channel with which gRPC calls all of a list, and not the first only."""
    given = any(name == SPREAD[0] for name, _ in options)
    return list(options) if given else [*options, SPREAD]


class LeftOut:
    """Who can't be in the list: each is told of once, as long as that is so."""

    def __init__(self, registry: str, service: str) -> None:
        self._registry = registry
        self._service = service
        self._known: dict[str, Places] = {}

    def news(self, places: Collection[tuple[str, int]], why: str) -> list[RecordSkipped]:
        """What is to be told, now that these are left out for this reason."""
        known, now = self._known.get(why, frozenset()), frozenset(places)
        self._known[why] = now
        return [
            RecordSkipped(self._registry, self._service, joined(*place), ConfigurationError(why))
            for place in sorted(now - known)
        ]


class Listing:
    """Which list there is, and which is wanted. Not thread-safe."""

    def __init__(self) -> None:
        self.shown: Places | None = None
        """The list that is in use; None: none yet."""
        self.protocol = "grpc"
        """Of those in the list that is in use."""
        self._wanted: Places = frozenset()
        self._spoken = self.protocol  # by those that are wanted
        self._due_ns = NEVER

    @property
    def next_wake_ns(self) -> int:
        """When `step` has something to say; `NEVER` if nothing is to change."""
        return self._due_ns

    def saw(
        self,
        wanted: Places,
        excused: Collection[tuple[str, int]],
        now_ns: int,
        protocol: str | None = None,
    ) -> None:
        """Take note of whom calls are to go to.

        Args:
            wanted: Those.
            excused: Who is there, and is not to be called for a reason of its own.
            now_ns: The time.
            protocol: That of all of them; None: as before.
        """
        self._wanted, self._spoken = wanted, protocol or self._spoken
        if self.shown is None:
            self._due_ns = now_ns
        elif wanted == self.shown and self._spoken == self.protocol:
            self._due_ns = NEVER
        else:
            missed = self.shown - wanted
            changed = wanted - self.shown or self._spoken != self.protocol
            lazy = not changed and not missed & frozenset(excused)
            self._due_ns = min(self._due_ns, now_ns + (LATER_NS if lazy else SOON_NS))

    def step(self, now_ns: int) -> Places | None:
        """The list that is to be in use from now on; None: the one that is."""
        if now_ns < self._due_ns:
            return None
        self._due_ns = NEVER
        self.shown, self.protocol = self._wanted, self._spoken
        return self.shown
