"""Random requests to backends of one engine, compared with a reference in memory.

The sequence of requests is the same in each run. Before each comparison `harness.rule` is set to
the rule of `RegistryBackend` that the comparison is about, so a failed check names it.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Final

from .registry_harness import RecordingWatcher, require, shown

if TYPE_CHECKING:
    from rpcwheel.instance import ServiceInstance
    from rpcwheel.registry.backend import RegistryBackend, View, Watch

    from .registry_harness import ConformanceHarness

    Key = tuple[str, str]

STEPS: Final = 120
BACKENDS: Final = 3
LOST_REASONS: Final = frozenset({"missing", "taken", "lease", "session", "wiped"})


class RandomRequests:
    """Backends, the records that the engine must have, and the watches that must show them."""

    def __init__(self, harness: ConformanceHarness) -> None:
        self._harness = harness
        self._random = random.Random(1)
        self._backends = [harness.new_backend() for _ in range(BACKENDS)]
        self._epochs = 0
        self._epoch_of = {backend: self._new_epoch() for backend in self._backends}
        # Names and ids of which one is the beginning of another.
        self._services = [harness.service + end for end in ("", "-v2", ".v2", "2", "_")]
        first, second = harness.instance(1).id, harness.instance(2).id
        self._keys = [
            (name, id_) for name in self._services for id_ in (first, second, f"{first}0")
        ]
        self._records: dict[Key, tuple[ServiceInstance, RegistryBackend]] = {}
        self._watches: list[tuple[RegistryBackend, str, Watch, RecordingWatcher]] = []
        self._views: dict[str, tuple[View, dict[str, bytes]]] = {}

    def run(self) -> None:
        """Send the requests, and compare after each of them."""
        self._harness.rule = "an_unknown_service_has_no_instances"
        self._compare()
        steps = [self._publish] * 4 + [self._withdraw] * 2 + [self._renew] * 2
        steps += [self._withdraw_late, self._send_nothing, self._watch, self._close_one]
        for _ in range(STEPS):
            self._harness.renew_due()
            self._random.choice(steps)()
            self._compare()
        for _, _, watch, _ in self._watches:
            watch.close()

    # Steps: each sets the rule of the comparison that follows

    def _publish(self) -> None:
        """Publish new instances, or replace some of any backend."""
        backend = self._random.choice(self._backends)
        is_new = self._random.choice([True, False])
        keys = [key for key in self._keys if (key not in self._records) is is_new] or self._keys
        chosen = self._random.sample(keys, min(len(keys), self._random.randint(1, 4)))
        replaced = any(key in self._records for key in chosen)
        self._harness.rule = (
            "publishing_again_replaces_an_instance" if replaced else "published_instances_are_found"
        )
        instances = [self._instance(key, backend) for key in chosen]
        self._harness.publish(backend, *instances)
        self._records |= {instance.key: (instance, backend) for instance in instances}

    def _withdraw(self) -> None:
        """Withdraw instances of any backend, and an id or an epoch that does not exist."""
        self._harness.rule = "withdrawn_instances_are_removed"
        backend = self._random.choice(self._backends)
        instances = [self._records.pop(key)[0] for key in self._some_records()]
        missing = [key for key in self._keys if key not in self._records]
        unknown = self._instance(self._random.choice(missing), backend) if missing else None
        self._harness.withdraw(backend, *instances, *([unknown] if unknown else ()))

    def _withdraw_late(self) -> None:
        """Withdraw an instance of an earlier process whose successor has published its id."""
        self._harness.rule = "a_late_withdrawal_keeps_the_successor"
        keys = self._some_records()
        backend = self._random.choice(self._backends)
        backend.withdraw([self._records[key][0].replace(epoch="before") for key in keys])

    def _renew(self) -> None:
        """Renew some instances, of which a backend has published a part."""
        self._harness.rule = "renew_reports_missing_and_replaced_instances"
        backend = self._random.choice(self._backends)
        owned = {key for key, (_, owner) in self._records.items() if owner is backend}
        keys = dict.fromkeys([*self._random.sample(self._keys, 4), *sorted(owned)[:3]])
        asked = [self._instance(key, backend) for key in keys]
        missing = [instance for instance in asked if instance.key not in owned]
        lost = backend.renew(asked)
        require(
            set(lost) == {instance.key for instance in missing},
            "renew must report each instance that is not published, or is replaced by another "
            f"backend: {shown(missing)}; but returned {dict(lost)}",
        )
        require(
            set(lost.values()) <= LOST_REASONS,
            f"renew must give a reason of {sorted(LOST_REASONS)}, not {set(lost.values())}",
        )

    def _send_nothing(self) -> None:
        self._harness.rule = "empty_requests_are_accepted"
        backend = self._random.choice(self._backends)
        backend.publish([])
        backend.withdraw([])
        require(not backend.renew([]), "renew of no instances must return no losses")

    def _watch(self) -> None:
        """Begin a watch; the oldest of four ends."""
        self._harness.rule = "a_watch_begins_with_the_present_view"
        backend = self._random.choice(self._backends)
        service = self._random.choice(self._services)
        watcher = RecordingWatcher()
        watch = backend.watch(service, watcher)
        watcher.wait_for(self._harness, *self._instances_of(service))
        self._watches.append((backend, service, watch, watcher))
        if len(self._watches) > BACKENDS:
            self._watches.pop(0)[2].close()

    def _close_one(self) -> None:
        """Close a backend and open another in its place."""
        self._harness.rule = "close_gives_up_the_lease"
        closed = self._random.choice(self._backends)
        self._watches = [watch for watch in self._watches if watch[0] is not closed]
        self._harness.close(closed)
        opened = self._harness.new_backend()
        self._backends[self._backends.index(closed)] = opened
        self._epoch_of[opened] = self._new_epoch()
        for key in [key for key, (_, owner) in self._records.items() if owner is closed]:
            del self._records[key]

    # What a step needs

    def _new_epoch(self) -> str:
        self._epochs += 1
        return f"epoch-{self._epochs}"

    def _some_records(self) -> list[Key]:
        keys = list(self._records)
        return self._random.sample(keys, min(len(keys), self._random.randint(1, 2)))

    def _instance(self, key: Key, backend: RegistryBackend) -> ServiceInstance:
        """Return an instance of a backend with random values."""
        choose = self._random.choice
        values = {
            "weight": self._random.randint(1, 999),
            "zone": choose(["", "west"]),
            "metadata": choose([{}, {"a": "1"}]),
            "status": choose(["UP", "DRAINING"]),
            "started_at": choose([0.0, 1.5]),
            "protocol": choose(["grpc", "grpcs"]),
            "group": choose(["", "g"]),
            "version": choose(["", "2"]),
        }
        service, id_ = key
        return self._harness.instance(1, service, id=id_, epoch=self._epoch_of[backend], **values)

    def _instances_of(self, service: str) -> list[ServiceInstance]:
        return [instance for instance, _ in self._records.values() if instance.service == service]

    # Comparisons

    def _compare(self) -> None:
        harness, step_rule = self._harness, self._harness.rule
        reader = self._random.choice(self._backends)
        for service in self._services:
            services = [each.service for each in harness.lookup(reader, service)]
            harness.rule = "names_do_not_match_by_prefix"
            require(set(services) <= {service}, f"lookup of {service} must not find {services}")
            harness.rule = step_rule
            harness.expect_found(reader, *self._instances_of(service), service=service)
        harness.rule = "services_have_instances"
        wanted = sorted({service for service, _ in self._records})
        harness.wait_until(
            lambda: self._listed(reader) == wanted,
            lambda: f"services() must return {wanted} in order, not {self._listed(reader)}",
        )
        harness.rule = "a_watch_reports_each_change"
        for _, service, _, watcher in self._watches:
            watcher.wait_for(harness, *self._instances_of(service))
        harness.rule = "a_view_does_not_change"
        for view, before in self._views.values():
            require(
                dict(view.records) == before,
                "a View that lookup returned was changed by a later request",
            )
        service = self._random.choice(self._services)
        view = reader.lookup(service)
        self._views[service] = view, dict(view.records)

    def _listed(self, backend: RegistryBackend) -> list[str]:
        """Return the services of this check."""
        return [name for name in backend.services() if name.startswith(self._harness.service)]
