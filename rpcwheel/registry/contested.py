"""Two processes that publish under one id: what tells it, and how long each then waits.

Each finds its record replaced by the other's, and puts its own there again. That would go on with
each renewal, for ever. So each waits longer from time to time, up to two leases: no longer, as the
other one may end, and then nobody is there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from rpcwheel.errors import InstanceContested, RegistryError
from rpcwheel.instance import ServiceInstance

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from .entry import Entry
    from .provider import Lost, Provider
    from .rules import RegistryRules

    Key = tuple[str, str]

__all__ = ["Contest", "contested", "told_apart"]

MOST: Final = 2
"""Leases."""


class Contest:
    """How often one instance was taken from us. Pure."""

    __slots__ = ("_calm_ns", "_times")

    def __init__(self) -> None:
        self._times = 0
        self._calm_ns = 0

    def delay_ns(self, now_ns: int, rules: RegistryRules) -> int:
        """How long to wait before it is published again, now that it was taken once more.

        Not at all for the first time: a process that ends may have published late.
        """
        self._times = self._times + 1 if now_ns < self._calm_ns else 1
        most_ns = MOST * rules.lease_ns
        grown_ns = rules.renew_ns << min(self._times - 1, 32)
        delay_ns = 0 if self._times == 1 else min(grown_ns, most_ns)
        self._calm_ns = now_ns + delay_ns + MOST * most_ns  # the other one waits as long
        return delay_ns


def contested(instance: ServiceInstance) -> InstanceContested:
    """What is told of it."""
    service, name = instance.key
    return InstanceContested(
        f"{service}/{name}: another process publishes under this id, each in the place of the "
        "other; give each its own, by its host and port, or by id="
    )


def told_apart(
    provider: Provider, entries: Iterable[Entry], lost: Mapping[Key, Lost]
) -> Mapping[Key, Lost]:
    """What is lost, where what is missing as another process has replaced it is `taken`.

    Asks the engine once for each service of which something is missing; it may block.
    """
    missing = [entry for entry in entries if lost.get(entry.instance.key) == "missing"]
    taken: dict[Key, Lost] = {}
    for service in {entry.instance.service for entry in missing}:
        try:
            records = provider.lookup(service).records
        except RegistryError:
            continue  # it is not known, then
        for entry in missing:
            found = _decoded(records.get(entry.instance.id))
            ours = found is None or entry.may_be(found)
            if entry.instance.service == service and not ours:
                taken[entry.instance.key] = "taken"
    return {**lost, **taken}


def _decoded(data: bytes | None) -> ServiceInstance | None:
    """None: nothing is there, or nothing that can be read."""
    try:
        return None if data is None else ServiceInstance.decoded(data)
    except ValueError:
        return None
