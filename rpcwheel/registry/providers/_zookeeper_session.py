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
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Any, Final

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
from kazoo.handlers.threading import KazooTimeoutError
from kazoo.protocol.states import KazooState, KeeperState

from rpcwheel._concurrency.callbacks import weak_callback
from rpcwheel._concurrency.executor import EXECUTOR, reset_after_fork
from rpcwheel.durations import to_ns
from rpcwheel.errors import (
    RegistryClosed,
    RegistryError,
    RegistryRefused,
    RegistryUnavailable,
)
from rpcwheel.observe import emit
from rpcwheel.observe.events import RegistryFailed
from rpcwheel.registry.alarm import Alarm

from ._tls import TLS_ADVICE, Tls, refused_by_tls
from ._zookeeper_client import Handler, client_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kazoo.client import KazooClient

    from rpcwheel.errors import TimerError
    from rpcwheel.registry.provider import Settings
    from rpcwheel.registry.url import RegistryUrl

__all__ = ["Session", "refusal"]

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
        self._tending = Alarm(
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
