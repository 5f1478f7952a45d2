"""Output of `rpcwheel registry`: the table of instances, JSON, and the lines of `watch`."""

from __future__ import annotations

import json
import time
from collections import Counter
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

from rpcwheel.events.events import plural

from .findings import printable
from .table import print_table

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import TextIO

    from rpcwheel.instance import ServiceInstance, Snapshot
    from rpcwheel.registry.backend import Consumer

Services: TypeAlias = "Mapping[str, Sequence[ServiceInstance]]"
"""Instances by service."""

COLUMNS: Final = (
    "service", "id", "address", "weight", "version", "group", "zone", "status", "up since",
    "metadata",
)  # fmt: skip

CONSUMER_COLUMNS: Final = (
    "consumer of", "application", "host", "version", "group", "release", "up since",
)  # fmt: skip

OPTIONAL_COLUMNS: Final = {"version", "group", "zone", "metadata", "release"}
"""Columns that are left out if they are empty for all rows."""

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


def show(
    registry: str,
    services: Services,
    consumers: Sequence[Consumer],
    stream: TextIO,
    *,
    plain: bool,
) -> None:
    """Print the table of instances, that of consumers if there are any, and a summary line."""
    rows = [_row(instance) for instances in services.values() for instance in instances]
    _print_rows(COLUMNS, rows, stream, plain=plain)
    _print_rows(CONSUMER_COLUMNS, list(map(_consumer_row, consumers)), stream, plain=plain)
    print(_summary(registry, services, consumers), file=stream, flush=True)


def _print_rows(
    columns: Sequence[str], rows: Sequence[Mapping[str, str]], stream: TextIO, *, plain: bool
) -> None:
    if rows:
        shown = [
            name for name in columns if name not in OPTIONAL_COLUMNS or any(r[name] for r in rows)
        ]
        print_table(shown, [[row[name] for name in shown] for row in rows], stream, plain=plain)
        print(file=stream)


def _row(instance: ServiceInstance) -> dict[str, str]:
    address = instance.address
    if instance.protocol != "grpc":
        address = f"{instance.protocol}://{address}"
    cells = [instance.service, instance.id, address, str(instance.weight), instance.version]
    cells += [instance.group, instance.zone, instance.status, local_time(instance.started_at)]
    cells.append(_pairs(instance.metadata))
    return dict(zip(COLUMNS, cells, strict=True))


def _consumer_row(consumer: Consumer) -> dict[str, str]:
    cells = [consumer.service, consumer.application, consumer.host, consumer.version]
    cells += [consumer.group, consumer.release, local_time(consumer.started_at)]
    return dict(zip(CONSUMER_COLUMNS, cells, strict=True))


def as_document(registry: str, services: Services, consumers: Sequence[Consumer]) -> str:
    """Return one JSON object with the registry, the instances of each service, and consumers."""
    documents = {name: list(map(_as_json, instances)) for name, instances in services.items()}
    document = {"registry": registry, "services": documents}
    return json.dumps(document | {"consumers": list(map(asdict, consumers))}, indent=2)


def local_time(seconds: float) -> str:
    """Return date and time; "" for 0 (unknown), "?" for a number that is not a valid time."""
    if not seconds:
        return ""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
    except (OverflowError, ValueError, OSError):
        return "?"


def _summary(registry: str, services: Services, consumers: Sequence[Consumer]) -> str:
    count = sum(map(len, services.values()))
    of_consumers = f" and {plural(len(consumers), 'consumer')}" if consumers else ""
    if not services:
        return f"no service{of_consumers} at {registry}"
    if not count:
        return f"no instance of {', '.join(services)}{of_consumers} at {registry}"
    return (
        f"{plural(count, 'instance')} of {plural(len(services), 'service')}{of_consumers} "
        f"at {registry}"
    )


# Changes, for `watch`


class InstanceChange(NamedTuple):
    """A change of one instance."""

    event: str
    """"present": in the first snapshot. "added". "changed". "stale": the registry does not list it
    any more, but may have lost data. "live": listed again after it was stale. "removed"."""
    instance: ServiceInstance
    """Its present values, or the last known ones."""
    note: str = ""
    """What is different."""

    def line(self) -> str:
        """Return the change as a line of text."""
        instance = self.instance
        where = instance.id
        if instance.id != instance.address:
            where += f" ({instance.address})"
        words = self.note or (_details(instance) if self.event in {"present", "added"} else "")
        line = f"{MARKS[self.event]} {instance.service} {where} {self.event}"
        return printable(f"{line}: {words}" if words else line)


def changes_between(before: Snapshot | None, after: Snapshot) -> list[InstanceChange]:
    """Return the changes between two snapshots; `before` is None for the first."""
    old_instances = () if before is None else before.instances
    was_stale = frozenset() if before is None else before.stale
    changes, removed = [], {instance.id: instance for instance in old_instances}
    for instance in after.instances:
        old = removed.pop(instance.id, None)
        if old is None:
            changes.append(InstanceChange("present" if before is None else "added", instance))
        elif note := _difference(old, instance):
            changes.append(InstanceChange("changed", instance, note))
        if instance.id in after.stale - was_stale:
            changes.append(
                InstanceChange("stale", instance, "not listed by the registry, kept for now")
            )
        elif old is not None and instance.id in was_stale - after.stale:
            changes.append(InstanceChange("live", instance))
    return changes + [InstanceChange("removed", instance) for instance in removed.values()]


def change_as_json(change: InstanceChange) -> dict[str, Any]:
    """Return the change as a JSON object."""
    instance = change.instance
    document = {"event": change.event, "service": instance.service, "id": instance.id}
    note = {"note": change.note} if change.note else {}
    return document | note | {"instance": _as_json(instance)}


class ConsumerChange(NamedTuple):
    """A consumer that is present at the start, added or removed."""

    event: str
    consumer: Consumer

    def line(self) -> str:
        """Return the change as a line of text."""
        consumer = self.consumer
        words = [f"{name} {value}" for name in ("version", "group", "release")
                 if (value := getattr(consumer, name))]  # fmt: skip
        line = (
            f"{MARKS[self.event]} {consumer.service} consumer {consumer.application} at "
            f"{consumer.host} {self.event}"
        )
        return printable(": ".join(filter(None, (line, ", ".join(words)))))

    def as_json(self) -> dict[str, Any]:
        """Return the change as a JSON object."""
        return {
            "event": self.event,
            "service": self.consumer.service,
            "consumer": asdict(self.consumer),
        }


def changes_of_consumers(
    before: Sequence[Consumer] | None, after: Sequence[Consumer]
) -> list[ConsumerChange]:
    """Return the changes between two lists; `before` is None for the first."""
    old, new = Counter(before or ()), Counter(after)
    event = "present" if before is None else "added"
    return [
        *(ConsumerChange(event, consumer) for consumer in (new - old).elements()),
        *(ConsumerChange("removed", consumer) for consumer in (old - new).elements()),
    ]


def _difference(old: ServiceInstance, new: ServiceInstance) -> str:
    """Describe what differs, in words; "" if nothing does that concerns clients."""
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


def _details(instance: ServiceInstance) -> str:
    """Return status, weight, and all values that are not the default."""
    words = [instance.status, f"weight {instance.weight}"]
    words += [f"{name} {value}" for name in ("version", "group", "zone")
              if (value := getattr(instance, name))]  # fmt: skip
    if instance.protocol != "grpc":
        words.append(instance.protocol)
    if instance.metadata:
        words.append(_pairs(instance.metadata))
    return ", ".join(words)


def _as_json(instance: ServiceInstance) -> dict[str, Any]:
    """Return all values of an instance by name, and `address`."""
    values: dict[str, Any] = instance.model_dump(mode="json")
    return {**values, "address": instance.address}
