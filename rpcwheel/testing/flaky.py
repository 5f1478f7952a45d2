"""A backend that fails on command.

    backend = FlakyBackend(open_backend("memory://", Settings(lease_s=6.0, timeout_s=1.0)))
    registry = Registry(backend)
    backend.down()         # then test your program

All calls run on the calling thread. Only requests to a frozen backend wait in real time.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final, Literal, TypeVar

from rpcwheel.errors import RegistryRefused, RegistryUnavailable
from rpcwheel.instance import ServiceInstance
from rpcwheel.registry.backend import RegistryBackend, View
from rpcwheel.registry.backends.watch_notifier import WatchNotifier

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from rpcwheel.registry.backend import Consumer, Lost, Watch, Watcher

R = TypeVar("R")
State = Literal["up", "down", "refusing", "frozen", "losing answers"]
CUT: Final = frozenset({"down", "frozen"})
"""States in which watchers get no views."""


class FlakyBackend(RegistryBackend):
    """A wrapper around another backend that fails on command. For tests. Thread-safe.

    While it is down or frozen, the leases of the inner backend run and end, as if the connection
    was cut.
    """

    requests: list[tuple[str, tuple[str, ...]]]
    """All requests in order, also failed ones: the method, and the ids or the service."""

    def __init__(self, inner: RegistryBackend) -> None:
        """Wrap another backend, which is closed with this one."""
        super().__init__(inner.url, inner.settings)
        self.inner = inner
        self.keeps_alive = inner.keeps_alive
        self.read_only = inner.read_only
        self.requests = []
        self._changed = threading.Condition()
        self._state: State = "up"
        self._reason = ""
        self._gone: set[tuple[str, str]] = set()  # removed by `forget`, until published again
        self._watches: list[_FlakyWatch] = []

    # Commands

    def down(self, reason: str = "the engine is down") -> None:
        """Let each request fail at once with `RegistryUnavailable`, and call `on_contact_lost`."""
        self._set_state("down", reason)

    def refuse(self, reason: str = "the engine refuses") -> None:
        """Let each request fail at once with `RegistryRefused`. Watches continue."""
        self._set_state("refusing", reason)

    def freeze(self) -> None:
        """Let each request hang for `timeout_s` real seconds and then fail.

        Requests that hang when `up` is called are executed. Watchers are not called.
        """
        self._set_state("frozen", "the engine does not answer")

    def lose_answers(self) -> None:
        """Execute each request, and then fail it with `RegistryUnavailable`."""
        self._set_state("losing answers", "the answer was lost")

    def up(self) -> None:
        """End all failures. If contact was lost, watchers get the present view."""
        self._set_state("up", "")

    def forget(self) -> None:
        """Remove all records from the engine, also those of others.

        `renew` reports "wiped" for each of them until it is published again. Watchers get
        `on_contact_lost`, once until their next view, and then an empty view.
        """
        with self._changed:
            watches, cut = tuple(self._watches), self._state in CUT
        for watch in watches:
            watch.cut("the engine has lost its data")
        for service in self.inner.services():
            decoded = [_read(record) for record in self.inner.lookup(service).records.values()]
            instances = [instance for instance in decoded if instance is not None]
            with self._changed:
                self._gone.update(instance.key for instance in instances)
            self.inner.withdraw(instances)
        for watch in () if cut else watches:
            watch.resume()

    # Requests

    def publish(self, instances: Sequence[ServiceInstance]) -> None:
        """Publish in the inner backend, or fail."""

        def execute() -> None:
            self.inner.publish(instances)
            with self._changed:
                self._gone.difference_update(instance.key for instance in instances)

        self._request("publish", [instance.id for instance in instances], execute)

    def withdraw(self, instances: Sequence[ServiceInstance]) -> None:
        """Withdraw in the inner backend, or fail."""
        ids = [instance.id for instance in instances]
        self._request("withdraw", ids, lambda: self.inner.withdraw(instances))

    def renew(self, instances: Collection[ServiceInstance]) -> Mapping[tuple[str, str], Lost]:
        """Renew in the inner backend, or fail. Forgotten instances are reported as "wiped"."""

        def execute() -> Mapping[tuple[str, str], Lost]:
            lost = self.inner.renew(instances)
            with self._changed:
                return {key: "wiped" if key in self._gone else why for key, why in lost.items()}

        return self._request("renew", [instance.id for instance in instances], execute)

    def lookup(self, service: str) -> View:
        """Look up a service in the inner backend, or fail."""
        return self._request("lookup", [service], lambda: self.inner.lookup(service))

    def services(self) -> Sequence[str]:
        """List the services of the inner backend, or fail."""
        return self._request("services", [], self.inner.services)

    def consumers(self, services: Collection[str] | None = None) -> Sequence[Consumer]:
        """Read the clients from the inner backend, or fail."""
        return self._request("consumers", services or (), lambda: self.inner.consumers(services))

    def watch(self, service: str, watcher: Watcher) -> Watch:
        """Watch a service in the inner backend. The watcher gets no views while contact is cut."""
        with self._changed:
            self._check_open()
            self.requests.append(("watch", (service,)))
            watch = _FlakyWatch(watcher, cut=self._state in CUT)
            self._watches.append(watch)
        watch.inner = self.inner.watch(service, watch)
        return watch

    def refresh(self, service: str) -> None:
        """Refresh the watches of a service in the inner backend, in any state."""
        self.inner.refresh(service)

    def close(self) -> None:
        """Close the inner backend, which gives up its lease in any state. Idempotent."""
        with self._changed:
            closed, self._closed = self._closed, True
            self._changed.notify_all()
        if closed:
            return
        for watch in self._watches:
            watch.close()
        self.inner.close()

    def _request(self, method: str, names: Collection[str], execute: Callable[[], R]) -> R:
        with self._changed:
            self._check_open()
            self.requests.append((method, tuple(names)))
            if self._state == "frozen":
                self._changed.wait_for(
                    lambda: self._state != "frozen" or self._closed, self.settings.timeout_s
                )
                self._check_open()
            state, reason = self._state, self._reason
        if state == "refusing":
            raise RegistryRefused(f"{self.url}: {reason}")
        if state in CUT:
            raise RegistryUnavailable(f"{self.url}: {reason}")
        answer = execute()
        if state == "losing answers":
            raise RegistryUnavailable(f"{self.url}: {reason}")
        return answer

    def _set_state(self, state: State, reason: str) -> None:
        with self._changed:
            self._state, self._reason = state, reason
            self._changed.notify_all()
            watches = [watch for watch in self._watches if not watch.notifier.closed]
            self._watches = watches
        for watch in watches:
            if state in CUT:
                watch.cut(reason if state == "down" else None)
            else:
                watch.resume()


class _FlakyWatch:
    """Passes calls of the inner backend to a watcher, except while contact is cut."""

    def __init__(self, watcher: Watcher, *, cut: bool) -> None:
        self.notifier = WatchNotifier(watcher)
        self.inner: Watch | None = None
        self._lock = threading.Lock()
        self._cut = cut
        self._seen: View | None = None

    def on_view(self, view: View) -> None:
        with self._lock:
            self._seen = view
            if not self._cut:
                self.notifier.add(view)
        self.notifier.start()

    def on_contact_lost(self, reason: str) -> None:
        with self._lock:
            if not self._cut:
                self.notifier.add(reason)
        self.notifier.start()

    def cut(self, reason: str | None) -> None:
        """Pass no calls to the watcher. With a reason, call `on_contact_lost` first."""
        with self._lock:
            self._cut = True
            if reason is not None:
                self.notifier.add(reason)
        self.notifier.start()

    def resume(self) -> None:
        """Pass calls to the watcher again, and the last view of the time before."""
        with self._lock:
            was, self._cut = self._cut, False
            if was:
                self.notifier.add("contact was lost")  # left out if it had a reason before
            if was and self._seen is not None:
                self.notifier.add(self._seen)
        self.notifier.start()

    def close(self) -> None:
        self.notifier.close()
        if self.inner is not None:
            self.inner.close()


def _read(record: bytes) -> ServiceInstance | None:
    try:
        return ServiceInstance.decoded(record)
    except ValueError:
        return None
