"""The session with ZooKeeper, by kazoo: connections, errors, and the cases that kazoo can't heal.

kazoo (2.11) reconnects with its own `KazooRetry`. What `Handler` adds was measured to be needed:

* A server that has lost its data, or is behind the others, ends each connection of a client that
  has seen more than it has. kazoo offers the same `last_zxid` again and stays SUSPENDED forever
  (kazoo #42). After a server closed the connection without an answer, the client offers 0, and
  the server answers that the session has ended.
* A server that is just starting may never answer a connection. kazoo would wait for the timeout of
  the session, divided by the number of hosts: 15 s with one host and the default lease.
* A server that is frozen is found by kazoo's pings. kazoo sends none while requests are sent more
  often than it would ping, so a client that retries stays on that server forever. A connection on
  which nothing arrives while a request times out is ended; kazoo goes to the next server.

If neither helps, the client is replaced by a new one.
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
from rpcwheel._concurrency.executor import EXECUTOR, SerialExecutor, reset_after_fork
from rpcwheel._engines.tls import TLS_ADVICE, Tls, refused_by_tls
from rpcwheel.errors import (
    ConfigurationError,
    RegistryClosed,
    RegistryError,
    RegistryRefused,
    RegistryUnavailable,
)
from rpcwheel.registry.url import TLS_OPTIONS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rpcwheel.registry.backend import Settings
    from rpcwheel.registry.url import RegistryUrl

PORT: Final = 2181

FIRST_RETRY_S: Final = 0.1
MAX_RETRY_S: Final = 1.0

REPLACE_AFTER_LEASES: Final = 2
"""The leases without contact after which the client is replaced. A server that can be reached has
ended the session long before."""

CLOSE_TIMEOUT_S: Final = 1.5
"""Limit of `close` if the server does not answer; `timeout_s`, if that is less."""

CUT_TIMEOUT_S: Final = 0.3
"""The part of it that is kept for kazoo's end after its connection is cut."""

LONGEST_SESSION_S: Final = (2**31 - 1) / 1000
"""24 days: the protocol has milliseconds in 32 bits. Servers allow less, 20 ticks by default."""

NODE_ERRORS: Final = (NoNodeError, NodeExistsError, BadVersionError, NotEmptyError, NoAuthError)
"""Errors about one node, not about the session."""


class ZooKeeperSession:
    """One kazoo client at a time. Thread-safe.

    In a forked child it starts again, and leaves its parent's connection alone.
    """

    def __init__(
        self, url: RegistryUrl, settings: Settings, contact_changed: Callable[[str | None], None]
    ) -> None:
        """Connect when a client is needed, not before.

        `contact_changed` is called on kazoo's thread, with the reason when contact is lost, and
        with None when it is back. The watches of the old connection never fire then. It must not
        block.
        """
        self._url = url
        self._tls = Tls.from_options(url, url.tls_options())
        self._settings = settings
        self._contact_changed = contact_changed
        self.closed = False
        self.connection = 0
        """Increases with each connection that is lost. Watches end with their connection."""
        self._handler: Handler | None = None
        self.reset()
        reset_after_fork(self)

    def reset(self) -> None:
        """Start without a client, in a forked child."""
        if self._handler is not None:
            atexit.unregister(self._handler.stop)  # it would wait for threads of the parent
        self._handler = None
        self._lock = threading.Lock()
        self._client: KazooClient | None = None
        self._connected: threading.Event | None = None
        self._lost_ns: int | None = None  # since when there is no contact
        self._max_zxid = 0  # of all sessions
        self._login_refused = False
        self.connection += 1

    def client(self) -> KazooClient:
        """Return a connected client. Waits for one, until `timeout_s` after contact was lost.

        Raises:
            RegistryUnavailable: There is no connection; the message says why.
            RegistryRefused: The credentials were refused.
            RegistryClosed: After `close`.
        """
        client, handler, connected = self._start_client()
        begin_ns = self._lost_ns or time.monotonic_ns()
        end_ns = begin_ns + int(self._settings.timeout_s * 1e9)
        while not connected.wait(0.05):
            if self._login_refused:
                self._replace(client)
                raise RegistryRefused(f"{self._url}: the user or the password is wrong")
            if refused_by_tls(handler.error):
                raise RegistryRefused(f"{self._url}: {TLS_ADVICE} ({handler.error})")
            now_ns = time.monotonic_ns()
            if now_ns > end_ns or not handler.is_running:
                lost_s = (now_ns - begin_ns) / 1e9
                if lost_s > REPLACE_AFTER_LEASES * self._settings.lease_s or not handler.is_running:
                    self._replace(client)
                reason = "no answer" if handler.error is None else str(handler.error)
                raise RegistryUnavailable(f"{self._url}: no connection: {reason}")
        return client

    def results(self, requests: Sequence[Any], end_ns: int) -> list[Any]:
        """Wait for asynchronous requests of kazoo's, until `end_ns`, which `end_ns()` returned.

        An error about one node is a result.

        Raises:
            RegistryUnavailable, RegistryRefused: An error of the session.
        """
        results = []
        for request in requests:
            try:
                results.append(request.get(timeout=max(0, end_ns - time.monotonic_ns()) / 1e9))
            except NODE_ERRORS as error:
                results.append(error)
            except KazooTimeoutError:
                self._cut_if_silent(end_ns)
                raise RegistryUnavailable(
                    f"{self._url}: no answer within {self._settings.timeout_s:g} s"
                ) from None
            except KazooException as error:
                raise registry_error(self._url, error) from error
        return results

    def end_ns(self) -> int:
        """When an operation that begins now must have ended."""
        return time.monotonic_ns() + int(self._settings.timeout_s * 1e9)

    def has_lost_data(self, client: KazooClient) -> bool:
        """Whether the server has less data than it had in an earlier session."""
        return int(client.last_zxid) < self._max_zxid

    def accept_data(self, client: KazooClient) -> None:
        """Take the data that the server has now for complete."""
        self._max_zxid = int(client.last_zxid)

    def close(self) -> None:
        """End the session, if the server answers. Takes at most `CLOSE_TIMEOUT_S`; idempotent."""
        with self._lock:
            self.closed = True
            client, handler = self._client, self._handler
            self._client = self._handler = None
        if client is None or handler is None:
            return
        worker = SerialExecutor()
        if not client.connected:
            handler.cut()
        worker.submit(partial(_stop, client))
        limit_s = min(self._settings.timeout_s, CLOSE_TIMEOUT_S)
        if not worker.wait(max(limit_s - CUT_TIMEOUT_S, limit_s / 2)):
            handler.cut()
            worker.wait(min(CUT_TIMEOUT_S, limit_s / 2))

    def _cut_if_silent(self, end_ns: int) -> None:
        """End a connection on which nothing has arrived since the request that has timed out."""
        handler = self._handler
        if handler is not None and handler.heard_ns < end_ns - int(self._settings.timeout_s * 1e9):
            handler.cut()

    def _start_client(self) -> tuple[KazooClient, Handler, threading.Event]:
        with self._lock:
            if self.closed:
                raise RegistryClosed(f"{self._url}: this registry was closed")
            if self._client is None or self._handler is None or self._connected is None:
                self._handler = Handler(self._settings.timeout_s, self._tls)
                self._client = _new_client(self._url, self._settings.lease_s, self._handler)
                self._client.add_listener(weak_callback(self._state_changed, self._client))
                self._lost_ns, self._login_refused = time.monotonic_ns(), False
                try:
                    self._connected = self._client.start_async()
                except (OSError, RuntimeError) as error:  # no more descriptors or threads
                    self._handler.end_workers()
                    self._client.close()
                    self._client = self._handler = None
                    raise RegistryUnavailable(f"{self._url}: {error}") from error
            return self._client, self._handler, self._connected

    def _replace(self, client: KazooClient) -> None:
        """Drop a client that is stuck; the next request creates another one."""
        with self._lock:
            if client is not self._client or self._handler is None:
                return
            handler = self._handler
            self._client = self._handler = None
            self.connection += 1
        handler.cut()
        EXECUTOR.submit(client, partial(_stop, client))

    # On kazoo's thread

    def _state_changed(self, client: KazooClient, state: str) -> None:
        handler, is_replaced = self._handler, client is not self._client
        if is_replaced or handler is None:
            return
        if state == KazooState.CONNECTED:
            self._lost_ns = None
            self._contact_changed(None)
            return
        self.connection += 1
        self._lost_ns = self._lost_ns or time.monotonic_ns()
        self._max_zxid = max(self._max_zxid, client.last_zxid)  # kazoo resets it with the session
        self._login_refused = client.client_state == KeeperState.AUTH_FAILED
        reason = "the session has ended" if state == KazooState.LOST else "the connection is lost"
        detail = "" if handler.error is None else f": {handler.error}"
        self._contact_changed(f"{self._url}: {reason}{detail}")


def registry_error(url: RegistryUrl, error: KazooException) -> RegistryError:
    """Convert an error of kazoo's."""
    name = type(error).__name__.removesuffix("Error")
    text = f"{url}: {name}: {error}" if str(error) else f"{url}: {name}"
    if isinstance(error, (NoAuthError, AuthFailedError, InvalidACLError)):
        return RegistryRefused(f"{text}; the node belongs to other credentials")
    return RegistryUnavailable(text)


def check_url(url: RegistryUrl, *own: str) -> None:
    """Check the parts that only ZooKeeper restricts. Options are those of TLS, and `own`.

    Raises:
        ConfigurationError: One of them is wrong or missing.
    """
    url.check_options(*TLS_OPTIONS, *own)
    if not url.hosts:
        raise ConfigurationError(f"{url}: the host is missing: {url.scheme}://127.0.0.1:{PORT}")
    if bool(url.user) != bool(url.password):
        raise ConfigurationError(f"{url}: credentials are user:password; one of them is missing")
    if url.namespace == "zookeeper":
        raise ConfigurationError(f"{url}: the node /zookeeper is ZooKeeper's own")


def _stop(client: KazooClient) -> None:
    """End a client; blocks as long as kazoo does."""
    client.stop()
    client.close()


class Handler(SequentialThreadingHandler):  # type: ignore[misc]  # kazoo has no types
    """kazoo's threads and sockets, with names and with the changes in the module's docstring.

    It also keeps the error of the last connection, and closes the socket of a TLS handshake that
    fails, which kazoo leaves to the garbage collector.
    """

    client: KazooClient
    """The client that uses it."""

    def __init__(self, timeout_s: float, tls: Tls | None) -> None:
        super().__init__()
        self._timeout_s = timeout_s
        self._tls = tls
        self._socket: socket.socket | None = None
        self._newest: threading.Thread | None = None
        self.error: Exception | None = None
        """Why the last attempt to connect failed."""
        self.heard_ns = 0
        """The time at which data last arrived on the connection, or the connection was made."""
        # Used by kazoo's connecting thread only
        self._answer_timeout_s = timeout_s  # doubles, to give a slow server time
        self._answer_end_s: float | None = None  # while the server has not answered a connection

    def spawn(self, func: Callable[..., object], *args: object, **options: object) -> Any:
        thread = threading.Thread(
            target=func, args=args, kwargs=options, name="rpcwheel-zookeeper", daemon=True
        )
        thread.start()
        self._newest = thread
        return thread

    def end_workers(self) -> None:
        """End kazoo's workers, also if it could start only the first one. Joins them."""
        self._running = True  # otherwise `stop` does nothing
        self.stop()

    @property
    def is_running(self) -> bool:
        """Whether kazoo's connecting thread runs; it ends at wrong credentials, or by a bug."""
        return self._newest is not None and self._newest.is_alive()  # kazoo starts that one last

    def create_connection(
        self, address: tuple[str, int], hostname: str | None = None, **_: object
    ) -> socket.socket:
        if self._answer_end_s is not None:  # the server before has hung up without an answer
            self.client.last_zxid = 0
        try:
            connection = socket.create_connection(address, self._timeout_s)
            try:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                if self._tls is not None:  # its files may have been renewed
                    connection = self._tls.context().wrap_socket(
                        connection, server_hostname=hostname or address[0]
                    )
            except BaseException:
                connection.close()
                raise
        except OSError as error:
            self.error = error
            raise
        self._socket, self.error = connection, None
        self.heard_ns = time.monotonic_ns()
        self._answer_end_s = time.monotonic() + self._answer_timeout_s
        return connection

    def select(
        self,
        reads: Sequence[object],
        writes: Sequence[object],
        errors: Sequence[object],
        timeout: float | None = None,
    ) -> Any:
        """Limit kazoo's wait for the answer to a connection, and note when something arrives."""
        if self._answer_end_s is not None:
            left_s = max(0.0, self._answer_end_s - time.monotonic())
            timeout = left_s if timeout is None else min(left_s, timeout)
        ready = super().select(reads, writes, errors, timeout)
        if self._socket in ready[0]:
            self.heard_ns = time.monotonic_ns()
        elif self._answer_end_s is not None and not any(ready):  # kazoo gives this connection up
            self._answer_end_s = None
            self._answer_timeout_s *= 2
        return ready

    def state_changed(self, state: str) -> None:
        """Note that the server has answered: with a session, or that it has ended."""
        if state != KazooState.SUSPENDED:
            self._answer_end_s, self._answer_timeout_s = None, self._timeout_s

    def cut(self) -> None:
        """End the connection as if the server had closed it."""
        connection = self._socket
        if connection is not None:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


class _Log(logging.LoggerAdapter[logging.Logger]):
    """kazoo's log at level DEBUG, as its warnings are events of ours; without passwords."""

    def log(self, level: int, msg: object, *args: object, **options: Any) -> None:
        if not any(isinstance(arg, Auth) for arg in args):
            super().log(min(level, logging.DEBUG), msg, *args, **options)


_LOG: Final = _Log(logging.getLogger("rpcwheel.registry.kazoo"), {})


def _new_client(url: RegistryUrl, session_s: float, handler: Handler) -> KazooClient:
    hosts = ",".join(
        f"[{host}]:{port or PORT}" if ":" in host else f"{host}:{port or PORT}"
        for host, port in url.hosts
    )
    login = f"{url.user}:{url.password}"
    handler.client = KazooClient(
        hosts=hosts,
        timeout=min(session_s, LONGEST_SESSION_S),
        handler=handler,
        connection_retry=KazooRetry(
            max_tries=-1,
            delay=FIRST_RETRY_S,
            max_delay=min(MAX_RETRY_S, session_s / 6),
            sleep_func=handler.sleep_func,
        ),
        auth_data=[("digest", login)] if url.user else None,
        default_acl=[make_digest_acl(url.user, url.password, all=True)] if url.user else None,
        logger=_LOG,
    )
    handler.client.add_listener(handler.state_changed)
    return handler.client
