"""What has changed between two looks at a service: in words, and for machines. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from .diagnosis import printable

if TYPE_CHECKING:
    from rpcwheel.instance import ServiceInstance, Snapshot

__all__ = ["Change", "as_facts", "changes", "facts_of"]

COMPARED: Final = (
    "host", "port", "status", "weight", "version", "group", "zone", "protocol", "metadata",
)  # fmt: skip

MARKS: Final = {"there": "=", "came": "+", "changed": "~", "stale": "?", "back": "=", "gone": "-"}


class Change(NamedTuple):
    """What became of one instance."""

    event: str
    """"there": when the look began; "came"; "changed"; "stale": the registry has lost it, and it is
    kept for now; "back": not stale any more, as it is there again; "gone"."""
    instance: ServiceInstance
    """As it is now, or was last."""
    note: str = ""
    """What is different."""

    def line(self) -> str:
        """For people."""
        one = self.instance
        where = one.id if one.id == one.address else f"{one.id} ({one.address})"
        words = self.note or (summary(one) if self.event in {"there", "came"} else "")
        said = f"{MARKS[self.event]} {one.service} {where} {self.event}"
        return printable(f"{said}: {words}" if words else said)


def changes(before: Snapshot | None, after: Snapshot) -> list[Change]:
    """What is new in `after`; those that come first, those that go last."""
    olds = {} if before is None else {one.id: one for one in before.instances}
    held = frozenset() if before is None else before.stale
    found, gone = [], dict(olds)
    for one in after.instances:
        old = gone.pop(one.id, None)
        if old is None:
            found.append(Change("there" if before is None else "came", one))
        elif note := difference(old, one):
            found.append(Change("changed", one, note))
        if one.id in after.stale - held:
            found.append(Change("stale", one, "the registry has lost it; kept for now"))
        elif old is not None and one.id in held - after.stale:
            found.append(Change("back", one))
    return found + [Change("gone", one) for one in gone.values()]


def difference(old: ServiceInstance, new: ServiceInstance) -> str:
    """In words; "" if there is none that matters to clients."""
    words = [
        f"{name} {_shown(getattr(old, name))} -> {_shown(getattr(new, name))}"
        for name in COMPARED
        if getattr(old, name) != getattr(new, name)
    ]
    if old.epoch != new.epoch:
        words.append("restarted")
    return ", ".join(words)


def _shown(value: object) -> str:
    if isinstance(value, dict):
        return pairs(value) or "none"
    return str(value) or "none"


def pairs(metadata: dict[str, str]) -> str:
    """Metadata as it is given on the command line."""
    return " ".join(f"{key}={value}" for key, value in sorted(metadata.items()))


def summary(one: ServiceInstance) -> str:
    """What is not as if nothing had been said of it, and the weight."""
    words = [one.status, f"weight {one.weight}"]
    words += [f"{name} {value}" for name in ("version", "group", "zone")
              if (value := getattr(one, name))]  # fmt: skip
    if one.protocol != "grpc":
        words.append(one.protocol)
    if one.metadata:
        words.append(pairs(one.metadata))
    return ", ".join(words)


def facts_of(one: ServiceInstance) -> dict[str, Any]:
    """An instance for machines: all its values by name, and `address`."""
    told: dict[str, Any] = one.model_dump(mode="json")
    return {**told, "address": one.address}


def as_facts(change: Change) -> dict[str, Any]:
    """For machines."""
    one = change.instance
    told = {"event": change.event, "service": one.service, "id": one.id}
    return told | ({"note": change.note} if change.note else {}) | {"instance": facts_of(one)}
