"""`zookeeper://user:password@host:2181,host2:2181/shop.Orders`: instances as ephemeral nodes.

Each instance is the node `/{namespace}/v1/{service}/{id}`, which ZooKeeper deletes when the session
of the process that created it ends. The lease is the timeout of the session. The parent nodes are
persistent. `zookeepers://`, or `?tls=true`, uses TLS, with the files `ca`, `cert` and `key`. With
credentials (digest), created nodes can be read and changed only with the same credentials.

For ZooKeeper 3.4 and later. A server may raise the lease to two of its ticks, or lower it to 20.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Final
from urllib.parse import quote, unquote

from kazoo.exceptions import NoNodeError

from rpcwheel.instance import record_epoch

from .zookeeper_nodes import MAX_ATTEMPTS, ZookeeperNodes, failed, is_own, session_id

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kazoo.client import KazooClient

    from rpcwheel.instance import ServiceInstance
    from rpcwheel.registry.backend import Settings
    from rpcwheel.registry.url import RegistryUrl

    from .zookeeper_nodes import NodeReads


class ZookeeperBackend(ZookeeperNodes):
    """Instances of this package's own format."""

    def __init__(self, url: RegistryUrl, settings: Settings) -> None:
        super().__init__(url, settings)
        self._root = f"/{url.namespace}/v1"

    def publish(self, instances: Sequence[ServiceInstance]) -> None:
        client, end_ns = self._session.client(), self._session.end_ns()
        left = {self._path(instance): instance.encoded() for instance in instances}
        keys = (instance.key for instance in instances)
        self._published.update(dict.fromkeys(keys, session_id(client)))
        for path in left:
            self._verified.pop(path, None)
        for _ in range(MAX_ATTEMPTS):
            left = self._put(client, left, end_ns)
            if not left:
                self._session.accept_data(client)
                return
        raise self._conflict(left)

    def withdraw(self, instances: Sequence[ServiceInstance]) -> None:
        client, end_ns = self._session.client(), self._session.end_ns()
        epochs: dict[str, set[str]] = {}
        for instance in instances:
            epochs.setdefault(self._path(instance), set()).add(instance.epoch)
            self._published.pop(instance.key, None)
        for path in epochs:
            self._verified.pop(path, None)
        nodes = self._get(client, epochs, end_ns)
        versions = {
            path: stat.version
            for path, (data, stat) in nodes.items()
            if record_epoch(data) in epochs[path]
        }
        requests = [client.delete_async(path, version) for path, version in versions.items()]
        results = self.results(versions, requests, end_ns)
        left = [path for path, result in results.items() if failed(result, NoNodeError)]
        if left:
            raise self._conflict(left)

    def services(self) -> Sequence[str]:
        client, end_ns = self._session.client(), self._session.end_ns()
        names = self._list(client, self._root, end_ns)
        return self._with_children(client, {name: f"{self._root}/{name}" for name in names}, end_ns)

    def _read_records(self, service: str, reads: NodeReads) -> tuple[Mapping[str, bytes], bool]:
        directory = f"{self._root}/{service}"
        names = reads.children([directory])[directory]
        paths = {f"{directory}/{name}": name for name in names}
        # A node that other credentials protect is shown as a record that can't be decoded.
        nodes = reads.data(paths, protected=b"")
        return _by_ids({paths[path]: data for path, data in nodes.items()}), True

    # Publishing

    def _path(self, instance: ServiceInstance) -> str:
        return f"{self._root}/{instance.service}/{_name_of(instance.id)}"

    def _has_epoch_of(self, instance: ServiceInstance, data: bytes) -> bool:
        return record_epoch(data) == instance.epoch

    def _put(self, client: KazooClient, left: Mapping[str, bytes], end_ns: int) -> dict[str, bytes]:
        """Try to create these nodes, or to write to existing ones; returns the rest.

        Those of other sessions are replaced: the node of a session that has died would be deleted
        with it (Dubbo replaces it, too).
        """
        nodes = self._get(client, left, end_ns)
        requests = []
        for path, data in left.items():
            _, stat = nodes.get(path, (b"", None))
            if stat is None:
                requests.append(client.create_async(path, data, ephemeral=True))
            elif is_own(client, stat):
                requests.append(client.set_async(path, data, stat.version))
            else:
                transaction = client.transaction()
                transaction.delete(path, stat.version)
                transaction.create(path, data, ephemeral=True)
                requests.append(transaction.commit_async())
        results = self.results(left, requests, end_ns)
        self._ensure_parents(client, results, end_ns)
        return {path: data for path, data in left.items() if failed(results[path])}


SAFE: Final = ":@[]-_.~+=,;!$&'()*"
"""Characters that a node's name has unescaped, in addition to letters and digits."""

CACHED_IDS: Final = 16384
"""All ids of a service are needed at each full read. Unescaping one takes 2 to 9 us."""


def _name_of(instance: str) -> str:
    """Name the node of an instance; ZooKeeper refuses `.`, `..` and most non-ASCII characters."""
    name = quote(instance, safe=SAFE)
    return name if name.strip(".") else name.replace(".", "%2E")


@lru_cache(CACHED_IDS)
def _id_of(name: str) -> str:
    """Return the id in a node's name; a name that `_name_of` does not return is its own id."""
    instance = unquote(name)
    return instance if _name_of(instance) == name else name


def _by_ids(nodes: Mapping[str, bytes]) -> Mapping[str, bytes]:
    """Return the data by id; an id from `_id_of` takes precedence over an equal foreign name."""
    if "%" not in "".join(nodes):  # for large services: a generator would take 20 times as long
        return nodes
    ids = {name: _id_of(name) for name in nodes}
    ours = {id_: nodes[name] for name, id_ in ids.items() if id_ != name}
    return {name: nodes[name] for name, id_ in ids.items() if id_ == name} | ours
