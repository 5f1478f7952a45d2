"""A kazoo client as we need it: it connects for ever, tells why it can't, and can be cut short."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from typing import TYPE_CHECKING, Any, Final

from kazoo.client import KazooClient
from kazoo.handlers.threading import SequentialThreadingHandler
from kazoo.protocol.serialization import Auth
from kazoo.protocol.states import KazooState
from kazoo.retry import KazooRetry
from kazoo.security import make_digest_acl

from rpcwheel.errors import ConfigurationError

from ._tls import TLS_OPTIONS

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Sequence

    from rpcwheel.registry.url import RegistryUrl

__all__ = ["SCHEMES", "Handler", "checked_url", "client_of"]

SCHEMES: Final = ("zookeeper", "zookeepers")
PORT: Final = 2181
FIRST_RETRY_S: Final = 0.1
LAST_RETRY_S: Final = 1.0


class Handler(SequentialThreadingHandler):  # type: ignore[misc]  # kazoo has no types
    """kazoo's threads and sockets, with names and an end.

    kazoo's own would keep the reason of a failed connection to itself, leave the socket of a failed
    TLS handshake to the garbage collector, and wait for the session's timeout where we can't: for
    the answer that a server which is just starting never gives. We wait `timeout_s` for it, and
    twice as long each time, as a server that is slow must not be asked the more.

    A server that has lost its data ends each connection of a client that has seen more than it has,
    and kazoo (2.11) goes on offering just that: it stays SUSPENDED for ever. A server that is only
    behind the others does so too, so all are asked once; then the client is made to forget what it
    has seen (`last_zxid`). They answer then that the session is gone, and kazoo makes another.
    """

    client: KazooClient
    """Whose they are."""

    def __init__(self, timeout_s: float, tls: ssl.SSLContext | None) -> None:
        super().__init__()
        self._timeout_s = timeout_s
        self._tls = tls
        self._socket: socket.socket | None = None
        self._newest: threading.Thread | None = None
        self.error: Exception | None = None
        """Why the last try to connect failed."""
        # of kazoo's thread that connects, only
        self._patience_s = timeout_s
        self._end_s: float | None = None  # of waiting for the answer, while there is none
        self._asked: tuple[str, int] | None = None  # who has not answered yet
        self._refused_by: set[tuple[str, int]] = set()  # those who hung up, since the last answer

    def spawn(self, func: Callable[..., object], *args: object, **options: object) -> Any:
        thread = threading.Thread(
            target=func, args=args, kwargs=options, name="rpcwheel-zookeeper", daemon=True
        )
        thread.start()
        self._newest = thread
        return thread

    @property
    def is_running(self) -> bool:
        """Whether the thread that connects is; it ends by a bug, or by wrong credentials."""
        return self._newest is not None and self._newest.is_alive()  # kazoo starts that one last

    def create_connection(
        self, address: tuple[str, int], hostname: str | None = None, **_: object
    ) -> socket.socket:
        self._take_refusal(address)
        try:
            connection = socket.create_connection(address, self._timeout_s)
            try:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                if self._tls is not None:
                    connection = self._tls.wrap_socket(
                        connection, server_hostname=hostname or address[0]
                    )
            except BaseException:
                connection.close()
                raise
        except OSError as error:
            self.error = error
            raise
        self._socket, self.error = connection, None
        self._asked, self._end_s = address, time.monotonic() + self._patience_s
        return connection

    def select(
        self,
        reads: Sequence[object],
        writes: Sequence[object],
        errors: Sequence[object],
        timeout: float | None = None,
    ) -> Any:
        """Wait for one of them; for no longer than we wait for an answer, if there is none yet."""
        if self._end_s is None:
            return super().select(reads, writes, errors, timeout)
        left_s = max(0.0, self._end_s - time.monotonic())
        ready = super().select(
            reads, writes, errors, left_s if timeout is None else min(left_s, timeout)
        )
        if not any(ready):  # kazoo gives this connection up
            self._asked, self._end_s = None, None
            self._patience_s *= 2
        return ready

    def heard(self, state: str) -> None:
        """Take note that the server has answered, if it has; kazoo calls it."""
        if state != KazooState.SUSPENDED:
            self._asked, self._end_s, self._patience_s = None, None, self._timeout_s
            self._refused_by.clear()

    def _take_refusal(self, address: tuple[str, int]) -> None:
        """Before the next connection: see how the one before has ended."""
        if self._asked is not None:
            self._refused_by.add(self._asked)
        self._asked = self._end_s = None
        if address in self._refused_by:  # and nobody else has taken us since
            self.client.last_zxid = 0

    def cut(self) -> None:
        """End the connection, as a broken one ends."""
        connection = self._socket
        if connection is not None:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


class _Log(logging.LoggerAdapter[logging.Logger]):
    """kazoo's log, without passwords, and quiet: what it warns of we tell as events."""

    def log(self, level: int, msg: object, *args: object, **options: Any) -> None:
        if not any(isinstance(arg, Auth) for arg in args):
            super().log(min(level, logging.DEBUG), msg, *args, **options)


_LOG: Final = _Log(logging.getLogger("rpcwheel.registry.kazoo"), {})


def checked_url(url: RegistryUrl) -> None:
    """See that it makes sense for ZooKeeper.

    Raises:
        ConfigurationError: It does not.
    """
    url.check_options(*TLS_OPTIONS)
    if not url.hosts:
        raise ConfigurationError(f"{url}: the host is missing: {url.scheme}://127.0.0.1:{PORT}")
    if bool(url.user) != bool(url.password):
        raise ConfigurationError(f"{url}: credentials are user:password; one of them is missing")
    if url.namespace == "zookeeper":
        raise ConfigurationError(f"{url}: the node /zookeeper is ZooKeeper's own")


def client_of(url: RegistryUrl, session_s: float, handler: Handler) -> KazooClient:
    """A client that is not started. Never connects anew in less than a tenth of a second."""
    hosts = ",".join(
        f"[{host}]:{port or PORT}" if ":" in host else f"{host}:{port or PORT}"
        for host, port in url.hosts
    )
    login = f"{url.user}:{url.password}"
    last_s = min(LAST_RETRY_S, session_s / 6)
    handler.client = KazooClient(
        hosts=hosts,
        timeout=session_s,
        handler=handler,
        connection_retry=KazooRetry(
            max_tries=-1, delay=FIRST_RETRY_S, max_delay=last_s, sleep_func=handler.sleep_func
        ),
        auth_data=[("digest", login)] if url.user else None,
        default_acl=[make_digest_acl(url.user, url.password, all=True)] if url.user else None,
        logger=_LOG,
    )
    handler.client.add_listener(handler.heard)
    return handler.client
