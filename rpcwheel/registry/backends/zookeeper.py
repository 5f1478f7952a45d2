"""`zookeeper://user:password@host:2181,host2:2181/shop.Orders`: instances as ephemeral nodes.

Each is a node `/{namespace}/v1/{service}/{id}` of this process's session, whose timeout is the
lease; ZooKeeper deletes it when the session ends. kazoo keeps the session alive, so that renewing
is only looking. The parents stay. `zookeepers://`, or `?tls=true`, is over TLS, with `ca`, `cert`
and `key` as files. With credentials (digest), what is created can be read and changed with the same
ones only.

Made for ZooKeeper 3.4 and later; a server may raise the lease to two of its ticks, or cut it to 20.

"""

from __future__ import annotations

import json
import threading
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, Final
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
from kazoo.protocol.states import EventType

from rpcwheel.errors import RegistryClosed, RegistryRefused, RegistryUnavailable
from rpcwheel.registry.backend import RegistryBackend, View

from .polling import PollingWatcher
from .zookeeper_session import SCHEMES, Session, checked_url, refusal

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from kazoo.client import KazooClient
    from kazoo.protocol.states import WatchedEvent

    from rpcwheel.instance import ServiceInstance
    from rpcwheel.registry.backend import Lost, Settings, Watch, Watcher
    from rpcwheel.registry.url import RegistryUrl


__all__ = ["Paths", "Reader", "ZookeeperBackend", "epoch_of"]


LOOK_LEASES: Final = 4

"""Leases between looks at everything, though nothing seems to have changed: 60 s by default."""

MOST_ROUNDS: Final = 5

"""Tries to have a node that others write too."""


class ZookeeperBackend(RegistryBackend):
    """One session with ZooKeeper, by kazoo. Thread-safe.

    Threads: three of kazoo's while it is open, which only post to
    `rpcwheel._concurrency.executor.EXECUTOR`. In a forked child it begins anew, without a session
    and watches.
    """

    schemes: ClassVar[tuple[str, ...]] = SCHEMES
    keeps_alive = True

    def __init__(self, url: RegistryUrl, settings: Settings) -> None:
        super().__init__(url, settings)
        checked_url(url)
        self._paths = Paths(url.namespace)
        self._session = Session(url, settings, self._contact_changed)
        self._reader = Reader(url, self._session, self._look)
        self._polling = PollingWatcher(
            self._reader.follow,
            timer=settings.timer,
            period_s=LOOK_LEASES * settings.lease_s,
            retry_s=settings.lease_s / 3,
        )
        self._published: dict[str, int] = {}  # session by path

    def publish(self, instances: Sequence[ServiceInstance]) -> None:
        client, end_ns = self._session.client(), self._session.end_ns()
        left = {self._path(one): one.encoded() for one in instances}
        self._published.update(dict.fromkeys(left, _id_of(client)))
        for _ in range(MOST_ROUNDS):
            left = self._put(client, left, end_ns)
            if not left:
                self._session.believe(client)
                return
        raise RegistryUnavailable(f"{self.url}: others change the same nodes: {', '.join(left)}")

    def withdraw(self, instances: Sequence[ServiceInstance]) -> None:
        client, end_ns = self._session.client(), self._session.end_ns()
        left = {self._path(one): one.epoch for one in instances}
        for path in left:
            self._published.pop(path, None)
        for _ in range(MOST_ROUNDS):
            there = self._get(client, left, end_ns)
            ours = [path for path, found in there.items() if epoch_of(found[0]) == left[path]]
            asked = [client.delete_async(path, there[path][1].version) for path in ours]
            results = dict(zip(ours, self._session.gathered(asked, end_ns), strict=True))
            self._check(results)
            left = {
                path: left[path]
                for path, result in results.items()
                if isinstance(result, KazooException) and not isinstance(result, NoNodeError)
            }
            if not left:
                return
        raise RegistryUnavailable(f"{self.url}: others change the same nodes: {', '.join(left)}")

    def renew(self, instances: Collection[ServiceInstance]) -> Mapping[tuple[str, str], Lost]:
        client = self._session.client()
        paths = {self._path(one): one for one in instances}
        there = self._get(client, paths, self._session.end_ns())
        session = _id_of(client)
        lost: dict[tuple[str, str], Lost] = {}
        for path, one in paths.items():
            data, stat = there.get(path, (b"", None))
            if stat is None or stat.ephemeralOwner != session or epoch_of(data) != one.epoch:
                lost[one.key] = self._why(client, path, session)
        return lost

    def lookup(self, service: str) -> View:
        return self._reader.read(service)

    def services(self) -> Sequence[str]:
        client, end_ns = self._session.client(), self._session.end_ns()
        (names,) = self._session.gathered([client.get_children_async(self._paths.root)], end_ns)
        self._check({self._paths.root: names})
        if isinstance(names, NoNodeError):
            return []
        asked = [client.exists_async(self._paths.service(name)) for name in names]
        stats = self._session.gathered(asked, end_ns)
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

    def _contact_changed(self, reason: str | None) -> None:
        """On EXECUTOR."""
        self._reader.forget()
        if reason is None:
            self._polling.request_read()
        else:
            self._polling.report_contact_lost(reason)

    def _look(self, service: str) -> None:
        self._polling.request_read(service)

    def _path(self, instance: ServiceInstance) -> str:
        return self._paths.node(*instance.key)

    def _why(self, client: KazooClient, path: str, session: int) -> Lost:
        """Why what was published there is not."""
        if self._session.lost_memory(client):
            return "wiped"
        return "missing" if self._published.get(path, session) == session else "session"

    def _get(
        self, client: KazooClient, paths: Collection[str], end_ns: int
    ) -> dict[str, tuple[bytes, Any]]:
        """Data and stat of those that are there."""
        asked = [client.get_async(path) for path in paths]
        found = dict(zip(paths, self._session.gathered(asked, end_ns), strict=True))
        self._check(found)
        return {
            path: (bytes(result[0] or b""), result[1])
            for path, result in found.items()
            if not isinstance(result, NoNodeError)
        }

    def _put(self, client: KazooClient, left: Mapping[str, bytes], end_ns: int) -> dict[str, bytes]:
        """Try to have these nodes; those that could not be had are left."""
        asked = [client.create_async(path, data, ephemeral=True) for path, data in left.items()]
        results = dict(zip(left, self._session.gathered(asked, end_ns), strict=True))
        self._check(results)
        if any(isinstance(result, NoNodeError) for result in results.values()):
            self._make_parents(client, left, end_ns)
        taken = [path for path, result in results.items() if isinstance(result, NodeExistsError)]
        replaced = self._replace(client, {path: left[path] for path in taken}, end_ns)
        return {
            path: data
            for path, data in left.items()
            if isinstance(results[path], KazooException) and path not in replaced
        }

    def _replace(self, client: KazooClient, taken: Mapping[str, bytes], end_ns: int) -> set[str]:
        """Put data in our own nodes, and ours in place of another session's; gives those it has.

        A node of a dead session would go with it later (Dubbo deletes and creates too).
        """
        there = self._get(client, taken, end_ns)
        asked = []
        for path, (_, stat) in there.items():
            if stat.ephemeralOwner == _id_of(client):
                asked.append(client.set_async(path, taken[path], stat.version))
            else:
                both = client.transaction()
                both.delete(path, stat.version)
                both.create(path, taken[path], ephemeral=True)
                asked.append(both.commit_async())
        results = dict(zip(there, self._session.gathered(asked, end_ns), strict=True))
        errors = {
            path: _first_error(result) if isinstance(result, list) else result
            for path, result in results.items()
        }
        self._check(errors)
        return {path for path, error in errors.items() if not isinstance(error, KazooException)}

    def _make_parents(self, client: KazooClient, paths: Collection[str], end_ns: int) -> None:
        """Make the nodes above these, which stay."""
        parents = sorted({path.rpartition("/")[0] for path in paths})
        refused: list[NoAuthError] = []
        made: dict[str, Any] = {}
        for depth in range(2, 5):
            level = sorted({"/".join(parent.split("/")[:depth]) for parent in parents})
            asked = [client.create_async(parent) for parent in level]
            made = dict(zip(level, self._session.gathered(asked, end_ns), strict=True))
            refused += [result for result in made.values() if isinstance(result, NoAuthError)]
        self._check(made)
        if refused and any(isinstance(result, NoNodeError) for result in made.values()):
            raise refusal(self.url, refused[0])  # else it was there, and only not ours to make

    def _check(self, results: Mapping[Any, Any]) -> None:
        """Raise what no further try can change."""
        for path, result in results.items():
            if isinstance(result, NoAuthError):
                raise refusal(self.url, result) from result
            if isinstance(result, NotEmptyError):
                raise RegistryRefused(
                    f"{self.url}: {path} is another's node, with nodes under it; delete them"
                )


def _first_error(results: list[Any]) -> KazooException | None:
    """Of a transaction: the one that ended it; the others say that they were rolled back."""
    errors = [one for one in results if isinstance(one, KazooException)]
    causes = [one for one in errors if not isinstance(one, (RolledBackError, RuntimeInconsistency))]
    return next(iter(causes + errors), None)


def _id_of(client: KazooClient) -> int:
    """Of its session; none has 0."""
    session = client.client_id
    return int(session[0]) if session else 0


SAFE: Final = ":@[]-_.~+=,;!$&'()*"

"""What stands for itself in a node's name, beside letters and digits."""


MOST_IDS: Final = 16384

"""Remembered, as all are asked for at each change; a few MB. Working one out takes 2 to 9 us."""


class Paths:
    """Which node is whose."""

    def __init__(self, namespace: str) -> None:
        self.root = f"/{namespace}/v1"

    def service(self, service: str) -> str:
        return f"{self.root}/{service}"

    def node(self, service: str, instance: str) -> str:
        return f"{self.root}/{service}/{_name(instance)}"


def _name(instance: str) -> str:
    """Of a node; ZooKeeper takes neither `.` nor `..` nor most of what is not ASCII."""
    name = quote(instance, safe=SAFE)
    return name if name.strip(".") else name.replace(".", "%2E")


@lru_cache(MOST_IDS)
def _id(name: str) -> str:
    """The id that a node's name stands for; a foreign name stands for itself."""
    instance = unquote(name)
    return instance if _name(instance) == name else name


def epoch_of(data: bytes) -> str | None:
    """The epoch in a record; None if it is no record."""
    try:
        record = json.loads(data)
    except ValueError:
        return None
    epoch = record.get("epoch") if isinstance(record, dict) else None
    return epoch if isinstance(epoch, str) else None


class _Known:
    """A service that is watched: what was read, by the nodes' names, and what of it is stale."""

    def __init__(self) -> None:
        self.records: dict[str, bytes] = {}
        self.all_stale = True
        self.names_stale = True
        self.stale: set[str] = set()


class Reader:
    """Reads services: `follow` one call at a time, the rest from any thread."""

    def __init__(self, url: RegistryUrl, session: Session, look: Callable[[str], None]) -> None:
        """Take note.

        Args:
            url: Where they are.
            session: That they are read in.
            look: Told, on a thread of kazoo's, which service has changed.
        """
        self._url = url
        self._paths = Paths(url.namespace)
        self._session = session
        self._look = look
        self._lock = threading.Lock()
        self._known: dict[str, _Known] = {}

    def forget(self) -> None:
        """All watches are gone: read everything again."""
        with self._lock:
            self._known.clear()

    def read(self, service: str) -> View:
        """All records, without watching them."""
        client, end_ns = self._session.client(), self._session.end_ns()
        names = self._names(client, service, end_ns, watch=None)
        return _view(client, self._records(client, service, names, end_ns, watch=None))

    def follow(self, service: str, view: View | None) -> View:
        """All records, watched; only what has changed is read again, but without a view all."""
        client, end_ns = self._session.client(), self._session.end_ns()
        fresh = _Known()
        fresh.all_stale = fresh.names_stale = False
        with self._lock:
            known = self._known.get(service, _Known()) if view is not None else _Known()
            self._known[service] = fresh  # what changes from here on is for the next time
        try:
            names = set(known.records)
            if known.all_stale or known.names_stale:
                names = self._names(client, service, end_ns, watch=self._parent_changed)
            wanted = (
                names if known.all_stale else names - known.records.keys() | names & known.stale
            )
            read = self._records(client, service, wanted, end_ns, watch=self._node_changed)
        except BaseException:
            with self._lock:
                self._known.pop(service, None)  # nobody knows what was read: all, next time
            raise
        unread = names - wanted  # once: it is as long as the service
        kept = {name: data for name, data in known.records.items() if name in unread}
        fresh.records = kept | read
        return _view(client, fresh.records)

    def _names(
        self,
        client: KazooClient,
        service: str,
        end_ns: int,
        watch: Callable[[WatchedEvent], None] | None,
    ) -> set[str]:
        path = self._paths.service(service)
        for _ in range(MOST_ROUNDS):
            (names,) = self._session.gathered([client.get_children_async(path, watch)], end_ns)
            if isinstance(names, NoAuthError):
                raise refusal(self._url, names) from names
            if not isinstance(names, NoNodeError):
                return set(names)
            if watch is None:
                return set()
            (there,) = self._session.gathered([client.exists_async(path, watch)], end_ns)
            if there is None:
                return set()
        raise RegistryUnavailable(f"{self._url}: the node {path} comes and goes")

    def _records(
        self,
        client: KazooClient,
        service: str,
        names: Collection[str],
        end_ns: int,
        watch: Callable[[WatchedEvent], None] | None,
    ) -> dict[str, bytes]:
        parent = self._paths.service(service)
        asked = [client.get_async(f"{parent}/{name}", watch) for name in names]
        found = zip(names, self._session.gathered(asked, end_ns), strict=True)
        return {
            # what others' credentials hide is a record that can't be read
            name: b"" if isinstance(result, NoAuthError) else bytes(result[0] or b"")
            for name, result in found
            if not isinstance(result, NoNodeError)
        }

    # On a thread of kazoo's

    def _parent_changed(self, event: WatchedEvent) -> None:
        if event.type != EventType.NONE:  # of the session, which tells it itself
            service = event.path.rpartition("/")[2]
            with self._lock:
                if service in self._known:
                    self._known[service].names_stale = True
            self._look(service)

    def _node_changed(self, event: WatchedEvent) -> None:
        if event.type != EventType.NONE:
            parent, _, name = event.path.rpartition("/")
            service = parent.rpartition("/")[2]
            with self._lock:
                if service in self._known:
                    self._known[service].stale.add(name)
            self._look(service)


def _view(client: KazooClient, records: Mapping[str, bytes]) -> View:
    """By ids; where a foreign name looks like an id of ours, ours is the one."""
    ids = {name: _id(name) for name in records}
    ours = {known: records[name] for name, known in ids.items() if known != name}
    plain = {name: records[name] for name, known in ids.items() if known == name}
    return View(plain | ours, client.last_zxid)
