"""`dubbo+zookeeper://host:2181,host2:2181/shop.v1.Orders`: Dubbo's own format in ZooKeeper.

Dubbo's consumers find servers that are published here, and clients here find Dubbo's providers of
Triple services (which is gRPC on the wire).

An instance is an ephemeral node whose name is its URL: `/{root}/{interface}/providers/{URL}`. The
data are never read. `dubbo_url.py` reads and writes the URLs. The Java interface is that of
`?interface=` (several are separated by commas) whose last part is that of the service's name;
otherwise it is the name of the service. They differ if the .proto file has a `java_package`.

As the whole record is a name, an instance is changed by deleting a node and creating another, in
one transaction: consumers see one change. Nodes with the same id are replaced; an id is host and
port, so that a restarted server replaces itself, whichever program has published it.
"""

from __future__ import annotations

from functools import lru_cache, partial
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Final

from kazoo.exceptions import NoNodeError
from kazoo.protocol.states import EventType

from rpcwheel.errors import ConfigurationError
from rpcwheel.instance import record_epoch
from rpcwheel.registry.backend import View
from rpcwheel.registry.url import NAME, NAMESPACE

from .dubbo_url import node_name, record_of
from .zookeeper_nodes import MAX_ATTEMPTS, ZookeeperNodes, failed, session_id

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kazoo.client import KazooClient
    from kazoo.protocol.states import WatchedEvent

    from rpcwheel.instance import ServiceInstance
    from rpcwheel.registry.backend import Settings
    from rpcwheel.registry.url import RegistryUrl

ROOT: Final = "dubbo"
"""Dubbo's default for the `group` of a registry, which is the root of its nodes."""

PROVIDERS: Final = "providers"

RESERVED: Final = frozenset({"config", "mapping", "metadata"})
"""Nodes below the root that are no interfaces."""

CACHED_RECORDS: Final = 16384
"""A name never changes its meaning. Reading one takes 30 us."""

LEVELS: Final = ("interface",)


class DubboBackend(ZookeeperNodes):
    """Instances in the format of Dubbo's interface level."""

    own_options = ("interface", "application", "level", "root", "tag")

    def __init__(self, url: RegistryUrl, settings: Settings) -> None:
        super().__init__(url, settings)
        self._interfaces = _checked_interfaces(url)
        self._application = url.options.get("application", "")
        self._root = f"/{url.options.get('root', ROOT)}"
        self._release = f"rpcwheel-{version('rpcwheel')}"
        self._paths: dict[tuple[str, str], tuple[str, str]] = {}
        """The epoch and the path of each published instance, by its key."""
        self._changed: set[str] = set()
        """Services whose watch has fired. kazoo's thread adds them."""

    def interface_of(self, service: str) -> str:
        """Return the Java interface of a service."""
        return self._interfaces.get(_last_part(service), service)

    def publish(self, instances: Sequence[ServiceInstance]) -> None:
        client, end_ns = self._session.client(), self._session.end_ns()
        keys = (instance.key for instance in instances)
        self._published.update(dict.fromkeys(keys, session_id(client)))
        created: set[str] = set()
        for _ in range(MAX_ATTEMPTS):
            if self._is_put(client, instances, created, end_ns):
                self._session.accept_data(client)
                self._paths |= {one.key: (one.epoch, self._new_path(one)) for one in instances}
                return
        raise self._conflict([self._new_path(instance) for instance in instances])

    def withdraw(self, instances: Sequence[ServiceInstance]) -> None:
        client, end_ns = self._session.client(), self._session.end_ns()
        doomed = []
        for service, group in _by_service(instances).items():
            withdrawn = {(instance.id, instance.epoch) for instance in group}
            for name in self._list(client, self._directory(service), end_ns):
                id_, record = self._record(name, service)
                if (id_, record_epoch(record)) in withdrawn:
                    doomed.append(f"{self._directory(service)}/{name}")
        for instance in instances:
            self._published.pop(instance.key, None)
            self._paths.pop(instance.key, None)
        for path in doomed:
            self._verified.pop(path, None)
        results = self._results(doomed, [client.delete_async(path) for path in doomed], end_ns)
        if left := [path for path, result in results.items() if failed(result, NoNodeError)]:
            raise self._conflict(left)

    def lookup(self, service: str) -> View:
        client, end_ns = self._session.client(), self._session.end_ns()
        names = self._list(client, self._directory(service), end_ns)
        return View(self._records(names, service), client.last_zxid)

    def services(self) -> Sequence[str]:
        """Return the names of interfaces that have providers.

        Of an interface that `?interface=` names, it is the service of the URL.
        """
        client, end_ns = self._session.client(), self._session.end_ns()
        names = self._list(client, self._root, end_ns) - RESERVED
        own = {self.interface_of(self.url.service): self.url.service}
        paths = {own.get(name, name): f"{self._root}/{name}/{PROVIDERS}" for name in names}
        return self._with_children(client, paths, end_ns)

    # On kazoo's thread: does not block

    def _watch_fired(self, service: str, event: WatchedEvent) -> None:
        if event.type != EventType.NONE:
            self._changed.add(service)
            self._polling.request_read(service)

    # Reading services

    def _directory(self, service: str) -> str:
        return f"{self._root}/{self.interface_of(service)}/{PROVIDERS}"

    def _read_watched(self, service: str, previous: View | None) -> View:
        client, end_ns = self._session.client(), self._session.end_ns()
        if previous is not None and service not in self._changed:
            return previous
        self._changed.discard(service)
        watch = partial(self._watch_fired, service)
        names = self._list(client, self._directory(service), end_ns, watch)
        return View(self._records(names, service), client.last_zxid)

    def _record(self, name: str, service: str) -> tuple[str, bytes]:
        return _record_of(name, service, self.interface_of(service))

    def _records(self, names: Iterable[str], service: str) -> dict[str, bytes]:
        """Return the records by id; of two nodes with one id, which are about to change, one."""
        return dict(self._record(name, service) for name in sorted(names))

    # Publishing

    def _path(self, instance: ServiceInstance) -> str:
        """Return the path that was published last, as other values may have changed since."""
        epoch, path = self._paths.get(instance.key, ("", ""))
        return path if epoch == instance.epoch else self._new_path(instance)

    def _new_path(self, instance: ServiceInstance) -> str:
        name = node_name(
            instance,
            interface=self.interface_of(instance.service),
            application=self._application,
            release=self._release,
        )
        return f"{self._directory(instance.service)}/{name}"

    def _has_epoch_of(self, instance: ServiceInstance, data: bytes) -> bool:
        return True  # it is in the path

    def _is_put(
        self,
        client: KazooClient,
        instances: Sequence[ServiceInstance],
        created: set[str],
        end_ns: int,
    ) -> bool:
        """Return whether the nodes are there and no others with the same ids; if not, change that.

        The caller must check again, because others may change the same nodes.

        Args:
            client: The client.
            instances: The instances to publish.
            created: The paths that this session has created; they are added.
            end_ns: When to give up.
        """
        requests: dict[str, Any] = {}
        for service, group in _by_service(instances).items():
            directory = self._directory(service)
            listed = self._list(client, directory, end_ns)
            by_id: dict[str, set[str]] = {}
            for name in listed:
                by_id.setdefault(self._record(name, service)[0], set()).add(f"{directory}/{name}")
            paths = {self._new_path(instance): instance for instance in group}
            present = {path for path, one in paths.items() if path in by_id.get(one.id, ())}
            owned = present & created
            for path, (_, stat) in self._get(client, present - created, end_ns).items():
                # the node of a session that has died would be deleted with it
                owned |= {path} if stat.ephemeralOwner == session_id(client) else set()
            for path, instance in paths.items():
                doomed = by_id.get(instance.id, set()) - ({path} & owned)
                if path in owned and not doomed:
                    continue
                transaction = client.transaction()
                for other in sorted(doomed):
                    transaction.delete(other)
                if path not in owned:
                    transaction.create(path, b"", ephemeral=True)
                self._verified.pop(path, None)
                requests[path] = transaction.commit_async()
        results = self._results(requests, list(requests.values()), end_ns)
        created.update(path for path, result in results.items() if not failed(result))
        missing = {
            path.rpartition("/")[0]
            for path, result in results.items()
            if isinstance(result, NoNodeError)
        }
        self._results(missing, [client.ensure_path_async(path) for path in missing], end_ns)
        return not requests


def _by_service(instances: Sequence[ServiceInstance]) -> dict[str, list[ServiceInstance]]:
    groups: dict[str, list[ServiceInstance]] = {}
    for instance in instances:
        groups.setdefault(instance.service, []).append(instance)
    return groups


_record_of: Final = lru_cache(CACHED_RECORDS)(record_of)


def _last_part(name: str) -> str:
    return name.rpartition(".")[2]


def _checked_interfaces(url: RegistryUrl) -> dict[str, str]:
    """Return the Java interfaces that a URL names, by their last part.

    Raises:
        ConfigurationError: An option is not valid.
    """
    if url.namespace != NAMESPACE:
        raise ConfigurationError(f"{url}: Dubbo's nodes are below root=, not namespace=")
    level = url.options.get("level", LEVELS[0])
    if level not in LEVELS:
        raise ConfigurationError(f"{url}: level must be one of {', '.join(LEVELS)}, not {level!r}")
    for option in ("root", "interface"):
        for name in url.options.get(option, ROOT).split(","):
            if not NAME.fullmatch(name) or name == "zookeeper":
                raise ConfigurationError(
                    f"{url}: {option} must be a name of letters, digits, '.', '_' and '-', "
                    f"not {name!r}"
                )
    names = filter(None, url.options.get("interface", "").split(","))
    interfaces = {_last_part(name): name for name in names}
    if url.service and interfaces and _last_part(url.service) not in interfaces:
        raise ConfigurationError(
            f"{url}: the interface of the service {url.service!r} must end with "
            f"{_last_part(url.service)!r}, as those that Dubbo generates, but interface is "
            f"{', '.join(interfaces.values())}"
        )
    return interfaces
