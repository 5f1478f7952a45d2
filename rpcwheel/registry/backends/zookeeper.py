"""`zookeeper://user:password@host:2181,host2:2181/shop.Orders`: instances as ephemeral nodes.

Each instance is the node `/{namespace}/v1/{service}/{id}`, which ZooKeeper deletes when the session
of the process that created it ends. The lease is the timeout of the session. The parent nodes are
persistent. `zookeepers://`, or `?tls=true`, uses TLS, with the files `ca`, `cert` and `key`. With
credentials (digest), created nodes can be read and changed only with the same credentials.

kazoo keeps the session alive. `renew` therefore only checks that the nodes are there. It leaves a
data watch on each of them, so a node is read again only if its watch has fired, if the connection
was lost since, or at every `FULL_EVERY`-th renewal.

The watches are ZooKeeper's own one-shot watches, set again with the read that they lead to. kazoo's
`DataWatch` and `ChildrenWatch` (2.11) were measured: with 2,000 nodes they take 4 times as long to
start, and one thread for each node after each reconnect; `ChildrenWatch` ends for good when its
node is deleted.

For ZooKeeper 3.4 and later. A server may raise the lease to two of its ticks, or lower it to 20.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote, unquote

from kazoo.exceptions import (
    KazooException,
    NoAuthError,
    NodeExistsError,
    NoNodeError,
    NotEmptyError,
    RolledBackError,
    RuntimeInconsistency,
)
from kazoo.protocol.states import EventType, KeeperState, WatchedEvent

from rpcwheel.errors import RegistryClosed, RegistryRefused, RegistryUnavailable
from rpcwheel.instance import record_epoch
from rpcwheel.registry.backend import RegistryBackend, View

from .polling import PollingWatcher
from .zookeeper_session import ZooKeeperSession, check_url, registry_error

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from kazoo.client import KazooClient

    from rpcwheel.instance import ServiceInstance
    from rpcwheel.registry.backend import Lost, Settings, Watch, Watcher
    from rpcwheel.registry.url import RegistryUrl

FULL_EVERY: Final = 120
"""Renewals, each a third of a lease after the other, until all is read again although no watch has
fired: 40 leases, 10 minutes by default. Watched services are read as often. A safety net only: it
costs a request for each node, so that the idle load grows with services times processes."""

MAX_ATTEMPTS: Final = 5
"""The largest number of attempts to publish a node that others change at the same time."""


LIST: Final = ""
"""Stands for the list of a service's nodes, among the names of nodes whose watch has fired."""


@dataclass(frozen=True, slots=True)
class _NodesView(View):
    """A view that also has the data by the nodes' names, for the next read."""

    nodes: Mapping[str, bytes] = field(default_factory=dict)


class ZookeeperBackend(RegistryBackend):
    """One session with ZooKeeper, by kazoo. Thread-safe.

    While it is open there are three threads of kazoo's. In a forked child it starts again, with
    another session and without watches.
    """

    keeps_alive = True

    def __init__(self, url: RegistryUrl, settings: Settings) -> None:
        super().__init__(url, settings)
        check_url(url)
        self._root = f"/{url.namespace}/v1"
        self._session = ZooKeeperSession(url, settings, self._contact_changed)
        self._polling = PollingWatcher(
            url,
            self._read_watched,
            timer=settings.timer,
            period_s=settings.lease_s / 3,
            retry_s=settings.lease_s / 3,
            full_every=FULL_EVERY,
        )
        self._published: dict[str, int] = {}  # session by path
        # Nodes that were ours when they were read, and whose watch has not fired: by path, the
        # connection of the watch, and the epoch.
        self._verified: dict[str, tuple[int, str]] = {}
        self._renewals = 0
        # Names of nodes whose watch has fired, by service. Not locked: kazoo's thread adds names,
        # and `_read_watched` takes them out one by one.
        self._fired: dict[str, set[str]] = {}

    def publish(self, instances: Sequence[ServiceInstance]) -> None:
        client, end_ns = self._session.client(), self._session.end_ns()
        left = {self._path(instance): instance.encoded() for instance in instances}
        self._published.update(dict.fromkeys(left, _session_id(client)))
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
        for path in epochs:
            self._published.pop(path, None)
            self._verified.pop(path, None)
        nodes = self._get(client, epochs, end_ns)
        versions = {
            path: stat.version
            for path, (data, stat) in nodes.items()
            if record_epoch(data) in epochs[path]
        }
        requests = [client.delete_async(path, version) for path, version in versions.items()]
        results = self._results(versions, requests, end_ns)
        left = [path for path, result in results.items() if _failed(result, NoNodeError)]
        if left:
            raise self._conflict(left)

    def renew(self, instances: Collection[ServiceInstance]) -> Mapping[tuple[str, str], Lost]:
        client, connection = self._session.client(), self._session.connection
        self._renewals += 1
        if self._renewals % FULL_EVERY == 0:
            self._verified.clear()
        paths = {self._path(instance): instance for instance in instances}
        unverified = {
            path: instance
            for path, instance in paths.items()
            if self._verified.get(path) != (connection, instance.epoch)
        }
        if not unverified:
            return {}
        # Before the reads, as a watch may fire before its read returns.
        self._verified |= {
            path: (connection, instance.epoch) for path, instance in unverified.items()
        }
        lost: dict[tuple[str, str], Lost] = {}
        try:
            nodes = self._get(client, unverified, self._session.end_ns(), self._own_node_changed)
        except BaseException:
            self._verified.clear()
            raise
        for path, instance in unverified.items():
            data, stat = nodes.get(path, (b"", None))
            owner = stat and stat.ephemeralOwner
            if owner != _session_id(client) or record_epoch(data) != instance.epoch:
                self._verified.pop(path, None)
                lost[instance.key] = self._why_lost(client, path)
        return lost

    def lookup(self, service: str) -> View:
        client, end_ns = self._session.client(), self._session.end_ns()
        names = self._list(client, f"{self._root}/{service}", end_ns)
        return View(_by_ids(self._read(client, service, names, end_ns)), client.last_zxid)

    def services(self) -> Sequence[str]:
        client, end_ns = self._session.client(), self._session.end_ns()
        names = self._list(client, self._root, end_ns)
        requests = [client.exists_async(f"{self._root}/{name}") for name in names]
        stats = self._session.results(requests, end_ns)
        return sorted(
            name
            for name, stat in zip(names, stats, strict=True)
            if stat is not None and not isinstance(stat, KazooException) and stat.numChildren
        )

    def watch(self, service: str, watcher: Watcher) -> Watch:
        if self._session.closed:
            raise RegistryClosed(f"{self.url}: this registry was closed")
        return self._polling.watch(service, watcher)

    def close(self) -> None:
        self._polling.close()
        self._session.close()

    # On threads of kazoo's: nothing here blocks

    def _contact_changed(self, reason: str | None) -> None:
        if reason is None:
            self._polling.request_read()
        else:
            self._polling.report_contact_lost(reason)

    def _own_node_changed(self, event: WatchedEvent) -> None:
        if event.type != EventType.NONE:  # NONE: connection lost, which the session reports
            self._verified.pop(event.path, None)

    def _watch_fired(self, event: WatchedEvent) -> None:
        if event.type != EventType.NONE:
            service, _, name = event.path.removeprefix(f"{self._root}/").partition("/")
            self._fired.setdefault(service, set()).add(name or LIST)
            self._polling.request_read(service)

    # Reading services

    def _read_watched(self, service: str, previous: View | None) -> View:
        """Read what has changed since `previous` (None: everything), and set watches on it."""
        client, end_ns = self._session.client(), self._session.end_ns()
        marked, fired = self._fired.setdefault(service, set()), set()
        while marked:
            fired.add(marked.pop())
        before: Mapping[str, bytes] = previous.nodes if isinstance(previous, _NodesView) else {}
        if previous is None:
            fired.add(LIST)
        elif not fired:
            return previous
        names = fired
        if LIST in fired:
            names = self._list(client, f"{self._root}/{service}", end_ns, self._watch_fired)
            fired |= names ^ before.keys()
        fired.discard(LIST)
        read = self._read(client, service, fired & names, end_ns, self._watch_fired)
        nodes = {**before, **read}
        for name in fired - read.keys():
            nodes.pop(name, None)
        changed = None
        if previous is not None:
            differ = (name for name in fired if before.get(name) != nodes.get(name))
            changed = frozenset(map(_id_of, differ))
        return _NodesView(_by_ids(nodes), client.last_zxid, changed, nodes)

    def _list(
        self,
        client: KazooClient,
        path: str,
        end_ns: int,
        watch: Callable[[WatchedEvent], None] | None = None,
    ) -> set[str]:
        """List the children of a node; none if it does not exist."""
        names = self._results([path], [client.get_children_async(path, watch)], end_ns)[path]
        if not isinstance(names, NoNodeError):
            return set(names)
        if watch is not None:  # only this request leaves a watch on a node that does not exist
            (stat,) = self._session.results([client.exists_async(path, watch)], end_ns)
            if stat is not None:  # it was created in between
                watch(WatchedEvent(EventType.CREATED, KeeperState.CONNECTED, path))
        return set()

    def _read(
        self,
        client: KazooClient,
        service: str,
        names: Collection[str],
        end_ns: int,
        watch: Callable[[WatchedEvent], None] | None = None,
    ) -> dict[str, bytes]:
        """Read the data of a service's nodes that exist, by their names."""
        requests = [client.get_async(f"{self._root}/{service}/{name}", watch) for name in names]
        return {
            # a node that other credentials protect is shown as a record that can't be decoded
            name: b"" if isinstance(result, NoAuthError) else bytes(result[0] or b"")
            for name, result in zip(names, self._session.results(requests, end_ns), strict=True)
            if not isinstance(result, NoNodeError)
        }

    # Publishing

    def _path(self, instance: ServiceInstance) -> str:
        return f"{self._root}/{instance.service}/{_name_of(instance.id)}"

    def _why_lost(self, client: KazooClient, path: str) -> Lost:
        if self._session.has_lost_data(client):
            return "wiped"
        session = _session_id(client)
        return "missing" if self._published.get(path, session) == session else "session"

    def _get(
        self,
        client: KazooClient,
        paths: Collection[str],
        end_ns: int,
        watch: Callable[[WatchedEvent], None] | None = None,
    ) -> dict[str, tuple[bytes, Any]]:
        """Read data and stat of the nodes that exist."""
        requests = [client.get_async(path, watch) for path in paths]
        return {
            path: (bytes(result[0] or b""), result[1])
            for path, result in self._results(paths, requests, end_ns).items()
            if not isinstance(result, NoNodeError)
        }

    def _put(self, client: KazooClient, left: Mapping[str, bytes], end_ns: int) -> dict[str, bytes]:
        """Try to create or replace these nodes; returns those that could not be."""
        requests = [client.create_async(path, data, ephemeral=True) for path, data in left.items()]
        results = self._results(left, requests, end_ns)
        parents = {
            path.rpartition("/")[0]
            for path, result in results.items()
            if isinstance(result, NoNodeError)
        }
        self._results(parents, [client.ensure_path_async(path) for path in parents], end_ns)
        taken = {
            path: left[path]
            for path, result in results.items()
            if isinstance(result, NodeExistsError)
        }
        replaced = self._replace(client, taken, end_ns)
        return {
            path: data
            for path, data in left.items()
            if _failed(results[path]) and path not in replaced
        }

    def _replace(self, client: KazooClient, taken: Mapping[str, bytes], end_ns: int) -> set[str]:
        """Write to our own nodes, and replace those of other sessions; returns what succeeded.

        The node of a session that has died would be deleted with it (Dubbo replaces it, too).
        """
        nodes = self._get(client, taken, end_ns)
        requests = []
        for path, (_, stat) in nodes.items():
            if stat.ephemeralOwner == _session_id(client):
                requests.append(client.set_async(path, taken[path], stat.version))
            else:
                transaction = client.transaction()
                transaction.delete(path, stat.version)
                transaction.create(path, taken[path], ephemeral=True)
                requests.append(transaction.commit_async())
        results = self._results(nodes, requests, end_ns)
        return {path for path, result in results.items() if not _failed(result)}

    def _results(
        self, paths: Collection[str], requests: Sequence[Any], end_ns: int
    ) -> dict[str, Any]:
        """Wait for the results, by path; raises for errors that no further attempt can change."""
        results = dict(zip(paths, self._session.results(requests, end_ns), strict=True))
        for path, result in results.items():
            error = _first_error(result) if isinstance(result, list) else result
            if isinstance(error, NoAuthError):
                raise registry_error(self.url, error) from error
            if isinstance(error, NotEmptyError):
                raise RegistryRefused(
                    f"{self.url}: {path} is another's node, with nodes under it; delete them"
                )
            results[path] = result if error is None else error
        return results

    def _conflict(self, paths: Collection[str]) -> RegistryUnavailable:
        return RegistryUnavailable(f"{self.url}: others change the same nodes: {', '.join(paths)}")


def _failed(result: Any, allowed: type[KazooException] | tuple[()] = ()) -> bool:
    return isinstance(result, KazooException) and not isinstance(result, allowed)


def _first_error(results: list[Any]) -> KazooException | None:
    """Find the error that ended a transaction; the others only say that they were rolled back."""
    errors = [result for result in results if isinstance(result, KazooException)]
    causes = [
        result
        for result in errors
        if not isinstance(result, (RolledBackError, RuntimeInconsistency))
    ]
    return next(iter(causes + errors), None)


def _session_id(client: KazooClient) -> int:
    """Return the id of the client's session, or 0, which no session has."""
    session = client.client_id
    return int(session[0]) if session else 0


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
