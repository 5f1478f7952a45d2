"""Which instances a channel by name is for: what its URL and its arguments say together. Pure."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from rpcwheel.cluster.arguments import checked_policy
from rpcwheel.errors import ConfigurationError

from .providers import check_scheme
from .url import parse_url

if TYPE_CHECKING:
    from collections.abc import Hashable

    from rpcwheel.cluster.policy import ClusterPolicy
    from rpcwheel.instance import ServiceInstance, Snapshot

    from .url import RegistryUrl

__all__ = [
    "Selection",
    "check_on_removed",
    "checked_cluster",
    "identity",
    "is_by_name",
    "select_by",
    "split",
    "without_service",
]

ANY: Final = "*"

OF_GRPC: Final = frozenset({"dns", "google-c2p", "ipv4", "ipv6", "unix", "vsock", "xds"})
"""Schemes of targets that grpc resolves itself; before their names may stand `//`."""

FILES: Final = (".db", ".db3", ".sqlite", ".sqlite3")
"""How the names of databases end; `sqlite:///x.db/shop.Orders` has a service after one."""

OF_CLIENTS: Final = ("group", "version")
"""Options of a URL that are the client's, and not the engine's."""


@dataclass(frozen=True, slots=True)
class Selection:
    """A service, and which of its instances."""

    service: str
    group: str = ANY
    version: str = ANY

    def of(self, snapshot: Snapshot) -> list[ServiceInstance]:
        """Those that are meant."""
        return [
            one
            for one in snapshot.instances
            if self.group in {ANY, one.group} and self.version in {ANY, one.version}
        ]


def select_by(
    url: RegistryUrl | None, service: str | None, group: str | None, version: str | None
) -> Selection:
    """Put together what the URL says and what the arguments do; the latter hold.

    Raises:
        ConfigurationError: No service is named, or two are.
    """
    of_url = "" if url is None else url.service
    if service and of_url not in {"", service}:
        raise ConfigurationError(
            f"the URL names the service {of_url!r}, and service= names {service!r}; leave out one"
        )
    named = service or of_url
    if not named:
        raise ConfigurationError(
            f"which service is meant? Name it in the URL, {_naming(url)!r}, or by "
            "service='shop.Orders'"
        )
    options = {} if url is None else url.options
    return Selection(
        service=named,
        group=options.get("group", ANY) if group is None else group,
        version=options.get("version", ANY) if version is None else version,
    )


def _naming(url: RegistryUrl | None) -> str:
    """How a URL names a service; of a file's, all of the path is the file's."""
    if url is None or not url.path:
        return "etcd://127.0.0.1:2379/shop.Orders"
    if url.scheme != "sqlite":
        return f"{str(url).partition('?')[0]}?service=shop.Orders"
    file, _, last = url.path.rpartition("/")
    if not file.endswith(FILES):
        file, last = url.path, "shop.Orders"
    return f"{url.scheme}://{file}?service={last}"


def is_by_name(target: object) -> bool:
    """Whether a target is a URL, and no address for grpc."""
    scheme, colon, _ = target.partition("://") if isinstance(target, str) else ("", "", "")
    return bool(colon) and scheme not in OF_GRPC


def split(
    where: str, registry: object, service: str | None
) -> tuple[RegistryUrl | None, str | None]:
    """Tell a URL from a name, which there is with a registry; and the service that is named.

    Raises:
        ConfigurationError: There is neither a URL nor a registry, or there are both.
        TypeError: It is no string.
    """
    if registry is None:
        url = parse_url(where)
        check_scheme(url)
        return url, service
    if not isinstance(where, str):
        raise TypeError(f"with registry=, the first argument is the service's name, not {where!r}")
    if "://" in where:
        raise ConfigurationError(
            "give a URL or registry=, not both; with the latter the first argument is the name of "
            "the service"
        )
    if where and service and where != service:
        raise ConfigurationError(f"two services are named, {where!r} and {service!r}")
    return None, service or where


def without_service(url: RegistryUrl) -> RegistryUrl:
    """The registry alone: what channels to several services of it have in common."""
    engines = {name: value for name, value in url.options.items() if name not in OF_CLIENTS}
    return dataclasses.replace(url, service="", options=engines)


def identity(url: RegistryUrl) -> Hashable:
    """What two URLs of one registry have in common, the password too."""
    parts: dict[str, Any] = {
        field.name: getattr(url, field.name) for field in dataclasses.fields(url)
    }
    return tuple((parts | {"options": tuple(sorted(url.options.items()))}).values())


def checked_cluster(cluster: ClusterPolicy | None, zone: str | None) -> ClusterPolicy:
    """The policy of the channel, with the zone that was given.

    Raises:
        TypeError: It is none.
    """
    checked = checked_policy(cluster)
    return checked if zone is None else checked.changed(zone=zone)


def check_on_removed(on_removed: object) -> None:
    """Raise `TypeError` if it is neither None nor callable."""
    if on_removed is not None and not callable(on_removed):
        raise TypeError(f"on_removed must be callable as on_removed(member), not {on_removed!r}")
