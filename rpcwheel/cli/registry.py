"""`rpcwheel registry ls|watch|register|unregister URL ...`: a registry from the command line.

Works with every backend. While a command runs, events (the registry does not answer, a record is
not valid) are queued, and the main thread prints one line for each. The log is silent meanwhile, so
that nothing is printed twice.
"""

import json
import logging
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Annotated, Final, NoReturn

import typer

from rpcwheel._engines.paths import expanded
from rpcwheel.durations import to_ns, to_seconds
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
from rpcwheel.instance import ServiceInstance, Snapshot, started_now
from rpcwheel.registry.backend import Consumer, RegistryBackend, Settings
from rpcwheel.registry.backends import check_url_writable, open_backend
from rpcwheel.registry.policy import RegistryPolicy
from rpcwheel.registry.sync import Registration, Registry, open_registry
from rpcwheel.registry.url import parse_url

from .findings import printable
from .group import CommandGroup
from .parameters import check_seconds
from .registry_view import (
    as_document,
    change_as_json,
    changes_between,
    changes_of_consumers,
    local_time,
    show,
)
from .target import parse_target

DRAINING_VISIBLE_S: Final = 0.15
"""Time between DRAINING and the withdrawal, for clients that poll."""

WITHDRAW_TIMEOUT_S: Final = 2.0
"""The longest wait for a registry that does not answer."""

SIGNAL_CHECK_INTERVAL_S: Final = 0.5
"""How often a waiting command checks for signals."""

URL_PREFIXES: Final = (
    "sqlite:///",
    "etcd://",
    "zookeeper://",
    "dubbo+zookeeper://",
    "redis://",
    "headless://",
)

URL_HELP: Final = (
    "sqlite:///FILE, etcd://HOST:PORT, zookeeper://HOST:PORT, dubbo+zookeeper://HOST:PORT, "
    "redis://HOST:PORT, optionally with /SERVICE (sqlite: ?service=SERVICE); headless://HOST:PORT "
    "is read only."
)

TIMEOUT_S: Final = to_seconds(to_ns(RegistryPolicy().timeout))

CONSUMERS_INTERVAL_S: Final = 2.0
"""How often `watch` reads the consumers of services."""

CAUSE_TIMEOUT_S: Final = 2.0
"""How long an error waits for the failed request that explains it."""

LEASE_TTL_S: Final = to_seconds(to_ns(RegistryPolicy().lease_ttl))

Url = Annotated[
    str,
    typer.Argument(metavar="URL", help=URL_HELP, autocompletion=lambda: list(URL_PREFIXES)),
]
Timeout = Annotated[
    float,
    typer.Option(metavar="SECONDS", callback=check_seconds, help="Limit for each request."),
]

registry = CommandGroup(
    "registry",
    RegistryError,
    "Show, watch and change the instances in a registry.\n\nExit status: 0 success; 1 the "
    "registry does not answer or refuses, or there is no such service or instance; 2 a wrong "
    "argument or a missing package; 130 after Ctrl-C.",
)


# The commands


@registry.command
def ls(
    url: Url,
    services: Annotated[
        list[str] | None, typer.Argument(metavar="SERVICE", help="All if none is named.")
    ] = None,
    timeout: Timeout = TIMEOUT_S,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
    plain: Annotated[bool, typer.Option("--plain", help="No colors on a terminal.")] = False,
) -> None:
    """Show the instances of services, and the consumers that are registered (Dubbo)."""
    named = _services(url, services)
    events: SimpleQueue[object] = SimpleQueue()
    instances: dict[str, tuple[ServiceInstance, ...]] = {}
    with _open_registry(url, _policy(timeout), events) as opened:
        for service in named or opened.services():
            try:
                instances[service] = opened.lookup(service).instances
            except ConfigurationError as error:  # another program has stored an invalid name
                registry.warn(f"skipped: {error}")
    while not events.empty():
        _report_skipped(events.get())
    with _open_backend(url, timeout) as backend:
        consumers = backend.consumers(named or None)
    if as_json:
        print(as_document(opened.url, instances, consumers))
    else:
        show(opened.url, instances, consumers, sys.stdout, plain=plain)
    missing = [service for service in named if not instances.get(service)]
    if missing and (
        as_json or len(missing) < len(named)
    ):  # if all are missing, the summary says so
        registry.warn(f"no instance of {', '.join(missing)} at {opened.url}")
    raise typer.Exit(1 if missing else 0)


@registry.command
def watch(
    url: Url,
    services: Annotated[list[str] | None, typer.Argument(metavar="SERVICE")] = None,
    timeout: Timeout = TIMEOUT_S,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object per line.")
    ] = False,
) -> NoReturn:
    """Show the instances of services and each change, until Ctrl-C.

    Each line begins with one of = present, + added, ~ changed, ? stale, - removed, and ! for a
    message about the registry. Consumers that are registered (Dubbo) are shown too.
    """
    named = _services(url, services)
    if not named:
        raise ConfigurationError("name a service: rpcwheel registry watch URL SERVICE")
    events: SimpleQueue[object] = SimpleQueue()
    snapshots: dict[str, Snapshot] = {}
    with (
        _open_registry(url, _policy(timeout), events) as opened,
        _open_backend(url, timeout) as backend,
    ):
        for service in named:
            opened.lookup(service)
        for service in named:
            opened.subscribe(service, events.put)
        contact = _Contact(as_json=as_json)
        consumers = _ConsumerWatch(backend, named, as_json=as_json)
        while True:
            item: object = None
            with suppress(Empty):
                item = events.get(timeout=SIGNAL_CHECK_INTERVAL_S)
            if isinstance(item, Snapshot):
                before = snapshots.get(item.service)
                snapshots[item.service] = item
                for change in changes_between(before, item):
                    _say(change_as_json(change) if as_json else change.line())
                if before is None and not item.instances and not as_json:
                    _say(f"  {item.service}: no instance")
            elif item is not None:
                contact.report(item)
            consumers.report()


@registry.command
def register(
    url: Url,
    words: Annotated[list[str], typer.Argument(metavar="[SERVICE] HOST:PORT")],
    timeout: Timeout = TIMEOUT_S,
    lease_ttl: Annotated[
        float,
        typer.Option(metavar="SECONDS", callback=check_seconds, help="If this process dies, the "
                     "registry removes the instance after this time."),
    ] = LEASE_TTL_S,
    instance_id: Annotated[
        str, typer.Option("--id", show_default="HOST:PORT", help="Its id.")
    ] = "",
    weight: Annotated[int, typer.Option(help="Its share of the calls, 0 to 1000.")] = 100,
    version: Annotated[
        str, typer.Option(metavar="NAME", help="Clients can select instances by it.")
    ] = "",
    group: Annotated[str, typer.Option(metavar="NAME", help="As --version.")] = "",
    zone: Annotated[
        str, typer.Option(metavar="NAME", help="Clients prefer instances of their own zone.")
    ] = "",
    tls: Annotated[bool, typer.Option("--tls", help="Clients connect with TLS.")] = False,
    meta: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="Metadata; may be given several times."),
    ] = None,
) -> NoReturn:  # fmt: skip
    """Publish an instance until Ctrl-C or SIGTERM, then withdraw it.

    The instance stays published whatever happens to the registry. For servers that do not publish
    themselves.
    """
    metadata = dict(map(_pair, meta or []))
    service, address = _service_and(url, words, "register", "HOST:PORT")
    try:
        target = parse_target(address)
    except ValueError as error:
        raise ConfigurationError(str(error)) from None
    if target.path:
        raise ConfigurationError(
            f"{address}: other hosts cannot reach a Unix socket; give HOST:PORT"
        )
    instance = ServiceInstance(
        service=service,
        host=target.host,
        port=target.port,
        id=instance_id,
        weight=weight,
        version=version,
        group=group,
        zone=zone,
        protocol="grpcs" if tls else "grpc",
        metadata=metadata,
        started_at=started_now(),
    )
    _publish(url, _policy(timeout).replace(lease_ttl=lease_ttl), instance)


@registry.command
def unregister(
    url: Url,
    words: Annotated[list[str], typer.Argument(metavar="[SERVICE] ID")],
    timeout: Timeout = TIMEOUT_S,
) -> None:
    """Remove an instance, whichever process has published it, and show that process.

    If that process still runs and uses rpcwheel, it publishes the instance again.
    """
    service, instance_id = _service_and(url, words, "unregister", "ID")
    events: SimpleQueue[object] = SimpleQueue()
    with _open_registry(url, _policy(timeout), events) as opened:
        instances = {instance.id: instance for instance in opened.lookup(service).instances}
        if instance_id not in instances:
            others = f"; there are {', '.join(instances)}" if instances else ""
            registry.warn(f"no instance {instance_id!r} of {service} at {opened.url}{others}")
            raise typer.Exit(1)
        instance = instances[instance_id]
        opened.unregister(instance, wait=timeout)
    _say(f"withdrew {_owner(instance)}; if that process still runs, it publishes it again")


# Arguments


def _services(url: str, words: Sequence[str] | None) -> list[str]:
    """Return the services that the URL and the arguments name, each once."""
    named = parse_url(url).service
    services = list(dict.fromkeys([*([named] if named else []), *(words or [])]))
    for service in services:
        ServiceInstance(service=service, host="checked", port=1)
    return services


def _service_and(url: str, words: list[str], job: str, second: str) -> tuple[str, str]:
    """Return the service, which the URL may name too, and a second argument."""
    parsed = parse_url(url)
    check_url_writable(parsed)
    named = parsed.service
    if len(words) == 1 and named:
        words = [named, *words]
    if len(words) != 2:  # noqa: PLR2004 - the service and the second argument
        raise ConfigurationError(
            f"give a service and {second}: rpcwheel registry {job} URL SERVICE {second}"
        )
    if named and words[0] != named:
        raise ConfigurationError(f"two services are named: {named!r} in the URL, and {words[0]!r}")
    return words[0], words[1]


def _pair(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise typer.BadParameter(f"give KEY=VALUE, not {text!r}", param_hint="--meta")
    return key, value


def _policy(timeout: float) -> RegistryPolicy:
    """Return a policy without the snapshot files: only what the registry answers now is shown."""
    return RegistryPolicy(timeout=timeout, snapshot=False)


# The registry


@contextmanager
def _open_registry(
    url: str, policy: RegistryPolicy, events: SimpleQueue[object], *, creates: bool = False
) -> Iterator[Registry]:
    """Open the registry and put events into `events`.

    Args:
        url: The URL of the registry.
        policy: Its policy.
        events: The queue.
        creates: Whether the file of a `sqlite://` URL is created if it does not exist. A command
            that only reads does not: it may run as another user than the servers.

    Raises:
        ConfigurationError: The URL is not valid.
        ExtraMissing: A package is missing.
        RegistryUnavailable: The file does not exist.
    """
    silence, log = logging.NullHandler(), logging.getLogger("rpcwheel")
    log.addHandler(silence)  # without any handler, logging prints warnings to stderr
    add_sink(events.put)
    try:
        with open_registry(url, registry_policy=policy) as opened:
            parsed = parse_url(url)
            is_file = parsed.scheme == "sqlite"
            if is_file and not creates and _is_missing(expanded(parsed.path, url)):
                raise RegistryUnavailable(
                    f"{opened.url}: there is no such file; the first server or client that uses "
                    "the registry creates it"
                )
            if parsed.scheme == "memory":
                registry.warn(
                    "memory:// is private to each process; instances of others are not visible"
                )
            try:
                yield opened
            except (RegistryUnavailable, NotPublished) as error:
                raise _cause(events, error) from None
    finally:
        remove_sink(events.put)
        log.removeHandler(silence)


def _is_missing(file: Path) -> bool:
    """Whether there is no such file. Not if that can't be found out: the request says why."""
    try:
        file.stat()
    except OSError as error:
        return isinstance(error, (FileNotFoundError, NotADirectoryError))
    return False


def _open_backend(url: str, timeout: float) -> closing[RegistryBackend]:
    """Open the backend of a registry, for what a `Registry` does not have. Does not connect yet."""
    return closing(open_backend(url, Settings(LEASE_TTL_S, timeout)))


def _cause(events: SimpleQueue[object], error: RegistryError) -> RegistryError:
    """Return the backend's error, which says more than that a wait was too long.

    Waits for it, because the request may take a moment longer than the caller waited.
    """
    end_s = time.monotonic() + CAUSE_TIMEOUT_S
    while True:
        try:
            event = events.get(timeout=max(0, end_s - time.monotonic()))
        except Empty:
            return error
        if isinstance(event, RegistryFailed) and isinstance(event.error, RegistryError):
            error, end_s = event.error, 0  # and the last one, if there are several


def _next(events: SimpleQueue[object]) -> object:
    """Wait for the next item, on the main thread.

    A wait without limit would miss Ctrl-C: a signal that arrives right before the thread begins to
    wait, or on another thread, does not interrupt the wait (CPython 3.11).
    """
    while True:
        with suppress(Empty):
            return events.get(timeout=SIGNAL_CHECK_INTERVAL_S)


def _publish(url: str, policy: RegistryPolicy, instance: ServiceInstance) -> NoReturn:
    """Publish an instance until the process is stopped (KeyboardInterrupt, SystemExit).

    Raises:
        RegistryError: It cannot be published at the start.
    """
    events: SimpleQueue[object] = SimpleQueue()
    with _open_registry(url, policy, events, creates=True) as opened:
        for present in opened.lookup(instance.service).instances:
            if present.id == instance.id:
                registry.warn(f"replaces {_owner(present)}")
        contact = _Contact(as_json=False)
        try:
            registration = opened.register(instance)
        except (KeyboardInterrupt, SystemExit):  # it may be published already
            _withdraw(opened.register(instance), policy)
            raise
        try:
            opened.register(instance, wait=policy.timeout)
            _say(f"published {_name(instance)} at {opened.url}; Ctrl-C withdraws it")
            while True:
                contact.report(_next(events))
        finally:
            _withdraw(registration, policy)


def _withdraw(registration: Registration, policy: RegistryPolicy) -> None:
    """Publish DRAINING first: clients then know that the withdrawal is intended."""
    registration.update(status="DRAINING")
    if registration.wait_published(WITHDRAW_TIMEOUT_S / 2):
        time.sleep(DRAINING_VISIBLE_S)
    try:
        registration.unregister(wait=WITHDRAW_TIMEOUT_S / 2)
    except RegistryError as error:
        registry.warn(
            f"{error}; the instance disappears when its lease of {policy.lease_ttl:g} s ends"
        )
    else:
        _say(f"withdrew {_name(registration.instance)}")


# Output


def _name(instance: ServiceInstance) -> str:
    return f"{instance.service}/{instance.id}"


def _owner(instance: ServiceInstance) -> str:
    since = f", up since {local_time(instance.started_at)}" if instance.started_at else ""
    process = instance.epoch or "(unknown)"
    return f"{_name(instance)} of the process {process} at {instance.address}{since}"


class _ConsumerWatch:
    """Prints the consumers of services, and each that is added or removed."""

    def __init__(self, backend: RegistryBackend, services: Sequence[str], *, as_json: bool) -> None:
        self._backend = backend
        self._services = services
        self._as_json = as_json
        self._consumers: Sequence[Consumer] | None = None
        self._due_s = time.monotonic()

    def report(self) -> None:
        """Read the consumers if `CONSUMERS_INTERVAL_S` has passed, and print what has changed.

        A registry that does not answer is reported elsewhere.
        """
        if time.monotonic() < self._due_s:
            return
        with suppress(RegistryError):
            consumers = self._backend.consumers(self._services)
            for change in changes_of_consumers(self._consumers, consumers):
                _say(change.as_json() if self._as_json else change.line())
            self._consumers = consumers
        self._due_s = time.monotonic() + CONSUMERS_INTERVAL_S


class _Contact:
    """Prints once that the registry does not answer, and once that it answers again."""

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json
        self._is_lost = False

    def report(self, event: object) -> None:
        """Print an event if it is news."""
        match event:
            case RegistryFailed(error=InstanceIdConflict()):
                registry.warn(str(event.error))
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
        registry.warn(
            f"skipped {event.service}/{event.key}, which is not a valid instance: {event.error}"
        )


def _say(output: object) -> None:
    """Print a line, or a JSON object on one line."""
    print(printable(output) if isinstance(output, str) else json.dumps(output), flush=True)
