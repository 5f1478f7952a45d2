"""The target of a channel: the address of a server, or a service in a registry. Pure."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from rpcwheel.errors import ConfigurationError
from rpcwheel.instance import GRPC_SCHEMES, joined
from rpcwheel.registry.backends import check_scheme
from rpcwheel.registry.url import HEADLESS, RegistryUrl, masked_url, parse_url

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping, Sequence

    from rpcwheel.instance import ServiceInstance, Snapshot

ANY: Final = "*"

EXAMPLE: Final = "etcd://127.0.0.1:2379/shop.Orders"

DATABASE_SUFFIXES: Final = (".db", ".db3", ".sqlite", ".sqlite3")
"""Endings of file names, to recognize a service after the file: `sqlite:///x.db/shop.Orders`."""

CLIENT_OPTIONS: Final = ("group", "version")
"""Options of a URL that select instances. All others are for the backend."""


@dataclass(frozen=True, slots=True)
class Target:
    """A service, its registry, and a selection of its instances."""

    service: str
    url: RegistryUrl | None = None
    """The registry's URL, without service, group and version. None: a `Registry` of the user's."""
    group: str = ANY
    version: str = ANY

    @classmethod
    def of(
        cls,
        target: str,
        *,
        has_registry: bool,
        service: str | None = None,
        group: str | None = None,
        version: str | None = None,
    ) -> Target:
        """Parse a registry URL; if the user gave a `Registry`, the name of a service.

        `group` and `version` take precedence over those in the URL.

        Raises:
            ConfigurationError: The URL or name is not valid, or names no service, or two.
            TypeError: `target` is not a string.
        """
        url = None if has_registry else _checked_url(target, service)
        name = _checked_name(target, service) if url is None else service or url.service
        if not name:
            raise ConfigurationError(
                f"no service is named; name it in the URL, {_example_like(url)!r}, or by "
                "service='shop.Orders'"
            )
        options = {} if url is None else url.options
        return cls(
            service=name,
            url=None if url is None else _registry_alone(url),
            group=options.get("group", ANY) if group is None else group,
            version=options.get("version", ANY) if version is None else version,
        )

    def with_tls(self) -> Target:
        """The target for a channel with credentials.

        DNS does not say which servers use TLS, so all servers of `headless://` are assumed to.
        """
        if self.url is None or self.url.scheme != HEADLESS:
            return self
        options = {"protocol": "grpcs", **self.url.options}
        return dataclasses.replace(self, url=dataclasses.replace(self.url, options=options))

    @property
    def authority(self) -> str | None:
        """The name that all servers are called by, which their certificates must be for.

        For a headless service its host, as with `dns:///`, because certificates are not issued for
        the addresses of pods. None: each server is called by its own address.
        """
        if self.url is None or self.url.scheme != HEADLESS:
            return None
        host, port = self.url.hosts[0]
        return host if port is None else joined(host, port)

    @property
    def registry_key(self) -> Hashable:
        """A key that is equal for URLs of the same registry with the same password."""
        if self.url is None:
            return None
        parts = {each.name: getattr(self.url, each.name) for each in dataclasses.fields(self.url)}
        parts["options"] = tuple(sorted(self.url.options.items()))
        return tuple(parts.values())

    def select(self, snapshot: Snapshot) -> Sequence[ServiceInstance]:
        """The instances of this group and version; without these the snapshot's own tuple."""
        if self.group == self.version == ANY:
            return snapshot.instances
        return [
            instance
            for instance in snapshot.instances
            if self.group in {ANY, instance.group} and self.version in {ANY, instance.version}
        ]

    def mismatch(self, snapshot: Snapshot) -> str:
        """Say why no instance is selected; "" if the service has none."""
        if not snapshot.instances:
            return ""
        wanted = {"group": self.group, "version": self.version}
        conditions = " and ".join(
            f"{name} {value!r}" for name, value in wanted.items() if value != ANY
        )
        return f"it has {len(snapshot.instances)}, but none of {conditions}"


def is_registry_url(target: object) -> bool:
    """Whether a target is a registry URL, and not a target of gRPC.

    A registry URL contains `://`, and its scheme is not one of gRPC's. So `dns:///orders:50051`,
    `unix:///run/shop.sock`, `unix:50051` and `dns:50051` are targets of gRPC.
    """
    scheme, separator, _ = target.partition("://") if isinstance(target, str) else ("", "", "")
    return bool(separator) and scheme.lower() not in GRPC_SCHEMES


def names_service(target: object, settings: Mapping[str, object]) -> bool:
    """Whether a channel connects to a service in a registry, and not to an address.

    Args:
        target: The channel's target.
        settings: By name, the arguments that apply only to a service in a registry. A value of None
            means: not given.

    Raises:
        ConfigurationError: The target is an address, and one of the arguments was given.
    """
    if settings.get("registry") is not None or is_registry_url(target):
        return True
    if names := [name for name, value in settings.items() if value is not None]:
        shown = repr(masked_url(target)) if isinstance(target, str) else repr(target)
        raise ConfigurationError(
            f"{', '.join(names)}: only for a service in a registry, such as {EXAMPLE!r}; {shown} "
            "is an address"
        )
    return False


def _checked_url(target: str, service: str | None) -> RegistryUrl:
    url = parse_url(target)
    check_scheme(url)
    if service and url.service not in {"", service}:
        raise ConfigurationError(
            f"the URL names the service {url.service!r}, and service= names {service!r}; leave out "
            "one"
        )
    return url


def _checked_name(target: object, service: str | None) -> str:
    if not isinstance(target, str):
        raise TypeError(f"with registry=, the target is the service's name, not {target!r}")
    if "://" in target:
        raise ConfigurationError(
            "give a URL or registry=, not both; with the latter the target is the name of the "
            "service"
        )
    if target and service and target != service:
        raise ConfigurationError(f"two services are named, {target!r} and {service!r}")
    return service or target


def _registry_alone(url: RegistryUrl) -> RegistryUrl:
    options = {name: value for name, value in url.options.items() if name not in CLIENT_OPTIONS}
    return dataclasses.replace(url, service="", options=options)


def _example_like(url: RegistryUrl | None) -> str:
    """An example of how this URL would name a service."""
    if url is None or not url.path:
        return EXAMPLE
    if url.scheme != "sqlite":
        return f"{str(url).partition('?')[0]}?service=shop.Orders"
    file, _, last = url.path.rpartition("/")
    if not file.endswith(DATABASE_SUFFIXES):
        file, last = url.path, "shop.Orders"
    return f"{url.scheme}://{file}?service={last}"
