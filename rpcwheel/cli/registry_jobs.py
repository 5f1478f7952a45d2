"""What `rpcwheel registry` does: each job opens a registry, and leaves nothing open.

What others tell while a job runs (contact lost, a record that can't be read) comes as events, and
is said by the main thread, one line each; the log is silent meanwhile, or it would be said twice.
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

from rpcwheel.errors import ConfigurationError, NotPublished, RegistryError, RegistryUnavailable
from rpcwheel.instance import Snapshot
from rpcwheel.observe import (
    InstancePublished,
    RecordSkipped,
    RegistryFailed,
    RegistryRecovered,
    add_sink,
    remove_sink,
)
from rpcwheel.registry.sync import Registry, open_registry
from rpcwheel.registry.url import parse_url

from .diagnosis import printable
from .registry_changes import as_facts, changes
from .registry_view import as_document, show

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rpcwheel.instance import ServiceInstance
    from rpcwheel.registry.policy import RegistryPolicy
    from rpcwheel.registry.sync import Registration

__all__ = ["Place", "ls", "register", "unregister", "watch"]

NOTICED_S: Final = 0.15
"""Between DRAINING and the withdrawal, for clients that look now and then."""

FAREWELL_S: Final = 2.0
"""A registry that is dead keeps nobody longer."""

SIGNAL_CHECK_S: Final = 0.5
"""How often a job that waits looks for signals."""


class Place(NamedTuple):
    """A registry, and how it is asked."""

    url: str
    policy: RegistryPolicy

    @contextmanager
    def opened(self, news: SimpleQueue[object], *, makes: bool = False) -> Iterator[Registry]:
        """Open it, and have events told to `news`.

        Args:
            news: Where to.
            makes: Whether a file may be made; who only looks would make it as the wrong user.

        Raises:
            ConfigurationError, ExtraMissing: The URL makes no sense, a package is missing.
            RegistryUnavailable: There is no such file.
        """
        with _listening(news):
            try:
                with open_registry(self.url, policy=self.policy) as registry:
                    self._look_first(registry, makes=makes)
                    yield registry
            except (RegistryUnavailable, NotPublished) as error:
                raise _reason(news, error) from None

    def _look_first(self, registry: Registry, *, makes: bool) -> None:
        url = parse_url(self.url)
        if url.scheme == "sqlite" and not makes and not Path(url.path).expanduser().exists():
            raise RegistryUnavailable(f"{registry.url}: there is no such file (yet)")
        if url.scheme == "memory":
            print("memory:// is of one process: this one sees no other's", file=sys.stderr)


def _next(news: SimpleQueue[object]) -> object:
    """Wait for the next item, on the main thread.

    Not in one wait without limit: a signal that arrives just before the thread begins to wait, or
    on another thread, does not interrupt it, and Ctrl-C would have no effect (CPython 3.11).
    """
    while True:
        with suppress(Empty):
            return news.get(timeout=SIGNAL_CHECK_S)


def _reason(news: SimpleQueue[object], error: RegistryError) -> RegistryError:
    """What the engine's backend said, if who waited for it has only seen that time was over."""
    while not news.empty():
        event = news.get()
        if isinstance(event, RegistryFailed) and isinstance(event.error, RegistryError):
            error = event.error
    return error


@contextmanager
def _listening(news: SimpleQueue[object]) -> Iterator[None]:
    silence, log = logging.NullHandler(), logging.getLogger("rpcwheel")
    log.addHandler(silence)  # or warnings without any handler go to stderr
    add_sink(news.put)
    try:
        yield
    finally:
        remove_sink(news.put)
        log.removeHandler(silence)


def ls(place: Place, services: list[str], *, machine: bool, plain: bool) -> int:
    """Show what is there.

    Raises:
        RegistryError: It can't be asked.
    """
    news: SimpleQueue[object] = SimpleQueue()
    found: dict[str, tuple[ServiceInstance, ...]] = {}
    with place.opened(news) as registry:
        for service in services or registry.services():
            try:
                found[service] = registry.lookup(service).instances
            except ConfigurationError as error:  # a name that others have put there
                _warn(f"skipped: {error}")
    while not news.empty():
        _tell(news.get())
    if machine:
        print(as_document(registry.url, found))
    else:
        show(registry.url, found, sys.stdout, plain=plain)
    return 0


def watch(place: Place, services: list[str], *, machine: bool) -> NoReturn:
    """Tell of each change, for ever.

    Raises:
        RegistryError: It can't be asked at the beginning.
    """
    news: SimpleQueue[object] = SimpleQueue()
    seen: dict[str, Snapshot] = {}
    with place.opened(news) as registry:
        for service in services:
            registry.lookup(service)
        for service in services:
            registry.subscribe(service, news.put)
        contact = _Contact()
        while True:
            item = _next(news)
            if not isinstance(item, Snapshot):
                contact.tell(item, machine=machine)
                continue
            before = seen.get(item.service)
            seen[item.service] = item
            for change in changes(before, item):
                _say(as_facts(change) if machine else change.line())
            if before is None and not item.instances and not machine:
                _say(f"  {item.service}: no instance")


def register(place: Place, instance: ServiceInstance) -> NoReturn:
    """Publish it until the process is told to end, which comes as an exception.

    Raises:
        RegistryError: It can't be published at the beginning.
    """
    news: SimpleQueue[object] = SimpleQueue()
    with place.opened(news, makes=True) as registry:
        for one in registry.lookup(instance.service).instances:
            if one.id == instance.id:
                _warn(f"takes the place of {_whose(one)}")
        contact = _Contact()
        try:
            registration = registry.register(instance)
        except (KeyboardInterrupt, SystemExit):  # it may be published already
            _withdraw(registry.register(instance), place.policy)
            raise
        try:
            registry.register(instance, wait=place.policy.timeout)
            _say(f"published {_name(instance)} at {registry.url}; Ctrl-C withdraws it")
            while True:
                contact.tell(_next(news), machine=False)
        finally:
            _withdraw(registration, place.policy)


def _withdraw(registration: Registration, policy: RegistryPolicy) -> None:
    """In order: clients that see DRAINING first know that it is meant."""
    registration.update(status="DRAINING")
    if registration.wait_published(FAREWELL_S / 2):
        time.sleep(NOTICED_S)
    try:
        registration.unregister(wait=FAREWELL_S / 2)
    except RegistryError as error:
        _warn(f"{error}; the registry forgets it after its lease of {policy.lease_ttl:g} s")
    else:
        _say(f"withdrawn {_name(registration.instance)}")


def unregister(place: Place, service: str, name: str) -> int:
    """Take it out, whoever's it is.

    Returns:
        The exit status: 1 if there is none.

    Raises:
        RegistryError: It can't be done.
    """
    news: SimpleQueue[object] = SimpleQueue()
    with place.opened(news) as registry:
        known = {one.id: one for one in registry.lookup(service).instances}
        if name not in known:
            others = f"; there are {', '.join(known)}" if known else ""
            _warn(f"no instance {name!r} of {service} at {registry.url}{others}")
            return 1
        one = known[name]
        registry.unregister(one, wait=place.policy.timeout)
    _say(f"withdrawn {_whose(one)}; if that process lives, it publishes it again")
    return 0


def _name(one: ServiceInstance) -> str:
    return f"{one.service}/{one.id}"


def _whose(one: ServiceInstance) -> str:
    since = f", up since {time.ctime(one.started_at)}" if one.started_at else ""
    return f"{_name(one)} of the process {one.epoch or '(unknown)'} at {one.address}{since}"


class _Contact:
    """Says once that the registry is lost, and once that it is back."""

    def __init__(self) -> None:
        self._lost = False

    def tell(self, event: object, *, machine: bool) -> None:
        """Say what an event means, if it is news."""
        match event:
            case RegistryFailed() if not self._lost:
                self._lost = True
                self._say("lost", f"no contact: {event.error}", machine=machine)
            case RegistryRecovered():
                self._lost = False
                self._say(
                    "found", f"in contact again, after {event.after_s:.1f} s", machine=machine
                )
            case InstancePublished() if event.again:
                name = f"{event.service}/{event.instance}"
                _say(f"published again {name}: the registry had lost it ({event.again})")
            case _:
                _tell(event)

    @staticmethod
    def _say(event: str, words: str, *, machine: bool) -> None:
        _say({"event": event, "note": words} if machine else f"! {words}")


def _tell(event: object) -> None:
    if isinstance(event, RecordSkipped):
        _warn(f"skipped {event.service}/{event.key}: {event.error}")


def _say(what: object) -> None:
    """A line, or an object for machines."""
    line = printable(what) if isinstance(what, str) else json.dumps(what)
    encoding = sys.stdout.encoding or "ascii"
    print(line.encode(encoding, "backslashreplace").decode(encoding), flush=True)


def _warn(line: str) -> None:
    print("rpcwheel registry:", printable(line), file=sys.stderr, flush=True)
