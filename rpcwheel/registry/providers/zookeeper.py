"""`zookeeper://user:password@host:2181,host2:2181/shop.Orders`: instances as ephemeral nodes.

Each is a node `/{namespace}/v1/{service}/{id}` of this process's session, whose timeout is the
lease; ZooKeeper deletes it when the session ends. kazoo keeps the session alive, so that renewing
is only looking. The parents stay. `zookeepers://`, or `?tls=true`, is over TLS, with `ca`, `cert`
and `key` as files. With credentials (digest), what is created can be read and changed with the same
ones only.

Made for ZooKeeper 3.4 and later; a server may raise the lease to two of its ticks, or cut it to 20.

"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Final

from kazoo.exceptions import (
    KazooException,
    NoAuthError,
    NodeExistsError,
    NoNodeError,
    NotEmptyError,
    RolledBackError,
    RuntimeInconsistency,
)

from rpcwheel.errors import RegistryClosed, RegistryRefused, RegistryUnavailable
from rpcwheel.registry.provider import Provider

from ._following import Following
from ._zookeeper_client import SCHEMES, checked_url
from ._zookeeper_records import Paths, Reader, epoch_of
from ._zookeeper_session import Session, refusal

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from kazoo.client import KazooClient

    from rpcwheel.instance import ServiceInstance
    from rpcwheel.registry.provider import Lost, Settings, View, Watch, Watcher
    from rpcwheel.registry.url import RegistryUrl

__all__ = ["ZookeeperProvider"]

LOOK_LEASES: Final = 4
"""Leases between looks at everything, though nothing seems to have changed: 60 s by default."""

MOST_ROUNDS: Final = 5
"""Tries to have a node that others write too."""


class ZookeeperProvider(Provider):
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
        self._following = Following(
            self._reader.follow,
            timer=settings.timer,
            period_s=LOOK_LEASES * settings.lease_s,
            anew=True,
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
        return self._following.watch(service, watcher)

    def close(self) -> None:
        self._following.close()
        self._session.close()

    def _contact_changed(self, reason: str | None) -> None:
        """On EXECUTOR."""
        self._reader.forget()
        if reason is None:
            self._following.look()
        else:
            self._following.lost(reason)

    def _look(self, service: str) -> None:
        self._following.look(service)

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
