"""`dubbo+zookeeper://host:2181,host2:2181/shop.v1.Orders`: Dubbo's own format in ZooKeeper.

Dubbo's consumers find servers that are published here, and clients here find Dubbo's providers of
Triple services (which is gRPC on the wire).

An instance is an ephemeral node whose name is its URL: `/{root}/{interface}/providers/{URL}`. The
data are never read. `dubbo_url.py` reads and writes the URLs. The Java interface is that of
`?interface=` (several are separated by commas) whose last part is that of the service's name;
otherwise it is the name of the service. They differ if the .proto file has a `java_package`.

With `?application=`, servers are also listed at the application level (`dubbo_application.py`),
unless `?level=interface`. Both levels are read, unless `?level=` names one: a server that is listed
at both counts once, as the interface level has it. (Dubbo's consumers use the application level
alone as soon as it has one server.) So metadata are only needed for servers that are listed at the
application level alone. With `?level=application` nothing can be published.

As the whole record is a name, an instance is changed by deleting a node and creating another, in
one transaction: consumers see one change. Nodes with the same id are replaced; an id is host and
port, so that a restarted server replaces itself, whichever program has published it.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

from kazoo.exceptions import NoNodeError

from rpcwheel._version import __version__
from rpcwheel.errors import ConfigurationError
from rpcwheel.instance import NAME, joined, record_epoch
from rpcwheel.registry.url import NAMESPACE

from .dubbo_application import (
    instance_of_application,
    metadata_of,
    metadata_paths,
    with_application,
)
from .dubbo_following import ApplicationLevel
from .dubbo_metadata import MetadataCache
from .dubbo_url import consumer_of, node_name, parameters_of, parsed, record_of
from .zookeeper_nodes import (
    MAX_ATTEMPTS,
    NodeReads,
    ZookeeperNodes,
    failed,
    is_own,
    session_id,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from kazoo.client import KazooClient

    from rpcwheel.instance import ServiceInstance
    from rpcwheel.registry.backend import Consumer, Lost, Settings
    from rpcwheel.registry.url import RegistryUrl

ROOT: Final = "dubbo"
"""Dubbo's default for the `group` of a registry, which is the root of its nodes."""

PROVIDERS: Final = "providers"
CONSUMERS: Final = "consumers"
"""The nodes of clients, beside those of servers. Dubbo's clients register themselves there."""

RESERVED: Final = frozenset({"config", "mapping", "metadata"})
"""Nodes below the root that are no interfaces."""

CACHED_RECORDS: Final = 16384
"""A name never changes its meaning. Reading one takes 30 us."""

SERVICES: Final = "services"
"""The root of the servers of applications, unless there is another root for all nodes."""

LEVELS: Final = ("interface", "application", "both")


class DubboBackend(ZookeeperNodes):
    """Instances in Dubbo's format, at its interface level and its application level."""

    own_options = ("interface", "application", "level", "root", "tag")

    def __init__(self, url: RegistryUrl, settings: Settings) -> None:
        super().__init__(url, settings)
        self._interfaces = _checked_interfaces(url)
        self._application = url.options.get("application", "")
        root, level = url.options.get("root", ROOT), _checked_level(url)
        self._root = f"/{root}"
        self._services = f"/{SERVICES if root == ROOT else root}"
        self._release = f"rpcwheel-{__version__}"
        self._paths: dict[tuple[str, str], tuple[str, str]] = {}
        """The epoch and the path of each published instance, by its key."""
        self.read_only = level == "application"
        self._follows_interfaces = level != "application"
        self._has_applications = bool(self._application) and level != "interface"
        metadata = MetadataCache(settings.timeout_s, self._polling.request_read)
        self._metadata = metadata
        self._applications: ApplicationLevel | None = None
        if level != "interface":
            self._applications = ApplicationLevel(
                self._root, self._services, metadata, beside_interfaces=self._follows_interfaces
            )
        self._current: dict[tuple[str, str], ServiceInstance] = {}
        """All published instances, if there is an application level."""

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
                self._paths |= {
                    instance.key: (instance.epoch, self._new_path(instance))
                    for instance in instances
                }
                if self._has_applications:
                    self._current |= {instance.key: instance for instance in instances}
                    self._put_applications(client, _addresses(instances), end_ns)
                return
        raise self._conflict([self._new_path(instance) for instance in instances])

    def withdraw(self, instances: Sequence[ServiceInstance]) -> None:
        client, end_ns = self._session.client(), self._session.end_ns()
        if self._has_applications:  # by `_paths`, which has them until this has succeeded
            for instance in instances:
                self._current.pop(instance.key, None)
            published_here = [instance for instance in instances if instance.key in self._paths]
            self._put_applications(client, _addresses(published_here), end_ns)
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
        results = self.results(doomed, [client.delete_async(path) for path in doomed], end_ns)
        if left := [path for path, result in results.items() if failed(result, NoNodeError)]:
            raise self._conflict(left)

    def renew(self, instances: Collection[ServiceInstance]) -> Mapping[tuple[str, str], Lost]:
        """Check the nodes of the interface level, and write those of servers that are missing."""
        lost = super().renew(instances)
        if not self._has_applications:
            return lost
        client, connection = self._session.client(), self._session.connection
        paths = {self._application_path(*address): address for address in _addresses(instances)}
        paths = {
            path: address
            for path, address in paths.items()
            if self._verified.get(path) != (connection, "") and self._served_by(address)
        }
        self._verified |= dict.fromkeys(paths, (connection, ""))
        end_ns = self._session.end_ns()
        try:
            nodes = self._get(client, paths, end_ns, self._own_node_changed)
            # Another process may have the node, with which this one shares a port.
            missing = [address for path, address in paths.items() if path not in nodes]
            self._put_applications(client, missing, end_ns)
        except BaseException:
            self._verified.clear()
            raise
        return lost

    def services(self) -> Sequence[str]:
        """Return the names of interfaces that have providers.

        Of an interface that `?interface=` names, it is the service of the URL.
        """
        client, end_ns = self._session.client(), self._session.end_ns()
        own = {self.interface_of(self.url.service): self.url.service}
        services: list[str] = []
        names: Collection[str]
        if self._follows_interfaces:
            names = self._list(client, self._root, end_ns) - RESERVED
            paths = {own.get(name, name): f"{self._root}/{name}/{PROVIDERS}" for name in names}
            services = self._with_children(client, paths, end_ns)
        if self._applications is not None:
            reads, mappings = NodeReads(self, client, end_ns), self._applications.mappings
            names = reads.children([mappings])[mappings]
            interfaces = {own.get(name, name): name for name in names}
            left = {service: interfaces[service] for service in interfaces.keys() - set(services)}
            records, _ = self._applications.read(reads, left)
            services += [service for service in records if records[service]]
        return sorted(services)

    def consumers(self, services: Collection[str] | None = None) -> list[Consumer]:
        client, end_ns = self._session.client(), self._session.end_ns()
        if services is None:
            own = {self.interface_of(self.url.service): self.url.service}
            names = self._list(client, self._root, end_ns) - RESERVED
            interfaces = {own.get(name, name): name for name in names}
        else:
            interfaces = {service: self.interface_of(service) for service in services}
        paths = [f"{self._root}/{interface}/{CONSUMERS}" for interface in interfaces.values()]
        requests = [client.get_children_async(path) for path in paths]
        results = self._session.results(requests, end_ns)
        return sorted(
            consumer_of(name, service)
            for service, names in zip(interfaces, results, strict=True)
            if not failed(names)
            for name in names
        )

    def close(self) -> None:
        self._metadata.close()
        super().close()

    # Reading services

    def _directory(self, service: str) -> str:
        return f"{self._root}/{self.interface_of(service)}/{PROVIDERS}"

    def _read_records(self, service: str, reads: NodeReads) -> tuple[Mapping[str, bytes], bool]:
        records: dict[str, bytes] = {}
        names: Collection[str] = ()
        is_complete = True
        if self._follows_interfaces:
            directory = self._directory(service)
            names = reads.children([directory])[directory]
            records = self._records(names, service)
        if self._applications is not None:
            interfaces = {service: self.interface_of(service)}
            listed = {_address_of(name) for name in names}
            of_applications, is_complete = self._applications.read(reads, interfaces, listed)
            records = of_applications[service] | records
        return records, is_complete

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

        The caller must check again, because others may change the same nodes. `created` has the
        paths that this session has created; others are added.
        """
        requests: dict[str, Any] = {}
        for service, group in _by_service(instances).items():
            directory = self._directory(service)
            listed = self._list(client, directory, end_ns)
            by_id: dict[str, set[str]] = {}
            for name in listed:
                by_id.setdefault(self._record(name, service)[0], set()).add(f"{directory}/{name}")
            paths = {self._new_path(instance): instance for instance in group}
            present = {
                path for path, instance in paths.items() if path in by_id.get(instance.id, ())
            }
            owned = present & created
            for path, (_, stat) in self._get(client, present - created, end_ns).items():
                # the node of a session that has died would be deleted with it
                owned |= {path} if is_own(client, stat) else set()
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
        results = self.results(requests, list(requests.values()), end_ns)
        created.update(path for path, result in results.items() if not failed(result))
        self._ensure_parents(client, results, end_ns)
        return not requests

    # The application level

    def _application_path(self, host: str, port: int) -> str:
        return f"{self._services}/{self._application}/{joined(host, port)}"

    def _served_by(self, address: tuple[str, int]) -> list[ServiceInstance]:
        """Return the instances at an address that consumers may call."""
        return [
            instance
            for instance in self._current.values()
            if (instance.host, instance.port) == address and instance.status == "UP"
        ]

    def _put_applications(
        self, client: KazooClient, addresses: Collection[tuple[str, int]], end_ns: int
    ) -> None:
        """Write the nodes of these servers, or delete those of servers without services."""
        for host, port in addresses:
            path, served = self._application_path(host, port), self._served_by((host, port))
            data = self._put_metadata(client, served, end_ns) if served else None
            for _ in range(MAX_ATTEMPTS):
                nodes = self._get(client, [path], end_ns)
                transaction = client.transaction()
                if path in nodes and data is None and not is_own(client, nodes[path][1]):
                    break  # a successor's
                if path in nodes:
                    transaction.delete(path, nodes[path][1].version)
                if data is not None:
                    transaction.create(path, data, ephemeral=True)
                elif path not in nodes:
                    break
                self._verified.pop(path, None)
                results = self.results([path], [transaction.commit_async()], end_ns)
                if not failed(results[path]):
                    break
                self._ensure_parents(client, results, end_ns)
            else:
                raise self._conflict([path])

    def _put_metadata(
        self, client: KazooClient, served: Sequence[ServiceInstance], end_ns: int
    ) -> bytes:
        """Write the metadata and the mappings of a server; returns the data of its node."""
        services = []
        for instance in sorted(served, key=lambda instance: instance.key):
            interface = self.interface_of(instance.service)
            parameters = parameters_of(
                instance, application=self._application, release=self._release
            )
            services.append((interface, instance.service, parameters))
            self._put_mapping(client, f"{self._root}/mapping/{interface}", end_ns)
        host, port = served[0].host, served[0].port
        revision, metadata = metadata_of(self._application, port, services)
        paths = list(metadata_paths(self._root, self._application, revision))
        if self._services == self._root:
            del paths[1]  # it would be among the processes of the application
        requests = [client.create_async(path, metadata, makepath=True) for path in paths]
        self.results(paths, requests, end_ns)  # equal ones may be there
        timestamp = services[0][2].get("timestamp", "")
        return instance_of_application(self._application, host, port, revision, timestamp)

    def _put_mapping(self, client: KazooClient, path: str, end_ns: int) -> None:
        """Add the application to the mapping of an interface, beside others that do the same."""
        for _ in range(MAX_ATTEMPTS):
            nodes = self._get(client, [path], end_ns)
            data, stat = nodes.get(path, (b"", None))
            mapping = with_application(data, self._application)
            if mapping is None:
                return
            request = (
                client.create_async(path, mapping, makepath=True)
                if stat is None
                else client.set_async(path, mapping, stat.version)
            )
            if not failed(self.results([path], [request], end_ns)[path]):
                return
        raise self._conflict([path])


def _addresses(instances: Collection[ServiceInstance]) -> list[tuple[str, int]]:
    return list(dict.fromkeys((instance.host, instance.port) for instance in instances))


def _by_service(instances: Sequence[ServiceInstance]) -> dict[str, list[ServiceInstance]]:
    groups: dict[str, list[ServiceInstance]] = {}
    for instance in instances:
        groups.setdefault(instance.service, []).append(instance)
    return groups


_record_of: Final = lru_cache(CACHED_RECORDS)(record_of)


@lru_cache(CACHED_RECORDS)
def _address_of(name: str) -> str:
    return parsed(name)[1]


def _last_part(name: str) -> str:
    return name.rpartition(".")[2]


def _checked_level(url: RegistryUrl) -> str:
    """Return the level that a URL names; "" if it names none.

    Raises:
        ConfigurationError: It is not valid, or needs the name of the application.
    """
    level = url.options.get("level", "")
    if "level" in url.options and level not in LEVELS:
        raise ConfigurationError(f"{url}: level must be one of {', '.join(LEVELS)}, not {level!r}")
    if level == "both" and not url.options.get("application"):
        raise ConfigurationError(f"{url}: level={level} needs application=, the name of this one")
    return level


def _checked_interfaces(url: RegistryUrl) -> dict[str, str]:
    """Return the Java interfaces that a URL names, by their last part.

    Raises:
        ConfigurationError: An option is not valid.
    """
    if url.namespace != NAMESPACE:
        raise ConfigurationError(f"{url}: Dubbo's nodes are below root=, not namespace=")
    for option in ("root", "interface", "application"):
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
