"""The jobs of `rpcwheel registry`. Each opens a registry and closes it.

While a job runs, events (the registry does not answer, a record is not valid) are queued, and the
main thread prints one line for each. The log is silent meanwhile, so that nothing is printed twice.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Final, NamedTuple, NoReturn

from rpcwheel.errors import (
    ConfigurationError,
    InstanceIdConflict,
    NotPublished,
    RegistryError,
    RegistryUnavailable,
)
from rpcwheel.events import (
    InstancePublished,
    RecordSkipped,
    RegistryFailed,
    RegistryRecovered,
    add_sink,
    remove_sink,
)
from rpcwheel.instance import Snapshot
from rpcwheel.registry.sync import Registry, open_registry
from rpcwheel.registry.url import parse_url

from .diagnosis import printable
from .registry_view import as_document, change_as_json, changes_between, encodable, show

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rpcwheel.instance import ServiceInstance
    from rpcwheel.registry.policy import RegistryPolicy
    from rpcwheel.registry.sync import Registration

__all__ = ["RegistryAccess", "ls", "register", "unregister", "watch"]

DRAINING_VISIBLE_S: Final = 0.15
"""Time between DRAINING and the withdrawal, for clients that poll."""

WITHDRAW_TIMEOUT_S: Final = 2.0
"""The longest wait for a registry that does not answer."""

SIGNAL_CHECK_INTERVAL_S: Final = 0.5
"""How often a waiting job checks for signals."""


class RegistryAccess(NamedTuple):
    """The URL of a registry, and the policy to open it with."""

    url: str
    policy: RegistryPolicy

    @contextmanager
    def opened(self, events: SimpleQueue[object], *, creates: bool = False) -> Iterator[Registry]:
        """Open the registry and put events into `events`.

        Args:
            events: The queue.
            creates: Whether the file of a `sqlite://` URL is created if it does not exist. A job
                that only reads does not: it may run as another user than the servers.

        Raises:
            ConfigurationError: The URL is not valid.
            ExtraMissing: A package is missing.
            RegistryUnavailable: The file does not exist.
        """
        with _listening(events):
            try:
                with open_registry(self.url, policy=self.policy) as registry:
                    self._check(registry, creates=creates)
                    yield registry
            except (RegistryUnavailable, NotPublished) as error:
                raise _cause(events, error) from None

    def _check(self, registry: Registry, *, creates: bool) -> None:
        url = parse_url(self.url)
        if url.scheme == "sqlite" and not creates and not Path(url.path).expanduser().exists():
            raise RegistryUnavailable(
                f"{registry.url}: there is no such file; the first server or client that uses the "
                "registry creates it"
            )
        if url.scheme == "memory":
            _warn("memory:// is private to each process; instances of others are not visible")


def _next(events: SimpleQueue[object]) -> object:
    """Wait for the next item, on the main thread.

    A wait without limit would miss Ctrl-C: a signal that arrives right before the thread begins to
    wait, or on another thread, does not interrupt the wait (CPython 3.11).
    """
    while True:
        with suppress(Empty):
            return events.get(timeout=SIGNAL_CHECK_INTERVAL_S)


def _cause(events: SimpleQueue[object], error: RegistryError) -> RegistryError:
    """The backend's error, which says more than that a wait was too long."""
    while not events.empty():
        event = events.get()
        if isinstance(event, RegistryFailed) and isinstance(event.error, RegistryError):
            error = event.error
    return error


@contextmanager
def _listening(events: SimpleQueue[object]) -> Iterator[None]:
    silence, log = logging.NullHandler(), logging.getLogger("rpcwheel")
    log.addHandler(silence)  # without any handler, logging prints warnings to stderr
    add_sink(events.put)
    try:
        yield
    finally:
        remove_sink(events.put)
        log.removeHandler(silence)


def ls(access: RegistryAccess, services: list[str], *, as_json: bool, plain: bool) -> int:
    """Print the instances of services; of all services if `services` is empty.

    Returns:
        The exit status: 1 if a service that was named has no instance.

    Raises:
        RegistryError: The registry does not answer, or refuses.
    """
    events: SimpleQueue[object] = SimpleQueue()
    found: dict[str, tuple[ServiceInstance, ...]] = {}
    with access.opened(events) as registry:
        for service in services or registry.services():
            try:
                found[service] = registry.lookup(service).instances
            except ConfigurationError as error:  # another program has stored an invalid name
                _warn(f"skipped: {error}")
    while not events.empty():
        _report_skipped(events.get())
    if as_json:
        print(as_document(registry.url, found))
    else:
        show(registry.url, found, sys.stdout, plain=plain)
    missing = [service for service in services if not found.get(service)]
    if missing and (as_json or len(missing) < len(services)):  # else the summary says so
        _warn(f"no instance of {', '.join(missing)} at {registry.url}")
    return 1 if missing else 0


def watch(access: RegistryAccess, services: list[str], *, as_json: bool) -> NoReturn:
    """Print each change of services, until the process is stopped.

    Raises:
        RegistryError: The registry does not answer at the start, or refuses.
    """
    events: SimpleQueue[object] = SimpleQueue()
    snapshots: dict[str, Snapshot] = {}
    with access.opened(events) as registry:
        for service in services:
            registry.lookup(service)
        for service in services:
            registry.subscribe(service, events.put)
        contact = _Contact(as_json=as_json)
        while True:
            item = _next(events)
            if not isinstance(item, Snapshot):
                contact.report(item)
                continue
            before = snapshots.get(item.service)
            snapshots[item.service] = item
            for change in changes_between(before, item):
                _say(change_as_json(change) if as_json else change.line())
            if before is None and not item.instances and not as_json:
                _say(f"  {item.service}: no instance")


def register(access: RegistryAccess, instance: ServiceInstance) -> NoReturn:
    """Publish an instance until the process is stopped (KeyboardInterrupt, SystemExit).

    Raises:
        RegistryError: It cannot be published at the start.
    """
    events: SimpleQueue[object] = SimpleQueue()
    with access.opened(events, creates=True) as registry:
        for one in registry.lookup(instance.service).instances:
            if one.id == instance.id:
                _warn(f"replaces {_owner(one)}")
        contact = _Contact(as_json=False)
        try:
            registration = registry.register(instance)
        except (KeyboardInterrupt, SystemExit):  # it may be published already
            _withdraw(registry.register(instance), access.policy)
            raise
        try:
            registry.register(instance, wait=access.policy.timeout)
            _say(f"published {_name(instance)} at {registry.url}; Ctrl-C withdraws it")
            while True:
                contact.report(_next(events))
        finally:
            _withdraw(registration, access.policy)


def _withdraw(registration: Registration, policy: RegistryPolicy) -> None:
    """Publish DRAINING first: clients then know that the withdrawal is intended."""
    registration.update(status="DRAINING")
    if registration.wait_published(WITHDRAW_TIMEOUT_S / 2):
        time.sleep(DRAINING_VISIBLE_S)
    try:
        registration.unregister(wait=WITHDRAW_TIMEOUT_S / 2)
    except RegistryError as error:
        _warn(f"{error}; the instance disappears when its lease of {policy.lease_ttl:g} s ends")
    else:
        _say(f"withdrew {_name(registration.instance)}")


def unregister(access: RegistryAccess, service: str, instance_id: str) -> int:
    """Remove an instance, whichever process has published it.

    Returns:
        The exit status: 1 if there is no such instance.

    Raises:
        RegistryError: The registry does not answer, or refuses.
    """
    events: SimpleQueue[object] = SimpleQueue()
    with access.opened(events) as registry:
        known = {one.id: one for one in registry.lookup(service).instances}
        if instance_id not in known:
            others = f"; there are {', '.join(known)}" if known else ""
            _warn(f"no instance {instance_id!r} of {service} at {registry.url}{others}")
            return 1
        one = known[instance_id]
        registry.unregister(one, wait=access.policy.timeout)
    _say(f"withdrew {_owner(one)}; if that process still runs, it publishes it again")
    return 0


def _name(one: ServiceInstance) -> str:
    return f"{one.service}/{one.id}"


def _owner(one: ServiceInstance) -> str:
    since = f", up since {time.ctime(one.started_at)}" if one.started_at else ""
    return f"{_name(one)} of the process {one.epoch or '(unknown)'} at {one.address}{since}"


class _Contact:
    """Prints once that the registry does not answer, and once that it answers again."""

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json
        self._is_lost = False

    def report(self, event: object) -> None:
        """Print an event if it is news."""
        match event:
            case RegistryFailed(error=InstanceIdConflict()):
                _warn(str(event.error))
            case RegistryFailed() if not self._is_lost:
                self._is_lost = True
                self._say("disconnected", f"the registry does not answer: {event.error}")
            case RegistryRecovered():
                self._is_lost = False
                self._say("reconnected", f"the registry answers again after {event.after_s:.1f} s")
            case InstancePublished() if event.again:
                name = f"{event.service}/{event.instance}"
                _say(f"published {name} again: the registry had lost it ({event.again})")
            case _:
                _report_skipped(event)

    def _say(self, event: str, words: str) -> None:
        _say({"event": event, "note": words} if self._as_json else f"! {words}")


def _report_skipped(event: object) -> None:
    if isinstance(event, RecordSkipped):
        _warn(f"skipped {event.service}/{event.key}, which is not a valid instance: {event.error}")


def _say(what: object) -> None:
    """Print a line, or a JSON object on one line."""
    line = printable(what) if isinstance(what, str) else json.dumps(what)
    print(encodable(line, sys.stdout), flush=True)


def _warn(line: str) -> None:
    print("rpcwheel registry:", printable(line), file=sys.stderr, flush=True)
