"""Output of `rpcwheel registry`: the table of instances, JSON, and the lines of `watch`."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

from .findings import printable
from .table import print_table

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import TextIO

    from rpcwheel.instance import ServiceInstance, Snapshot

Found: TypeAlias = "Mapping[str, Sequence[ServiceInstance]]"
"""Instances by service."""

COLUMNS: Final = (
    "service", "id", "address", "weight", "version", "group", "zone", "status", "up since",
    "metadata",
)  # fmt: skip

OPTIONAL_COLUMNS: Final = {"version", "group", "zone", "metadata"}
"""Columns that are left out if they are empty for all instances."""

COMPARED_FIELDS: Final = (
    "host", "port", "status", "weight", "version", "group", "zone", "protocol", "metadata",
)  # fmt: skip

MARKS: Final = {
    "present": "=",
    "added": "+",
    "changed": "~",
    "stale": "?",
    "live": "=",
    "removed": "-",
}


# The table


def show(registry: str, found: Found, stream: TextIO, *, plain: bool) -> None:
    """Print the table and a summary line."""
    rows = [_row(one) for instances in found.values() for one in instances]
    if rows:
        shown = [
            name for name in COLUMNS if name not in OPTIONAL_COLUMNS or any(r[name] for r in rows)
        ]
        print_table(shown, [[row[name] for name in shown] for row in rows], stream, plain=plain)
        print(file=stream)
    print(_summary(registry, found), file=stream, flush=True)


def _row(one: ServiceInstance) -> dict[str, str]:
    address = one.address if one.protocol == "grpc" else f"{one.protocol}://{one.address}"
    cells = [one.service, one.id, address, str(one.weight), one.version, one.group, one.zone]
    cells += [one.status, _local_time(one.started_at), _pairs(one.metadata)]
    return dict(zip(COLUMNS, cells, strict=True))


def as_document(registry: str, found: Found) -> str:
    """Return one JSON object with the registry and the instances of each service."""
    services = {name: [_as_json(one) for one in instances] for name, instances in found.items()}
    return json.dumps({"registry": registry, "services": services}, indent=2)


def _local_time(seconds: float) -> str:
    """Return date and time; "" for 0 (unknown), "?" for a number that is not a valid time."""
    if not seconds:
        return ""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
    except (OverflowError, ValueError, OSError):
        return "?"


def _summary(registry: str, found: Found) -> str:
    count = sum(map(len, found.values()))
    if not found:
        return f"no service at {registry}"
    if not count:
        return f"no instance of {', '.join(found)} at {registry}"
    return (
        f"{count} instance{'s' if count > 1 else ''} of {len(found)} "
        f"service{'s' if len(found) > 1 else ''} at {registry}"
    )


# Changes, for `watch`


class Change(NamedTuple):
    """A change of one instance."""

    event: str
    """"present": in the first snapshot. "added". "changed". "stale": the registry does not list it
    any more, but may have lost data. "live": listed again after it was stale. "removed"."""
    instance: ServiceInstance
    """Its present values, or the last known ones."""
    note: str = ""
    """What is different."""

    def line(self) -> str:
        """One line of text."""
        one = self.instance
        where = one.id if one.id == one.address else f"{one.id} ({one.address})"
        words = self.note or (_details(one) if self.event in {"present", "added"} else "")
        line = f"{MARKS[self.event]} {one.service} {where} {self.event}"
        return printable(f"{line}: {words}" if words else line)


def changes_between(before: Snapshot | None, after: Snapshot) -> list[Change]:
    """The changes from one snapshot to the next; None: there is no earlier one."""
    old_instances = {} if before is None else {one.id: one for one in before.instances}
    was_stale = frozenset() if before is None else before.stale
    found, removed = [], dict(old_instances)
    for one in after.instances:
        old = removed.pop(one.id, None)
        if old is None:
            found.append(Change("present" if before is None else "added", one))
        elif note := _difference(old, one):
            found.append(Change("changed", one, note))
        if one.id in after.stale - was_stale:
            found.append(Change("stale", one, "not listed by the registry, kept for now"))
        elif old is not None and one.id in was_stale - after.stale:
            found.append(Change("live", one))
    return found + [Change("removed", one) for one in removed.values()]


def change_as_json(change: Change) -> dict[str, Any]:
    """The change as a JSON object."""
    one = change.instance
    found = {"event": change.event, "service": one.service, "id": one.id}
    return found | ({"note": change.note} if change.note else {}) | {"instance": _as_json(one)}


def _difference(old: ServiceInstance, new: ServiceInstance) -> str:
    """What differs, in words; "" if nothing does that concerns clients."""
    words = [
        f"{name} {_value(getattr(old, name))} -> {_value(getattr(new, name))}"
        for name in COMPARED_FIELDS
        if getattr(old, name) != getattr(new, name)
    ]
    if old.epoch != new.epoch:
        words.append("restarted")
    return ", ".join(words)


def _value(value: object) -> str:
    if isinstance(value, dict):
        return _pairs(value) or "none"
    return str(value) or "none"


def _pairs(metadata: dict[str, str]) -> str:
    """Metadata as on the command line."""
    return " ".join(f"{key}={value}" for key, value in sorted(metadata.items()))


def _details(one: ServiceInstance) -> str:
    """Status, weight, and all values that are not the default."""
    words = [one.status, f"weight {one.weight}"]
    words += [f"{name} {value}" for name in ("version", "group", "zone")
              if (value := getattr(one, name))]  # fmt: skip
    if one.protocol != "grpc":
        words.append(one.protocol)
    if one.metadata:
        words.append(_pairs(one.metadata))
    return ", ".join(words)


def _as_json(one: ServiceInstance) -> dict[str, Any]:
    """All values of an instance by name, and `address`."""
    values: dict[str, Any] = one.model_dump(mode="json")
    return {**values, "address": one.address}
