"""The reads of the nodes from which a view in Dubbo's format is made."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kazoo.exceptions import NoNodeError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from kazoo.client import KazooClient
    from kazoo.protocol.states import WatchedEvent

    from .zookeeper_nodes import ZookeeperNodes


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

    def data(self, paths: Collection[str]) -> dict[str, bytes]:
        """Return the data of those of these nodes that exist, by path."""
        read = self._read(paths, self._client.get_async)
        return {path: bytes(result[0] or b"") for path, result in read.items() if result}

    def _read(self, paths: Collection[str], request: Callable[..., Any]) -> dict[str, Any]:
        read = self._request([path for path in paths if path not in self._unchanged], request)
        read |= {path: self._unchanged[path] for path in paths if path not in read}
        self.nodes |= read
        return {path: read[path] for path in paths}

    def _request(self, paths: Collection[str], request: Callable[..., Any]) -> dict[str, Any]:
        """Send a request for each path, which leaves the watch; None: there is no such node."""
        requests = [request(path, self._watch) for path in paths]
        results = self._backend.results(paths, requests, self.end_ns)
        missing = [path for path, result in results.items() if isinstance(result, NoNodeError)]
        if missing and self._watch is not None:
            self._backend.watch_missing(self._client, missing, self.end_ns, self._watch)
        return results | dict.fromkeys(missing)
