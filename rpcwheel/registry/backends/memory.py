"""`memory://`: a registry in this process, for tests and for programs of servers and clients.

`memory://` is one registry, `memory://orders` is another. All backends with the same name see the
same records. Each has a lease, which ends by the clock of its timer. With a `ManualTimer`
everything happens on the thread that calls the backend or moves the time, and watchers are called
before it returns. The records end with the process; a forked child starts without any.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias

from rpcwheel._concurrency.executor import reset_after_fork
from rpcwheel._concurrency.shared import SharedObjects
from rpcwheel.durations import to_ns
from rpcwheel.errors import ConfigurationError, RegistryUnavailable
from rpcwheel.registry.backend import RegistryBackend, View
from rpcwheel.registry.one_shot_timer import OneShotTimer

from .watch_notifier import WatchNotifier

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from rpcwheel.instance import ServiceInstance
    from rpcwheel.registry.backend import Lost, Settings, Watch, Watcher
    from rpcwheel.registry.url import RegistryUrl

_Service: TypeAlias = tuple[str, str]
"""Namespace and name."""
_Key: TypeAlias = tuple[str, str, str]
"""Namespace, service and id of a record."""


class _Lease:
    """The lease of a backend's records. Its fields are guarded by the engine's lock."""

    def __init__(self) -> None:
        self.keys: set[_Key] = set()
        self.ends_ns = 0
        self.over = False


@dataclass(frozen=True, slots=True)
class _Record:
    data: bytes
    epoch: str
    lease: _Lease


class _Engine:
    """The records and watches of one name. Guarded by `lock`, under which no watcher is called."""

    def __init__(self) -> None:
        self.reset()
        reset_after_fork(self)

    def reset(self) -> None:
        self.lock = threading.Lock()
        self.revision = 0
        self.records: dict[_Service, dict[str, _Record]] = {}
        self.notifiers: dict[_Service, list[WatchNotifier]] = {}

    def view(self, service: _Service, changed: frozenset[str] | None = None) -> View:
        records = {key: record.data for key, record in self.records.get(service, {}).items()}
        return View(records, self.revision, changed)

    @contextmanager
    def changing(self) -> Iterator[set[_Key]]:
        """Hold the lock, then notify the watchers of the keys that were added to the set."""
        changed: set[_Key] = set()
        pending: list[WatchNotifier] = []
        with self.lock:
            yield changed
            self.revision += bool(changed)
            ids: dict[_Service, set[str]] = {}
            for key in changed:
                ids.setdefault(key[:2], set()).add(key[2])
            for service in sorted(ids.keys() & self.notifiers.keys()):
                view = self.view(service, frozenset(ids[service]))
                for notifier in self.notifiers[service]:
                    notifier.add(view)
                    pending.append(notifier)
        for notifier in pending:
            notifier.start()

    def put(self, key: _Key, record: _Record, changed: set[_Key]) -> None:
        records = self.records.setdefault(key[:2], {})
        before = records.get(key[2])
        if before is not None:
            before.lease.keys.discard(key)
        if before is None or before.data != record.data:
            changed.add(key)
        records[key[2]] = record
        record.lease.keys.add(key)

    def remove(self, key: _Key, changed: set[_Key]) -> None:
        records = self.records.get(key[:2], {})
        if record := records.pop(key[2], None):  # None: in a forked child
            record.lease.keys.discard(key)
            changed.add(key)
        if not records:
            self.records.pop(key[:2], None)

    def end(self, lease: _Lease, changed: set[_Key]) -> None:
        """Remove all records of a lease."""
        lease.over = True
        for key in tuple(lease.keys):
            self.remove(key, changed)


_ENGINES: Final[SharedObjects[_Engine]] = SharedObjects(also_in_child=True)
"""By name, while a backend of that name exists, even a closed one: none releases its engine."""


class MemoryBackend(RegistryBackend):
    """The backend `memory://`. Thread-safe."""

    def __init__(self, url: RegistryUrl, settings: Settings) -> None:
        super().__init__(url, settings)
        url.check_options()
        if len(url.hosts) > 1 or url.user or url.password or any(port for _, port in url.hosts):
            raise ConfigurationError(
                f"{url}: memory:// takes a name at most, such as memory://orders"
            )
        self._timer = OneShotTimer(settings.timer, self._end_lease_if_due)
        self._now_ns = self._timer.now_ns
        self._lease_ns = to_ns(settings.lease_s)
        name = url.hosts[0][0] if url.hosts else ""
        self._engine = _ENGINES.acquire(name, _Engine)
        self._lease = _Lease()
        self._watches: dict[WatchNotifier, _Service] = {}

    def publish(self, instances: Sequence[ServiceInstance]) -> None:
        with self._engine.changing() as changed:
            self._check_open()
            if instances:
                self._begin_lease()
            for instance in instances:
                record = _Record(instance.encoded(), instance.epoch, self._lease)
                self._engine.put(self._key(instance), record, changed)

    def withdraw(self, instances: Sequence[ServiceInstance]) -> None:
        with self._engine.changing() as changed:
            self._check_open()
            for instance in instances:
                record = self._find(instance)
                if record is not None and record.epoch == instance.epoch:
                    self._engine.remove(self._key(instance), changed)

    def renew(self, instances: Collection[ServiceInstance]) -> Mapping[tuple[str, str], Lost]:
        with self._engine.changing():
            self._check_open()
            if self._lease.over:
                return {instance.key: "lease" for instance in instances}
            if self._lease.ends_ns:
                self._begin_lease()
            return {
                instance.key: "missing" for instance in instances if not self._is_there(instance)
            }

    def lookup(self, service: str) -> View:
        with self._engine.lock:
            self._check_open()
            return self._engine.view(self._where(service))

    def services(self) -> Sequence[str]:
        with self._engine.lock:
            self._check_open()
            names = [name for inside, name in self._engine.records if inside == self.url.namespace]
        return sorted(names)

    def watch(self, service: str, watcher: Watcher) -> Watch:
        where = self._where(service)
        notifier = WatchNotifier(watcher, self._remove_watch)
        with self._engine.lock:
            self._check_open()
            self._engine.notifiers.setdefault(where, []).append(notifier)
            self._watches[notifier] = where
            notifier.add(self._engine.view(where))
        notifier.start()
        return notifier

    def close(self) -> None:
        with self._engine.lock:
            self._closed = True
            watches = tuple(self._watches)
        for notifier in watches:
            notifier.close()
        with self._engine.changing() as changed:
            self._engine.end(self._lease, changed)
            self._timer.clear()

    def _where(self, service: str) -> tuple[str, str]:
        return self.url.namespace, service

    def _key(self, instance: ServiceInstance) -> tuple[str, str, str]:
        return self.url.namespace, instance.service, instance.id

    def _find(self, instance: ServiceInstance) -> _Record | None:
        return self._engine.records.get(self._where(instance.service), {}).get(instance.id)

    def _is_there(self, instance: ServiceInstance) -> bool:
        record = self._find(instance)
        return record is not None and record.epoch == instance.epoch and record.lease is self._lease

    def _remove_watch(self, notifier: WatchNotifier) -> None:
        with self._engine.lock:
            where = self._watches.pop(notifier)
            notifiers = self._engine.notifiers.get(where, [])
            if notifier in notifiers:  # not in a forked child
                notifiers.remove(notifier)
            if not notifiers:
                self._engine.notifiers.pop(where, None)

    # The lease. A renewal does not move the timeout; when it fires early, another one is created.

    def _begin_lease(self) -> None:
        """Begin or renew the lease, under the lock."""
        if self._lease.over:
            self._lease = _Lease()
        ends_ns = self._now_ns() + self._lease_ns
        self._timer.wake(ends_ns)
        if self._timer.is_stopped:
            raise RegistryUnavailable(
                f"{self.url}: no timeout for the lease: the timer was stopped"
            )
        self._lease.ends_ns = ends_ns

    def _end_lease_if_due(self) -> None:
        """End the lease if it was not renewed. On the timer's thread."""
        with self._engine.changing() as changed:
            lease = self._lease
            if lease.ends_ns <= self._now_ns():
                self._engine.end(lease, changed)
            elif not lease.over:
                self._timer.wake(lease.ends_ns)
