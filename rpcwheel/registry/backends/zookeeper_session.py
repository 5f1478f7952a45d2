"""A session with ZooKeeper: kept, resumed, and made anew where kazoo alone would try for ever.

What keeps kazoo alone from coming back after a server has lost its data, or did not answer, is
mended in `_zookeeper_client.Handler`. If even that does not help, the client is replaced by a new
one.

kazoo's threads only post to EXECUTOR. These jobs may overlap or change places, so they look at the
client's state instead of relying on why they were posted.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import socket
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from kazoo.client import KazooClient
from kazoo.exceptions import (
    AuthFailedError,
    BadVersionError,
    InvalidACLError,
    KazooException,
    NoAuthError,
    NodeExistsError,
    NoNodeError,
    NotEmptyError,
)
from kazoo.handlers.threading import KazooTimeoutError, SequentialThreadingHandler
from kazoo.protocol.serialization import Auth
from kazoo.protocol.states import KazooState, KeeperState
from kazoo.retry import KazooRetry
from kazoo.security import make_digest_acl

from rpcwheel._concurrency.callbacks import weak_callback
from rpcwheel._concurrency.executor import EXECUTOR, reset_after_fork
from rpcwheel.durations import to_ns
from rpcwheel.errors import (
    ConfigurationError,
    RegistryClosed,
    RegistryError,
    RegistryRefused,
    RegistryUnavailable,
)
from rpcwheel.observe import emit
from rpcwheel.observe.events import RegistryFailed
from rpcwheel.registry.one_shot_timer import OneShotTimer

from .tls import TLS_ADVICE, TLS_OPTIONS, Tls, refused_by_tls

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Sequence

    from rpcwheel.errors import TimerError
    from rpcwheel.registry.backend import Settings
    from rpcwheel.registry.url import RegistryUrl

__all__ = ["SCHEMES", "Handler", "Session", "checked_url", "client_of", "refusal"]


REPLACED_AFTER: Final = 2

"""Leases without contact; a server that is there has ended the session long before."""

CLOSE_S: Final = 1.5

"""Seconds that `close` waits for a server that does not answer; `timeout_s`, if that is less."""

CUT_S: Final = 0.3

"""Of them, those after the connection is cut."""

ANSWERS: Final = (NoNodeError, NodeExistsError, BadVersionError, NotEmptyError, NoAuthError)

"""Errors that say something of one node, not of the session."""


class Session:
    """One kazoo client at a time. Thread-safe.

    In a forked child it begins anew, without touching its parent's connection.
    """

    def __init__(
        self, url: RegistryUrl, settings: Settings, changed: Callable[[str | None], None]
    ) -> None:
        """Take note, and connect to nobody.

        Args:
            url: Where it is.
            settings: Its times, and its timer.
            changed: Called, on EXECUTOR, with why contact was lost, and with None when there is
                contact again. What kazoo had to watch is forgotten then. Calls may overlap.
        """
        self._url = url
        tls = Tls.of(url, default=url.scheme == "zookeepers")
        self._tls = tls.context() if tls else None
        self._settings = settings
        self._changed = changed
        self.closed = False
        self._handler: Handler | None = None
        self.reset()
        reset_after_fork(self)

    def reset(self) -> None:
        """Start anew, without a client, in a forked child."""
        if self._handler is not None:
            atexit.unregister(self._handler.stop)  # it would wait for threads of the parent
        self._handler = None
        self._lock = threading.Lock()
        self._client: KazooClient | None = None
        self._contact: threading.Event | None = None
        self._alone_ns: int | None = None  # since when there is no contact
        self._seen = 0  # the greatest zxid of all sessions
        self._refused = False
        self._tending = OneShotTimer(
            self._settings.timer, lambda: EXECUTOR.submit(self, self._tend), self._timer_refused
        )

    def client(self) -> KazooClient:
        """A client that has contact. Waits for it, at most `timeout_s` from when it was lost.

        Raises:
            RegistryUnavailable: It has none, and why.
            RegistryRefused: The credentials were.
            RegistryClosed: After `close`.
        """
        client, handler, contact = self._started()
        alone_ns = self._alone_ns
        end_ns = (alone_ns or time.monotonic_ns()) + int(self._settings.timeout_s * 1e9)
        while not contact.wait(0.05):
            if self._refused:
                self._replace(client)
                raise RegistryRefused(f"{self._url}: the user or the password is wrong")
            if refused_by_tls(handler.error):
                raise RegistryRefused(f"{self._url}: {handler.error}; {TLS_ADVICE}")
            if not handler.is_running or time.monotonic_ns() > end_ns:
                reason = "no answer" if handler.error is None else str(handler.error)
                raise RegistryUnavailable(f"{self._url}: no connection: {reason}")
        return client

    def gathered(self, asked: Sequence[Any], end_ns: int | None = None) -> list[Any]:
        """What kazoo's asynchronous calls have given, in order; an error of one node is a result.

        Args:
            asked: What they returned.
            end_ns: When to give up; None: `timeout_s` from now.

        Raises:
            RegistryUnavailable, RegistryRefused: An error of the session.
        """
        end_ns = end_ns or self.end_ns()
        results = []
        for one in asked:
            try:
                results.append(one.get(timeout=max(0, end_ns - time.monotonic_ns()) / 1e9))
            except ANSWERS as error:
                results.append(error)
            except KazooTimeoutError:
                raise RegistryUnavailable(
                    f"{self._url}: no answer within {self._settings.timeout_s:g} s"
                ) from None
            except KazooException as error:
                raise refusal(self._url, error) from error
        return results

    def end_ns(self) -> int:
        """When a request that begins now must have ended."""
        return time.monotonic_ns() + int(self._settings.timeout_s * 1e9)

    def lost_memory(self, client: KazooClient) -> bool:
        """Whether the server knows less than it did in a session before."""
        return int(client.last_zxid) < self._seen

    def believe(self, client: KazooClient) -> None:
        """Take what the server knows now for all there is."""
        self._seen = int(client.last_zxid)

    def close(self) -> None:
        """End the session, in order if the server answers. At most `CLOSE_S`; idempotent."""
        with self._lock:
            self.closed = True
            client, handler = self._client, self._handler
            self._client = self._handler = None
            self._tending.clear()
        if client is None or handler is None:
            return
        ended = threading.Event()
        if not client.connected:
            handler.cut()
        EXECUTOR.submit(ended, partial(_stop, client, ended))
        limit_s = min(self._settings.timeout_s, CLOSE_S)
        if not ended.wait(max(limit_s - CUT_S, limit_s / 2)):
            handler.cut()
            ended.wait(min(CUT_S, limit_s / 2))

    def _started(self) -> tuple[KazooClient, Handler, threading.Event]:
        with self._lock:
            if self.closed:
                raise RegistryClosed(f"{self._url}: this registry was closed")
            if self._client is None or self._handler is None or self._contact is None:
                self._handler = Handler(self._settings.timeout_s, self._tls)
                self._client = client_of(self._url, self._settings.lease_s, self._handler)
                self._client.add_listener(weak_callback(self._hear, self._client))
                self._alone_ns, self._refused = time.monotonic_ns(), False
                self._contact = self._client.start_async()
                self._tend_later()
            return self._client, self._handler, self._contact

    def _is_newest(self, client: KazooClient) -> bool:
        return client is self._client

    # On a thread of kazoo's

    def _hear(self, client: KazooClient, state: str) -> None:
        """Take note, and look at it on EXECUTOR."""
        if not self._is_newest(client):
            return
        if state != KazooState.CONNECTED:
            self._seen = max(self._seen, client.last_zxid)  # kazoo forgets it with the session
            self._refused = client.client_state == KeeperState.AUTH_FAILED
        EXECUTOR.submit(self, partial(self._look, client, state))

    # On EXECUTOR

    def _look(self, client: KazooClient, state: str) -> None:
        with self._lock:
            if not self._is_newest(client) or self._handler is None:
                return
            connected = client.connected
            if connected:
                self._alone_ns = None
                self._tending.clear()
            elif self._alone_ns is None:
                self._alone_ns = time.monotonic_ns()
                self._tend_later()
            error = self._handler.error
        if state != KazooState.CONNECTED:
            said = "the session has ended" if state == KazooState.LOST else "the connection is lost"
            self._changed(f"{self._url}: {said}" + ("" if error is None else f": {error}"))
        if connected:
            self._changed(None)

    def _tend(self) -> None:
        """Without contact, each third of a lease: see whether the client is stuck."""
        with self._lock:
            self._tending.rang()
            client, handler, alone_ns = self._client, self._handler, self._alone_ns
            if client is None or handler is None or alone_ns is None or client.connected:
                return
            alone_s = (time.monotonic_ns() - alone_ns) / 1e9
            stuck = alone_s > REPLACED_AFTER * self._settings.lease_s or not handler.is_running
            if not stuck:
                self._tend_later()
        if stuck:
            self._replace(client)
            with contextlib.suppress(RegistryClosed):
                self._started()

    def _replace(self, client: KazooClient) -> None:
        """Have the next request begin with another client."""
        with self._lock:
            if not self._is_newest(client) or self._handler is None:
                return
            handler = self._handler
            self._client = self._handler = None
            self._tending.clear()
        handler.cut()
        EXECUTOR.submit(client, partial(_stop, client, threading.Event()))

    def _tend_later(self) -> None:
        """With the lock."""
        self._tending.clear()
        self._tending.wake(self._tending.now_ns() + to_ns(self._settings.lease_s / 3))

    def _timer_refused(self, error: TimerError) -> None:
        failed = RegistryFailed(str(self._url), "watch", error, None)
        EXECUTOR.submit(failed, partial(emit, failed))


def refusal(url: RegistryUrl, error: KazooException) -> RegistryError:
    """Our word for kazoo's error."""
    said = f"{url}: {type(error).__name__.removesuffix('Error')}" + (
        f": {error}" if str(error) else ""
    )
    if isinstance(error, (NoAuthError, AuthFailedError, InvalidACLError)):
        return RegistryRefused(f"{said}; the node belongs to other credentials")
    return RegistryUnavailable(said)


def _stop(client: KazooClient, ended: threading.Event) -> None:
    """End a client for good; blocks as long as kazoo does."""
    try:
        client.stop()
        client.close()
    finally:
        ended.set()


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
