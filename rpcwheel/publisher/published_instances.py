"""The instances of a server in its registries: registered at the start, withdrawn at the stop."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from rpcwheel._concurrency.executor import EXECUTOR
from rpcwheel.errors import ConfigurationError, NotPublished, RegistryError, short_repr
from rpcwheel.instance import ServiceInstance, started_now
from rpcwheel.registry.backends import check_url_writable
from rpcwheel.registry.registry import Registration, RegistryBase
from rpcwheel.registry.url import parse_url

from .netinfo import PortBinding, address_facing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rpcwheel.registry.url import RegistryUrl

    from .netinfo import PublishedPort
    from .server_adapter import ServerAdapter
    from .shutdown import RunningStep

R = TypeVar("R", bound=RegistryBase)

DRAINING_NOTICE_S: Final = 0.25
"""The pause between DRAINING and the withdrawal. Clients with a registry that is polled, such as
`sqlite://` every 0.1 s, must see DRAINING."""

CLOSE_TIMEOUT_S: Final = 2.0
"""The limit for closing the publisher's own registries, and for the user's callback."""

UNANSWERED_TIMEOUT_S: Final = 0.1
"""The limit for closing a registry whose withdrawal did not succeed in time: it may be dead."""

URL_SETTINGS: Final = ("group", "version")
"""Settings of instances that the options of a URL may give."""

UNREGISTERED_STATES: Final = ("WITHDRAWING", "GONE")
"""The states of a registration that the user has unregistered."""

UNPUBLISHED_PREFIXES: Final = ("grpc.health.", "grpc.reflection.", "grpc.channelz.")
"""Services with these prefixes are not published unless they are named: they describe a server."""


class PublishedInstances(Generic[R]):
    """The instances of a server, one for each service, and the registries that list them.

    `R` is the class of the registries.
    """

    def __init__(
        self,
        entries: Sequence[R | str],
        urls: Sequence[RegistryUrl],
        services: tuple[str, ...],
        port: PublishedPort,
        settings: dict[str, Any],
        *,
        open_registry: Callable[[str], R],
        close_registry: Callable[[R, float], object],
    ) -> None:
        """Check the values, and open the registries that are given by URL.

        Args:
            entries: Registries of the user, and URLs of registries.
            urls: The URLs of all of them that have one; see `registry_urls`.
            services: The services that the user named, or ().
            port: Where clients reach the server.
            settings: The other values of the instances.
            open_registry: Opens the registry of a URL.
            close_registry: Closes a registry; blocks for at most the given seconds.

        Raises:
            ConfigurationError, ExtraMissing, TypeError: As `PublisherBase`.
        """
        self.port = port
        self._urls = urls
        self._services = _named_services(services, urls)
        self._settings = dict(settings)
        for name in URL_SETTINGS:
            options = (url.options.get(name) for url in urls)
            self._settings[name] = settings[name] or next(filter(None, options), "")
        # `ServiceInstance` checks its values. What is not known yet is replaced by valid values.
        for service in self._services or ("checked",):
            self._make(service, "checked" if port.host is None else port.host, port.number or 1)
        self.instances: tuple[ServiceInstance, ...] = ()
        """Empty until `resolve`."""
        self.is_publishing = False
        """Whether `publish` was called: it may have failed in its midst."""
        self.registrations: list[tuple[R, Registration]] = []
        self._withdrawn_from: list[R] = []
        self._close_registry = close_registry
        self.registries: list[R] = []
        self.own: list[R] = []
        """Those of the registries that were opened here."""
        self._open(entries, open_registry)

    def _make(self, service: str, host: str, port: int) -> ServiceInstance:
        return ServiceInstance(service=service, host=host, port=port, **self._settings)

    def _open(self, entries: Sequence[R | str], open_registry: Callable[[str], R]) -> None:
        try:
            for entry in entries:
                if isinstance(entry, str):
                    registry = open_registry(entry)
                    self.own.append(registry)
                else:
                    registry = entry
                self.registries.append(registry)
                registry._session.check_writable()
        except BaseException:
            for registry in self.own:
                close = partial(self._close_registry, registry, CLOSE_TIMEOUT_S)
                EXECUTOR.submit(registry, close)
            raise

    def name(self) -> str:
        """Describe the server, for events."""
        services = (
            [instance.service for instance in self.instances]
            or list(self._services)
            or ["a server"]
        )
        more = f" and {len(services) - 1} more" if len(services) > 1 else ""
        address = self.instances[0].address if self.instances else f"port {self.port.number}"
        return f"{services[0]}{more} at {address}"

    def resolve(self, server: ServerAdapter) -> None:
        """Determine the services, the host and the port, which is bound if no server listens there.

        Raises:
            ConfigurationError: One of them can't be found out, or the port can't be bound.
        """
        port = self.port
        port.find_binding(server_runs=server.is_running)
        services = self._services or tuple(
            name for name in server.service_names() if not name.startswith(UNPUBLISHED_PREFIXES)
        )
        if not services:
            raise ConfigurationError(
                "the server has no handlers of services that are known here; add its servicers "
                "first, or name the services that are published, as in service='shop.Orders'"
            )
        host = address_facing(self._urls) if port.host is None else port.host
        if port.binding is PortBinding.BIND:
            port.bind(server.add_insecure_port, self._settings["protocol"])
        now = started_now()
        self.instances = tuple(
            self._make(service, host, port.number).replace(started_at=now) for service in services
        )

    def publish(self) -> None:
        """Register each instance in each registry, which does not wait for them."""
        self.is_publishing = True
        for registry in self.registries:
            for instance in self.instances:
                registration = registry._blocking.register(instance)
                self.registrations.append((registry, registration))

    @property
    def is_registered(self) -> bool:
        """Whether each instance was registered in each registry; what they answer is not known."""
        expected = len(self.registries) * len(self.instances)
        return 0 < expected == len(self.registrations)

    def withdraw(self, registry: R, step: RunningStep) -> None:
        """Publish DRAINING, give clients a moment to see it, and unregister.

        What the user has unregistered stays so, and so do changes that the user has made.
        """
        blocking = registry._blocking
        with suppress(RegistryError):  # it is dead, which it reports itself; or the user closed it
            draining: list[Registration] = []
            for registration in self._registrations_in(registry):
                if registration.state not in UNREGISTERED_STATES:
                    with suppress(NotPublished):  # the user unregisters it at this moment
                        registration.update(status="DRAINING")
                        draining.append(registration)
            # Half the time, so that a slow registry has the other half for the withdrawal.
            limit_s = 0.0 if step.hurried.is_set() else step.left_s() / 2
            until = time.monotonic() + limit_s
            is_draining_published = all(
                registration.wait_published(max(0.0, until - time.monotonic()))
                for registration in draining
            )
            if is_draining_published:
                step.hurried.wait(DRAINING_NOTICE_S)
            for registration in draining:  # first request all withdrawals, then wait for them
                blocking.unregister(registration)
            for registration in draining:
                blocking.unregister(registration, wait=step.left_s())
            self._withdrawn_from.append(registry)

    def failed_withdrawals(self) -> Iterator[tuple[R, BaseException | None]]:
        """Yield the registries that may still list the server, each with an error."""
        for registry in self.registries:
            registrations = self._registrations_in(registry)
            if any(registration.state != "GONE" for registration in registrations):
                errors = (registration.error for registration in registrations)
                yield registry, next((error for error in errors if error is not None), None)

    def close(self, registry: R, step: RunningStep) -> None:
        """Close a registry that was opened here."""
        may_be_dead = self.is_publishing and registry not in self._withdrawn_from
        timeout_s = 0.0 if may_be_dead else step.left_s()
        self._close_registry(registry, max(UNANSWERED_TIMEOUT_S, timeout_s))

    def _registrations_in(self, registry: R) -> list[Registration]:
        return [each for owner, each in self.registrations if owner is registry]


# Checks of arguments


def registry_entries(registry: Any, registry_type: type[Any], name: str = "registry") -> list[Any]:
    """Return the registries and URLs of an argument that is one of them, or several.

    Args:
        registry: The argument.
        registry_type: The class of registries in this world.
        name: The name of the argument, for errors.

    Raises:
        ConfigurationError: It is empty.
        TypeError: It is neither.
    """
    if isinstance(registry, (str, registry_type)):
        return [registry]
    if not isinstance(registry, Sequence) or isinstance(registry, (bytes, bytearray)):
        raise TypeError(
            f"{name} must be a registry, a URL such as 'etcd://127.0.0.1:2379', or several of "
            f"them; not {short_repr(registry)}"
        )
    if not registry:
        raise ConfigurationError(f"{name} is empty; give at least one registry, or its URL")
    for entry in registry:
        if not isinstance(entry, (str, registry_type)):
            raise TypeError(
                f"{name} must be a {registry_type.__module__}.Registry or a URL such "
                f"as 'etcd://127.0.0.1:2379', or several; not {short_repr(entry)}"
            )
    return list(registry)


def registry_urls(entries: Sequence[Any]) -> list[RegistryUrl]:
    """Return the URLs of registries, without those of the user that have no valid one.

    Raises:
        ConfigurationError: A URL of `entries` is not valid.
        ExtraMissing: A package that a registry needs is not installed.
    """
    return [url for entry in entries if (url := _url_of(entry)) is not None]


def _url_of(registry: Any) -> RegistryUrl | None:
    if isinstance(registry, str):
        url = parse_url(registry)
        check_url_writable(url)
        return url
    try:
        return parse_url(registry.url)
    except ConfigurationError:  # of a backend that has no URL of this form
        return None


def _named_services(services: tuple[str, ...], urls: Sequence[RegistryUrl]) -> tuple[str, ...]:
    """Return the services of the arguments, or of the URLs."""
    of_urls = tuple(url.service for url in urls if url.service)
    for service in services:
        if not isinstance(service, str):
            raise TypeError(
                f'a service is named by a string, such as "shop.Orders"; not {service!r}'
            )
    others = [service for service in of_urls if service not in services]
    if services and others:
        raise ConfigurationError(
            f"the URL names the service {others[0]!r}, which is not among {', '.join(services)}; "
            "leave it out of the URL, or name it too"
        )
    return tuple(dict.fromkeys(services or of_urls))
