"""What the backends with nodes in ZooKeeper have in common: renewals, watches, and requests.

Each published instance is one ephemeral node. A backend decides on its path and its contents.

kazoo keeps the session alive. `renew` therefore only checks that the nodes are there. It leaves a
data watch on each of them, so a node is read again only if its watch has fired, if the connection
was lost since, or at every `FULL_EVERY`-th renewal.

The watches are ZooKeeper's own one-shot watches, set again with the read that they lead to. kazoo's
`DataWatch` and `ChildrenWatch` (2.11) were measured: with 2,000 nodes they take 4 times as long to
start, and one thread for each node after each reconnect; `ChildrenWatch` ends for good when its
node is deleted.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Final
from weakref import WeakValueDictionary

from kazoo.exceptions import (
    KazooException,
    NoAuthError,
    NoNodeError,
    NotEmptyError,
    RolledBackError,
    RuntimeInconsistency,
)
from kazoo.protocol.states import EventType, KeeperState, WatchedEvent

from rpcwheel.errors import RegistryClosed, RegistryRefused, RegistryUnavailable
from rpcwheel.registry.backend import RegistryBackend, View
from rpcwheel.registry.cache import changed_ids

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


@dataclass(frozen=True, slots=True)
class NodesView(View):
    """A view that also has the nodes from which it was made, for the next read."""

    nodes: Mapping[str, Any] = field(default_factory=dict)
    """`NodeReads.nodes`."""
    is_complete: bool = True
    """False if something is missing; it is read again later."""
    watch: object = None
    """The callback of the watches, which must last until the next read."""


class ZookeeperNodes(RegistryBackend):
    """One session with ZooKeeper, by kazoo. Thread-safe.

    While it is open there are three threads of kazoo's. In a forked child it starts again, with
    another session and without watches.
    """

    keeps_alive = True
    own_options: ClassVar[tuple[str, ...]] = ()
    """Options of URLs, beside those of TLS."""

    def __init__(self, url: RegistryUrl, settings: Settings) -> None:
        super().__init__(url, settings)
        check_url(url, *self.own_options)
        self._session = ZooKeeperSession(url, settings, self._contact_changed)
        self._polling = PollingWatcher(
            url,
            self._read_watched,
            timer=settings.timer,
            period_s=settings.lease_s / 3,
            retry_s=settings.lease_s / 3,
            full_every=FULL_EVERY,
        )
        self._published: dict[tuple[str, str], int] = {}  # session by the key of the instance
        # Nodes that were ours when they were read, and whose watch has not fired: by path, the
        # connection of the watch, and the epoch.
        self._verified: dict[str, tuple[int, str]] = {}
        self._renewals = 0
        self._watches = WeakValueDictionary[str, partial[None]]()
        """The callback of the watches of each service, the same while a view or kazoo has it: kazoo
        calls equal ones once."""

    # For subclasses to override

    @abstractmethod
    def _path(self, instance: ServiceInstance) -> str:
        """Return the path of the node of an instance."""

    @abstractmethod
    def _has_epoch_of(self, instance: ServiceInstance, data: bytes) -> bool:
        """Whether the data of the node at the path of an instance has the epoch of the instance."""

    @abstractmethod
    def _read_records(self, service: str, reads: NodeReads) -> tuple[Mapping[str, bytes], bool]:
        """Read the records of a service, by id; and return whether nothing is missing."""

    # The contract

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
            is_held = stat is not None and is_own(client, stat)
            if not is_held or not self._has_epoch_of(instance, data):
                self._verified.pop(path, None)
                lost[instance.key] = self._why_lost(client, instance)
        return lost

    def lookup(self, service: str) -> View:
        client, end_ns = self._session.client(), self._session.end_ns()
        records, _ = self._read_records(service, NodeReads(self, client, end_ns))
        return View(records, client.last_zxid)

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

    def _watch_fired(self, service: str, fired: set[str], event: WatchedEvent) -> None:
        if event.type != EventType.NONE:
            fired.add(event.path)
            self._polling.request_read(service)

    # Watches

    def _read_watched(self, service: str, previous: View | None) -> View:
        """Read what has changed since `previous` (None: everything), and set watches on it."""
        client, end_ns = self._session.client(), self._session.end_ns()
        watch = self._watches.setdefault(service, partial(self._watch_fired, service, set()))
        fired = _take_all(watch.args[1])
        unchanged: Mapping[str, Any] = {}
        if isinstance(previous, NodesView):
            if previous.is_complete and not fired:
                return previous
            unchanged = {path: node for path, node in previous.nodes.items() if path not in fired}
        reads = NodeReads(self, client, end_ns, watch=watch, unchanged=unchanged)
        records, is_complete = self._read_records(service, reads)
        changed = None if previous is None else changed_ids(previous.records, records)
        return NodesView(records, client.last_zxid, changed, reads.nodes, is_complete, watch)

    # Requests

    def _list(self, client: KazooClient, path: str, end_ns: int) -> set[str]:
        """List the children of a node; none if it does not exist."""
        names = self.results([path], [client.get_children_async(path)], end_ns)[path]
        return set() if isinstance(names, NoNodeError) else set(names)

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
            for path, result in self.results(paths, requests, end_ns).items()
            if not isinstance(result, NoNodeError)
        }

    def _ensure_parents(self, client: KazooClient, results: Mapping[str, Any], end_ns: int) -> None:
        """Create the parents of nodes that could not be created without them."""
        missing = [path for path, result in results.items() if isinstance(result, NoNodeError)]
        parents = {path.rpartition("/")[0] for path in missing}
        self.results(parents, [client.ensure_path_async(path) for path in parents], end_ns)

    def _with_children(
        self, client: KazooClient, paths: Mapping[str, str], end_ns: int
    ) -> list[str]:
        """Return the names whose nodes, the values, have children; sorted."""
        requests = [client.exists_async(path) for path in paths.values()]
        stats = self._session.results(requests, end_ns)
        return sorted(
            name
            for name, stat in zip(paths, stats, strict=True)
            if stat is not None and not isinstance(stat, KazooException) and stat.numChildren
        )

    def results(
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

    def _why_lost(self, client: KazooClient, instance: ServiceInstance) -> Lost:
        if self._session.has_lost_data(client):
            return "wiped"
        session = session_id(client)
        return "missing" if self._published.get(instance.key, session) == session else "session"

    def _conflict(self, paths: Collection[str]) -> RegistryUnavailable:
        return RegistryUnavailable(f"{self.url}: others change the same nodes: {', '.join(paths)}")


class NodeReads:
    """The nodes from which one view of a service is made.

    With a watch, the next view can take those nodes from this one whose watch has not fired.
    """

    def __init__(
        self,
        backend: ZookeeperNodes,
        client: KazooClient,
        end_ns: int,
        *,
        watch: Callable[[WatchedEvent], None] | None = None,
        unchanged: Mapping[str, Any] | None = None,
    ) -> None:
        """Read nothing yet; give up at `end_ns`. `watch` is left on each node that is read.

        `unchanged` has the `nodes` of an earlier view, without those whose watch has fired.
        """
        self._backend = backend
        self._client = client
        self.end_ns = end_ns
        self._watch = watch
        self._unchanged = unchanged or {}
        self.nodes: dict[str, Any] = {}
        """The names of children, or the data, by path; None: there is no such node."""

    def children(self, paths: Collection[str]) -> dict[str, frozenset[str]]:
        """Return the names of the children of these nodes, by path; none of missing nodes."""
        listed = self._read(paths, self._client.get_children_async)
        return {path: frozenset(names or ()) for path, names in listed.items()}

    def data(self, paths: Collection[str], *, protected: bytes | None = None) -> dict[str, bytes]:
        """Return the data of those of these nodes that exist, by path.

        `protected`: the data of nodes that other credentials protect; None: they are an error.
        """
        stand_in = None if protected is None else (protected, None)
        read = self._read(paths, self._client.get_async, stand_in)
        return {path: bytes(result[0] or b"") for path, result in read.items() if result}

    def _read(
        self, paths: Collection[str], request: Callable[..., Any], protected: object = None
    ) -> dict[str, Any]:
        new = [path for path in paths if path not in self._unchanged]
        read = {path: self._unchanged.get(path) for path in paths}
        read |= self._request(new, request, protected)
        # Without a watch on a protected node, it has to be read for each view.
        self.nodes |= {
            path: node for path, node in read.items() if node is None or node is not protected
        }
        return read

    def _request(
        self, paths: Collection[str], request: Callable[..., Any], protected: object
    ) -> dict[str, Any]:
        """Send a request for each path, which leaves the watch; None: there is no such node.

        `protected`, if given, is the result for a node that other credentials protect.
        """
        requests = [request(path, self._watch) for path in paths]
        if protected is None:
            results = self._backend.results(paths, requests, self.end_ns)
        else:
            answers = self._backend._session.results(requests, self.end_ns)  # noqa: SLF001 - of this module
            results = {
                path: protected if isinstance(answer, NoAuthError) else answer
                for path, answer in zip(paths, answers, strict=True)
            }
        missing = [path for path, result in results.items() if isinstance(result, NoNodeError)]
        if missing and self._watch is not None:
            self._watch_missing(missing, self._watch)
        return results | dict.fromkeys(missing)

    def _watch_missing(self, paths: Collection[str], watch: Callable[[WatchedEvent], None]) -> None:
        """Leave a watch on nodes that do not exist, which no other request does."""
        requests = [self._client.exists_async(path, watch) for path in paths]
        for path, stat in self._backend.results(paths, requests, self.end_ns).items():
            if stat is not None:  # it was created in between
                watch(WatchedEvent(EventType.CREATED, KeeperState.CONNECTED, path))


def failed(result: Any, allowed: type[KazooException] | tuple[()] = ()) -> bool:
    """Whether the result of a request is an error, and none of those that are allowed."""
    return isinstance(result, KazooException) and not isinstance(result, allowed)


def session_id(client: KazooClient) -> int:
    """Return the id of the client's session, or 0, which no session has."""
    session = client.client_id
    return int(session[0]) if session else 0


def is_own(client: KazooClient, stat: Any) -> bool:
    """Whether a node with this stat belongs to the session of the client."""
    return bool(stat.ephemeralOwner == session_id(client))


def _take_all(paths: set[str]) -> set[str]:
    """Empty a set without a lock: kazoo's thread may add to it meanwhile."""
    taken = set()
    while paths:
        taken.add(paths.pop())
    return taken


def _first_error(results: list[Any]) -> KazooException | None:
    """Find the error that ended a transaction; the others only say that they were rolled back."""
    errors = [result for result in results if isinstance(result, KazooException)]
    causes = [
        result
        for result in errors
        if not isinstance(result, (RolledBackError, RuntimeInconsistency))
    ]
    return next(iter(causes + errors), None)
