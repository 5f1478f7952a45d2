"""A registry in this process: for tests, and for programs whose servers and clients are threads.

`memory://` is one, `memory://orders` is another. All backends of a name see the same records, each
with a lease of its own, which runs out by the clock of the backend's timer: with a `ManualTimer`
everything happens on the thread that acts or that moves the time, and watchers are told before it
returns. What is in it ends with the process; a forked child begins with nothing.
"""

from __future__ import annotations

import os
import threading
import weakref
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Final

from rpcwheel.durations import to_ns
from rpcwheel.errors import ConfigurationError, RegistryClosed, RegistryUnavailable, TimerError
from rpcwheel.registry.backend import RegistryBackend, View
from rpcwheel.timer import shared_timer
from rpcwheel.timer.clock import checked_timer, clock_of

from .watch_notifier import WatchNotifier

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from rpcwheel.instance import ServiceInstance
    from rpcwheel.registry.backend import Lost, Settings, Watch, Watcher
    from rpcwheel.registry.url import RegistryUrl
    from rpcwheel.timer._base import Timeout
    from rpcwheel.timer.api import Timer

__all__ = ["MemoryBackend"]


class _Lease:
    """What a backend's records live by. Its fields are the engine's, under its lock."""

    def __init__(self) -> None:
        self.keys: set[tuple[str, str, str]] = set()  # namespace, service, id
        self.ends_ns = 0
        self.over = False
        self.timeout: Timeout | None = None


@dataclass(frozen=True, slots=True)
class _Record:
    data: bytes
    epoch: str
    lease: _Lease


class _Engine:
    """The records of one name, and who watches them. Under `lock`, which nobody is called under."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.lock = threading.Lock()
        self.revision = 0
        self.records: dict[tuple[str, str], dict[str, _Record]] = {}
        self.notifiers: dict[tuple[str, str], list[WatchNotifier]] = {}

    def view(self, where: tuple[str, str]) -> View:
        found = self.records.get(where, {})
        return View({key: found[key].data for key in sorted(found)}, self.revision)

    @contextmanager
    def changing(self) -> Iterator[set[tuple[str, str]]]:
        """Hold the lock; what is put into the set has changed, and its watchers are told after."""
        changed: set[tuple[str, str]] = set()
        pending: list[WatchNotifier] = []
        with self.lock:
            yield changed
            self.revision += bool(changed)
            for where in sorted(changed):
                for notifier in self.notifiers.get(where, ()):
                    notifier.add(self.view(where))
                    pending.append(notifier)
        for notifier in pending:
            notifier.start()

    def put(self, key: tuple[str, str, str], record: _Record) -> None:
        there = self.records.setdefault(key[:2], {})
        if before := there.get(key[2]):
            before.lease.keys.discard(key)
        there[key[2]] = record
        record.lease.keys.add(key)

    def drop(self, key: tuple[str, str, str]) -> None:
        there = self.records.get(key[:2], {})
        if record := there.pop(key[2], None):  # None: a forked child has forgotten it
            record.lease.keys.discard(key)
        if not there:
            self.records.pop(key[:2], None)

    def end(self, lease: _Lease, changed: set[tuple[str, str]]) -> None:
        """Let go of all that lives by it."""
        lease.over = True
        for key in tuple(lease.keys):
            self.drop(key)
            changed.add(key[:2])


_engines: Final[weakref.WeakValueDictionary[str, _Engine]] = weakref.WeakValueDictionary()
"""By name, as long as there is a backend of it."""

_naming: threading.Lock = threading.Lock()


def _engine_of(name: str) -> _Engine:
    with _naming:
        return _engines.setdefault(name, _Engine())


def _after_fork_in_child() -> None:
    global _naming  # noqa: PLW0603 - another thread of the parent may hold it
    _naming = threading.Lock()
    for engine in tuple(_engines.values()):
        engine.reset()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)


class MemoryBackend(RegistryBackend):
    """The engine `memory://`; see above. Any thread, also at once."""

    schemes: ClassVar = ("memory",)

    def __init__(self, url: RegistryUrl, settings: Settings) -> None:
        super().__init__(url, settings)
        url.check_options()
        if len(url.hosts) > 1 or url.user or url.password or any(port for _, port in url.hosts):
            raise ConfigurationError(
                f"{url}: memory:// takes a name at most, such as memory://orders"
            )
        self._timer: Timer | None = checked_timer(settings.timer)
        self._now = clock_of(settings.timer)
        self._lease_ns = to_ns(settings.lease_s)
        name = url.hosts[0][0] if url.hosts else ""
        self._engine = _engine_of(name)
        self._lease = _Lease()
        self._watches: set[WatchNotifier] = set()
        self._closed = False

    def publish(self, instances: Sequence[ServiceInstance]) -> None:
        with self._engine.changing() as changed:
            self._check_open()
            if instances:
                self._begin_lease()
            for one in instances:
                record = _Record(one.encoded(), one.epoch, self._lease)
                self._engine.put(self._key(one), record)
                changed.add(self._where(one.service))

    def withdraw(self, instances: Sequence[ServiceInstance]) -> None:
        with self._engine.changing() as changed:
            self._check_open()
            for one in instances:
                found = self._found(one)
                if found is not None and found.epoch == one.epoch:
                    self._engine.drop(self._key(one))
                    changed.add(self._where(one.service))

    def renew(self, instances: Collection[ServiceInstance]) -> Mapping[tuple[str, str], Lost]:
        with self._engine.changing():
            self._check_open()
            if self._lease.over:
                return {one.key: "lease" for one in instances}
            if self._lease.timeout is not None:
                self._begin_lease()
            return {one.key: "missing" for one in instances if not self._is_there(one)}

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
        notifier = WatchNotifier(watcher, self._unwatched)
        with self._engine.lock:
            self._check_open()
            self._engine.notifiers.setdefault(where, []).append(notifier)
            self._watches.add(notifier)
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
            if self._lease.timeout is not None:
                self._lease.timeout.cancel()

    def _check_open(self) -> None:
        if self._closed:
            raise RegistryClosed(f"{self.url} was closed; open another")

    def _where(self, service: str) -> tuple[str, str]:
        return self.url.namespace, service

    def _key(self, one: ServiceInstance) -> tuple[str, str, str]:
        return self.url.namespace, one.service, one.id

    def _found(self, one: ServiceInstance) -> _Record | None:
        return self._engine.records.get(self._where(one.service), {}).get(one.id)

    def _is_there(self, one: ServiceInstance) -> bool:
        found = self._found(one)
        return found is not None and found.epoch == one.epoch and found.lease is self._lease

    def _unwatched(self, notifier: WatchNotifier) -> None:
        with self._engine.lock:
            self._watches.discard(notifier)
            for where, notifiers in tuple(self._engine.notifiers.items()):
                if notifier in notifiers:
                    notifiers.remove(notifier)
                    if not notifiers:
                        del self._engine.notifiers[where]

    # The lease. One timeout waits for its end, and is not moved when it is renewed: it looks again.

    def _begin_lease(self) -> None:
        """Begin or renew it; under the lock."""
        if self._lease.over:
            self._lease = _Lease()
        lease = self._lease
        before, lease.ends_ns = lease.ends_ns, self._now() + self._lease_ns
        if lease.timeout is None:
            try:
                self._wait(lease, self._lease_ns)
            except TimerError as error:
                lease.ends_ns = before
                raise RegistryUnavailable(
                    f"{self.url}: no timeout for the lease: {error}"
                ) from error

    def _wait(self, lease: _Lease, for_ns: int) -> None:
        if self._timer is None:
            self._timer = shared_timer()
        lease.timeout = self._timer.new_timeout(lambda _: self._look_at(lease), for_ns / 1e9)

    def _look_at(self, lease: _Lease) -> None:
        """End the lease if it was not renewed; on the timer's thread."""
        with self._engine.changing() as changed:
            left_ns = lease.ends_ns - self._now()
            if lease.over:
                return
            if left_ns <= 0:
                self._engine.end(lease, changed)
                return
            try:
                self._wait(lease, left_ns)
            except TimerError:  # stopped or full: nobody could end it later
                self._engine.end(lease, changed)
