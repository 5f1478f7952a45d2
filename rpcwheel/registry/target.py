"""What a channel's target and its keyword arguments name: an address, or a service. Pure."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from rpcwheel.errors import ConfigurationError
from rpcwheel.instance import GRPC_SCHEMES, joined

from .backends import check_scheme
from .url import HEADLESS, RegistryUrl, masked_url, parse_url

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping

    from rpcwheel.instance import ServiceInstance, Snapshot

__all__ = ["Target", "is_registry_url", "names_service"]

ANY: Final = "*"

EXAMPLE: Final = "etcd://127.0.0.1:2379/shop.Orders"

DATABASE_SUFFIXES: Final = (".db", ".db3", ".sqlite", ".sqlite3")
"""`sqlite:///x.db/shop.Orders` has a service after the file's name."""

CLIENT_OPTIONS: Final = ("group", "version")
"""Options of a URL that select instances. The others are the engine's."""


@dataclass(frozen=True, slots=True)
class Target:
    """A service, the registry that has it, and which of its instances are selected."""

    service: str
    url: RegistryUrl | None = None
    """The registry's, without the service and the selection. None: the user's own registry."""
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
        """Parse a registry URL, or with a registry of the user's the name of a service.

        `group` and `version` take precedence over those in the URL.

        Raises:
            ConfigurationError: It is no such URL or name, or no service is named, or two.
            TypeError: `target` is no string.
        """
        url = None if has_registry else _checked_url(target, service)
        name = _checked_name(target, service) if url is None else service or url.service
        if not name:
            raise ConfigurationError(
                f"which service is meant? Name it in the URL, {_example_like(url)!r}, or by "
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
        """For a channel with credentials. DNS does not tell which servers use TLS: all do then."""
        if self.url is None or self.url.scheme != HEADLESS:
            return self
        options = {"protocol": "grpcs", **self.url.options}
        return dataclasses.replace(self, url=dataclasses.replace(self.url, options=options))

    @property
    def authority(self) -> str | None:
        """By which name all servers are called, and their certificates checked.

        That of a headless service, as with `dns:///`: nobody has certificates for the addresses of
        pods. None: each by its own.
        """
        if self.url is None or self.url.scheme != HEADLESS:
            return None
        host, port = self.url.hosts[0]
        return host if port is None else joined(host, port)

    @property
    def registry_key(self) -> Hashable:
        """Equal for all URLs of one registry with the same password."""
        if self.url is None:
            return None
        parts = {each.name: getattr(self.url, each.name) for each in dataclasses.fields(self.url)}
        parts["options"] = tuple(sorted(self.url.options.items()))
        return tuple(parts.values())

    def select(self, snapshot: Snapshot) -> list[ServiceInstance]:
        """The instances of the group and the version."""
        return [
            instance
            for instance in snapshot.instances
            if self.group in {ANY, instance.group} and self.version in {ANY, instance.version}
        ]


def is_registry_url(target: object) -> bool:
    """Whether a target is the URL of a registry, and not a target of gRPC.

    A URL has `://`, so `unix:50051` and `dns:50051` are none, and its scheme is not one of gRPC's:
    `dns:///orders:50051` and `unix:///run/shop.sock` are targets of gRPC.
    """
    scheme, separator, _ = target.partition("://") if isinstance(target, str) else ("", "", "")
    return bool(separator) and scheme.lower() not in GRPC_SCHEMES


def names_service(target: object, settings: Mapping[str, object]) -> bool:
    """Whether a channel is to a service by its name, and not to an address.

    Args:
        target: Of the channel.
        settings: The arguments that only a channel by name can have, by their names. None: not
            given.

    Raises:
        ConfigurationError: The target is an address, and one of these was given.
    """
    if settings.get("registry") is not None or is_registry_url(target):
        return True
    if given := [name for name, value in settings.items() if value is not None]:
        shown = repr(masked_url(target)) if isinstance(target, str) else repr(target)
        raise ConfigurationError(
            f"{', '.join(given)}: for a channel to a service by its name, such as {EXAMPLE!r}; "
            f"{shown} is an address"
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
    """How this URL would name a service. The whole path of a file's URL is the file's."""
    if url is None or not url.path:
        return EXAMPLE
    if url.scheme != "sqlite":
        return f"{str(url).partition('?')[0]}?service=shop.Orders"
    file, _, last = url.path.rpartition("/")
    if not file.endswith(DATABASE_SUFFIXES):
        file, last = url.path, "shop.Orders"
    return f"{url.scheme}://{file}?service={last}"
