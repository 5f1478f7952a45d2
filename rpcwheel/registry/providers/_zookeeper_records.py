"""The records of services as nodes: `/{namespace}/v1/{service}/{id}`; read, and watched.

Watches are ZooKeeper's own of one shot: on the parent for names, on each node for its data. kazoo's
`ChildrenWatch` would stop for ever when the parent vanishes; here a parent that is missing is
watched for its coming.
"""

from __future__ import annotations

import json
import threading
from functools import lru_cache
from typing import TYPE_CHECKING, Final
from urllib.parse import quote, unquote

from kazoo.exceptions import NoAuthError, NoNodeError
from kazoo.protocol.states import EventType

from rpcwheel.errors import RegistryUnavailable
from rpcwheel.registry.provider import View

from ._zookeeper_session import refusal

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from kazoo.client import KazooClient
    from kazoo.protocol.states import WatchedEvent

    from rpcwheel.registry.url import RegistryUrl

    from ._zookeeper_session import Session

__all__ = ["Paths", "Reader", "epoch_of"]

SAFE: Final = ":@[]-_.~+=,;!$&'()*"
"""What stands for itself in a node's name, beside letters and digits."""

MOST_ROUNDS: Final = 5
"""Tries to see a parent that comes and goes."""

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
