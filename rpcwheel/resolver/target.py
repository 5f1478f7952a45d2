"""Targets of channels that name a service in a registry, such as `etcd://host:2379/shop.Orders`.

`names_service` tells these targets from those of gRPC, which are addresses. `Target.of` parses
them. No I/O: nothing is connected or looked up.
"""

from __future__ import annotations

import dataclasses
import difflib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from rpcwheel.errors import ConfigurationError, masked_url
from rpcwheel.instance import GRPC_SCHEMES, joined
from rpcwheel.registry.backends import check_scheme
from rpcwheel.registry.url import DUBBO_SCHEMES, HEADLESS, RegistryUrl, parse_url

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping, Sequence

    from rpcwheel.instance import ServiceInstance, Snapshot

ANY: Final = "*"
"""The group or version that selects all instances."""

EXAMPLE: Final = "etcd://127.0.0.1:2379/shop.Orders"
"""A valid target, for error messages."""

DATABASE_SUFFIXES: Final = (".db", ".db3", ".sqlite", ".sqlite3")
"""Endings of database files. In the wrong URL `sqlite:///x.db/shop.Orders` they show where the file
ends and the service begins; the error message proposes `sqlite:///x.db?service=shop.Orders`."""

CLIENT_OPTIONS: Final = ("group", "version")
"""Options of a URL that select instances. All others are for the backend."""


@dataclass(frozen=True, slots=True)
class Target:
    """A service, its registry, and a selection of its instances."""

    service: str
    url: RegistryUrl | None = None
    """The registry's URL, without service, group and version. None: the user has given the channel
    a `Registry` object."""
    group: str = ANY
    version: str = ANY
    tag: str = ""
    """The tag of calls, which selects among the providers of Dubbo."""

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
        """Parse the target of a channel.

        Args:
            target: A registry URL; the name of a service if `has_registry`.
            has_registry: Whether the user has given the channel a `Registry` object.
            service: The name of the service, if `target` does not name it.
            group: Takes precedence over the group in the URL; None: not given.
            version: Takes precedence over the version in the URL; None: not given.

        Raises:
            ConfigurationError: `target` is not valid; or no service is named, or two different ones
                are.
            TypeError: `target` is not a string.
        """
        url: RegistryUrl | None
        if has_registry:
            url, name = None, _checked_name(target, service)
        else:
            url = _checked_url(target, service)
            name = service or url.service
        options = {} if url is None else url.options
        if not name:
            if misspelled := difflib.get_close_matches("service", options, n=1, cutoff=0.75):
                raise ConfigurationError(
                    f"no service is named; the URL has the option {misspelled[0]!r}: did you mean "
                    "'service'?"
                )
            raise ConfigurationError(
                f"no service is named; name it in the URL, {_example_like(url)!r}, or by "
                "service='shop.Orders'"
            )
        return cls(
            service=name,
            url=None if url is None else _registry_alone(url),
            group=options.get("group", ANY) if group is None else group,
            version=options.get("version", ANY) if version is None else version,
            tag=options.get("tag", "") if url is not None and url.scheme in DUBBO_SCHEMES else "",
        )

    def with_tls(self) -> Target:
        """Return this target for a channel with TLS credentials, which calls only TLS servers.

        Registries say which servers use TLS. DNS does not, so for `headless://` the result assumes
        that all do.
        """
        if self.url is None or self.url.scheme != HEADLESS:
            return self
        options = {"protocol": "grpcs", **self.url.options}
        return dataclasses.replace(self, url=dataclasses.replace(self.url, options=options))

    @property
    def authority(self) -> str | None:
        """The authority (host name) of all calls; each server's certificate must be valid for it.

        For a headless service it is the host in the URL, as with `dns:///`, because certificates
        are not issued for the addresses of pods. None: the authority is each server's own address.
        """
        if self.url is None or self.url.scheme != HEADLESS:
            return None
        if not self.url.hosts:  # which the backend refuses
            return None
        host, port = self.url.hosts[0]
        return host if port is None else joined(host, port)

    @property
    def registry_key(self) -> Hashable:
        """A hashable form of `url`. Channels with equal keys share a registry."""
        if self.url is None:
            return None
        parts = {each.name: getattr(self.url, each.name) for each in dataclasses.fields(self.url)}
        parts["options"] = tuple(sorted(self.url.options.items()))
        return tuple(parts.values())

    def select(self, snapshot: Snapshot) -> Sequence[ServiceInstance]:
        """The instances of this group and version.

        If both are `ANY`, it is the tuple of the snapshot itself, not a copy.
        """
        if self.group == self.version == ANY:
            return snapshot.instances
        return [
            instance
            for instance in snapshot.instances
            if self.group in {ANY, instance.group} and self.version in {ANY, instance.version}
        ]

    def mismatch(self, snapshot: Snapshot) -> str:
        """Say what the registry has, if `select` returns nothing."""
        if not snapshot.instances:
            return "lists none"
        wanted = {"group": self.group, "version": self.version}
        conditions = " and ".join(
            f"{name} {value!r}" for name, value in wanted.items() if value != ANY
        )
        return f"has {len(snapshot.instances)}, but none of {conditions}"


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
        settings: The channel's arguments that make sense only for a service in a registry, by name.
            None as a value: the argument was not given.

    Raises:
        ConfigurationError: The target is an address, and one of these arguments was given.
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
    own = (*CLIENT_OPTIONS, "tag") if url.scheme in DUBBO_SCHEMES else CLIENT_OPTIONS
    options = {name: value for name, value in url.options.items() if name not in own}
    return dataclasses.replace(url, service="", options=options)


def _example_like(url: RegistryUrl | None) -> str:
    """An example of how this URL, which names no service, would name one."""
    if url is None or not url.path:
        return EXAMPLE
    if url.scheme != "sqlite":
        return f"{str(url).partition('?')[0]}?service=shop.Orders"
    file, _, service = url.path.rpartition("/")
    if not file.endswith(DATABASE_SUFFIXES):  # the whole path is the file
        file, service = url.path, "shop.Orders"
    return f"{url.scheme}://{file}?service={service}"
