"""`redis://user:password@host:6379/shop.Orders`: instances in a hash, with leases by Redis' clock.

The layout is told in `_redis_scripts.py`. A change is published as a hint; since messages can be
lost, each process looks by itself too, each third of a lease, which costs little if nothing has
changed. A Redis that keeps nothing on disk will do: what it forgets is published again.

`rediss://`, or `?tls=true`, is over TLS, with `ca`, `cert` and `key` as files; `?db=2` is another
database. A user needs the keys and channels `{namespace}:*` (with the braces), EVAL and CLIENT. One
server; no Sentinel, no Cluster. Needs Redis 5.

A server at `maxmemory` goes on renewing, updating and removing what is listed, and refuses new
instances (`RegistryUnavailable`) until it has memory again.
"""

from __future__ import annotations

import contextlib
import random
import secrets
import threading
import time
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any, ClassVar, Final

import redis
from redis.backoff import NoBackoff
from redis.exceptions import (
    AskError,
    AuthenticationError,
    BusyLoadingError,
    ClusterDownError,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
    TryAgainError,
)
from redis.retry import Retry

from rpcwheel._concurrency.executor import EXECUTOR, reset_after_fork
from rpcwheel.errors import (
    ConfigurationError,
    RegistryClosed,
    RegistryError,
    RegistryRefused,
    RegistryUnavailable,
)
from rpcwheel.registry.backend import RegistryBackend, View
from rpcwheel.timer.clock import clock_of

from .polling import PollingWatcher
from .redis_scripts import LIST, REGISTER, RENEW, UNREGISTER, Keys
from .tls import TLS_ADVICE, TLS_OPTIONS, Tls, refused_by_tls

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from redis import Redis
    from redis.client import PubSub
    from redis.commands.core import Script
    from redis.connection import AbstractConnection

    from rpcwheel.instance import ServiceInstance
    from rpcwheel.registry.backend import Lost, Settings, Watch, Watcher
    from rpcwheel.registry.url import RegistryUrl

__all__ = ["Hints", "RedisBackend"]


PORT: Final = 6379

BATCH: Final = 500

"""Instances in one script; others wait for about a millisecond."""

CLOSE_S: Final = 1.5

"""Seconds that `close` waits for a server that does not answer; `timeout_s`, if that is less."""

CUT_S: Final = 0.3

"""Seconds that the listener may take to end; its connection is cut."""

FULL_EVERY: Final = 12

"""Periods between full reads of watched services: four leases."""

CLUSTER: Final = "Redis Cluster is not supported: give the URL of a Redis server outside a cluster"

FULL: Final = (
    "Redis has reached its maxmemory and accepts no new instances: raise maxmemory, delete data, "
    "or use another Redis for the registry"
)


class RedisBackend(RegistryBackend):
    """One Redis server, by redis-py. Thread-safe.

    Threads: one that listens for hints, while something is watched; the rest runs on
    `rpcwheel._concurrency.executor.EXECUTOR`. In a forked child it begins anew, without watches.
    """

    schemes: ClassVar[tuple[str, ...]] = ("redis", "rediss")

    def __init__(self, url: RegistryUrl, settings: Settings) -> None:
        super().__init__(url, settings)
        self._options = _options_of(url, settings)
        self._keys = Keys(url.namespace)
        self._now = clock_of(settings.timer)
        self._polling = PollingWatcher(
            self._follow,
            timer=settings.timer,
            period_s=settings.lease_s / 3,
            full_every=FULL_EVERY,
            retry_s=settings.lease_s / 3,
        )
        self._closed = False
        self.reset()
        reset_after_fork(self)

    def reset(self) -> None:
        """Connect anew, also in a forked child: the sockets are the parent's there."""
        self._client = redis.Redis(**self._options, retry=Retry(NoBackoff(), 0))
        self._register, self._renew, self._unregister, self._list = (
            self._client.register_script(script) for script in (REGISTER, RENEW, UNREGISTER, LIST)
        )
        self._hints = Hints(
            self._client,
            self._keys.channel,
            quiet_s=self.settings.lease_s / 3,
            hint=self._polling.request_read,
            lost=lambda error: self._polling.report_contact_lost(f"{self.url}: {error}"),
        )
        self._owner = f"{secrets.token_hex(8)}:{int(self.settings.lease_s * 1000)}"
        self._published: dict[tuple[str, str], _Published] = {}
        self._memory = b""  # of the engine, as the looks have seen it

    def publish(self, instances: Sequence[ServiceInstance]) -> None:
        for service, some in _batches(instances):
            now_ns = self._now()
            pairs = [part for one in some for part in (one.id, one.encoded())]
            memory = self._run(self._register, service, self._owner, *pairs)
            self._published.update({one.key: _Published(one.epoch, now_ns, memory) for one in some})

    def withdraw(self, instances: Sequence[ServiceInstance]) -> None:
        for service, some in _batches(instances):
            for one in some:
                self._published.pop(one.key, None)
            pairs = [part for one in some for part in (one.id, one.epoch)]
            self._run(self._unregister, service, "", *pairs)

    def renew(self, instances: Collection[ServiceInstance]) -> Mapping[tuple[str, str], Lost]:
        lost: dict[tuple[str, str], Lost] = {}
        for service, some in _batches(instances):
            now_ns = self._now()
            pairs = [part for one in some for part in (one.id, one.epoch)]
            memory, ids = self._run(self._renew, service, self._owner, *pairs)
            gone = {one.decode() for one in ids}
            for one in some:
                if one.id in gone:
                    lost[one.key] = self._why(self._published.get(one.key), memory)
                else:
                    self._published[one.key] = _Published(one.epoch, now_ns, memory)
        return lost

    def lookup(self, service: str) -> View:
        _, number, records = self._run(self._list, service, "", "", 0)
        return _view(number, records)

    def services(self) -> Sequence[str]:
        def ask() -> Any:
            seconds, micros = self._client.time()
            since = f"({seconds * 1000 + micros // 1000}"
            return self._client.zrangebyscore(self._keys.services, since, "+inf")

        return sorted(name.decode(errors="replace") for name in self._asked(ask))

    def watch(self, service: str, watcher: Watcher) -> Watch:
        if self._closed:
            raise RegistryClosed(f"{self.url}: this registry was closed")
        self._hints.start()
        return self._polling.watch(service, watcher)

    def close(self) -> None:
        if self._closed:
            return
        self._polling.close()
        released = threading.Event()
        if self._published:
            EXECUTOR.submit(released, lambda: self._release(released))
            released.wait(min(self.settings.timeout_s, CLOSE_S))
        self._closed = True
        self._hints.close(CUT_S)
        self._client.close()  # a release that hangs ends with it

    def _release(self, released: threading.Event) -> None:
        """Take out what is left of ours; the first failure ends it."""
        try:
            with contextlib.suppress(RegistryError):
                for service, keys in groupby(sorted(self._published), key=itemgetter(0)):
                    pairs = [part for key in keys for part in (key[1], self._published[key].epoch)]
                    self._run(self._unregister, service, self._owner, *pairs)
        finally:
            released.set()

    def _why(self, published: _Published | None, memory: bytes) -> Lost:
        """Why it is not there."""
        if published is None:
            return "missing"
        if published.memory != memory:
            return "wiped"
        away_ns = self._now() - published.at_ns
        return "lease" if away_ns > self.settings.lease_s * 1e9 else "missing"

    def _follow(self, service: str, known: View | None) -> View:
        """What a watched service has now; `known` itself if nothing has changed."""
        asked = ("", 0) if known is None else (known.revision, len(known.records))
        memory, number, *changed = self._run(self._list, service, "", *asked)
        before, self._memory = self._memory, memory
        if before and memory != before:
            self._polling.report_contact_lost(f"{self.url}: the server has lost its memory")
        if known is not None and not changed:
            return known
        return _view(number, *changed)

    def _run(self, script: Script, service: str, *args: str | bytes | int) -> Any:
        """What one of the scripts gives."""
        lease_ms = int(self.settings.lease_s * 1000)
        given: list[str | bytes | int] = [service, self._keys.channel, lease_ms, *args]
        return self._asked(lambda: script(keys=self._keys.of(service), args=given))

    def _asked(self, ask: Callable[[], Any]) -> Any:
        if self._closed:
            raise RegistryClosed(f"{self.url}: this registry was closed")
        try:
            return ask()
        except (RedisError, OSError, ValueError) as error:
            if self._closed:  # a socket that is closed under its hands is a ValueError to redis-py
                raise RegistryClosed(f"{self.url}: this registry was closed") from error
            if not isinstance(error, RedisError):
                raise
            raise _refusal(self.url, error) from error


@dataclass(frozen=True, slots=True)
class _Published:
    """What is known of a record of ours."""

    epoch: str
    at_ns: int
    """When it was last known to be there."""
    memory: bytes
    """Of the server, in which it is."""


def _options_of(url: RegistryUrl, settings: Settings) -> dict[str, Any]:
    """What redis-py takes.

    Raises:
        ConfigurationError: The URL makes no sense for Redis.
    """
    url.check_options(*TLS_OPTIONS, "db")
    if len(url.hosts) != 1:
        wanted = f"{url.scheme}://127.0.0.1:{PORT}"
        raise ConfigurationError(f"{url}: it must name one host: {wanted}")
    db = url.options.get("db", "0")
    if not db.isdecimal():
        raise ConfigurationError(f"{url}: db must be a number from 0, not {db!r}")
    host, port = url.hosts[0]
    tls = Tls.of(url, default=url.scheme == "rediss")
    options: dict[str, Any] = {
        "host": host,
        "port": port or PORT,
        "db": int(db),
        "username": url.user or None,
        "password": url.password or None,
        "socket_timeout": settings.timeout_s,
        "socket_connect_timeout": settings.timeout_s,
        "socket_keepalive": True,
        # For operators; and whoever should have logged in hears it at once: Redis closes on those
        # who have not and begin with a long question.
        "client_name": "rpcwheel",
        "protocol": 2,
    }
    if tls is not None:
        options |= {
            "ssl": True,
            "ssl_ca_certs": tls.ca,
            "ssl_certfile": tls.cert,
            "ssl_keyfile": tls.key,
            "ssl_check_hostname": True,
        }
    return options


def _refusal(url: RegistryUrl, error: RedisError) -> RegistryError:
    """Our word for redis-py's error."""
    said = f"{url}: {str(error) or type(error).__name__}"
    kind: type[RegistryError] = RegistryUnavailable
    if refused_by_tls(error):
        kind, said = RegistryRefused, f"{said}; {TLS_ADVICE}"
    elif isinstance(error, (AuthenticationError, NoPermissionError)):
        kind, said = RegistryRefused, f"{said}; look at the user, the password and the rights"
    elif isinstance(error, AskError):  # of which MovedError is one
        where = f"slot {error.slot_id} is at {error.host}:{error.port}"
        kind = RegistryRefused
        said = f"{url}: this node does not hold the registry's keys, {where}; {CLUSTER}"
    elif type(error) in {ClusterDownError, TryAgainError}:
        said = f"{said}; {CLUSTER}"
    elif isinstance(error, OutOfMemoryError) or "-OOM " in str(error):  # the text: before Redis 7
        said = f"{said}; {FULL}"
    elif isinstance(error, ResponseError):
        later = isinstance(error, (BusyLoadingError, ReadOnlyError))
        kind = RegistryUnavailable if later else RegistryRefused
    return kind(said)


def _batches(
    instances: Iterable[ServiceInstance],
) -> Iterator[tuple[str, tuple[ServiceInstance, ...]]]:
    """By service, and not too many at a time."""
    by_service: dict[str, list[ServiceInstance]] = {}
    for one in instances:
        by_service.setdefault(one.service, []).append(one)
    for service, some in by_service.items():
        for start in range(0, len(some), BATCH):
            yield service, tuple(some[start : start + BATCH])


def _view(number: bytes, records: Sequence[bytes]) -> View:
    pairs = zip(records[::2], records[1::2], strict=True)
    return View({key.decode(errors="replace"): data for key, data in pairs}, int(number))


FIRST_RETRY_S: Final = 0.1

LAST_RETRY_S: Final = 5.0

_JITTER: Final = random.SystemRandom()


class Hints:
    """Listens to one channel until it is closed. Begins with `start`."""

    def __init__(
        self,
        client: Redis,
        channel: str,
        *,
        quiet_s: float,
        hint: Callable[[str | None], None],
        lost: Callable[[BaseException], None],
    ) -> None:
        """Take note.

        Args:
            client: Its connections are used, one of them for good.
            channel: The channel's name.
            quiet_s: Seconds of silence after which the server is asked whether it is there; after
                as many more the connection is given up.
            hint: Told, on the thread that listens, of each message; None when messages may have
                been missed.
            lost: Told there that the connection broke.
        """
        self._client = client
        self._channel = channel
        self._quiet_s = quiet_s
        self._hint = hint
        self._lost = lost
        self._lock = threading.Lock()
        self._pubsub: PubSub | None = None
        self._thread: threading.Thread | None = None
        self._closed = threading.Event()

    def start(self) -> None:
        """Begin to listen, if that has not begun."""
        with self._lock:
            if self._thread is None and not self._closed.is_set():
                self._thread = threading.Thread(
                    target=self._run, name="rpcwheel-redis", daemon=True
                )
                self._thread.start()

    def close(self, timeout_s: float) -> None:
        """End it, and wait for the thread at most so long; any thread but its own."""
        self._closed.set()
        thread = self._thread
        end = time.monotonic() + timeout_s
        while thread is not None and thread.is_alive() and time.monotonic() < end:
            connection: AbstractConnection | None = getattr(self._pubsub, "connection", None)
            if connection is not None:  # again, as redis-py may just have connected anew
                connection.disconnect()  # type: ignore[no-untyped-call]
            thread.join(0.02)

    def _run(self) -> None:
        wait_s = FIRST_RETRY_S
        while not self._closed.is_set():
            try:
                with self._client.pubsub() as pubsub:  # type: ignore[no-untyped-call]
                    self._pubsub = pubsub
                    pubsub.subscribe(self._channel)
                    wait_s = self._listen(pubsub, wait_s)
            except Exception as error:
                if self._closed.is_set():  # under its hands; redis-py has many words for that
                    return
                if not isinstance(error, (RedisError, OSError)):
                    raise
                self._lost(error)
            self._closed.wait(_JITTER.uniform(0, wait_s))
            wait_s = min(wait_s * 2, LAST_RETRY_S)

    def _listen(self, pubsub: PubSub, wait_s: float) -> float:
        """Hear messages until silence says that nobody is there; gives the next wait."""
        asked = False
        while not self._closed.is_set():
            message = pubsub.get_message(timeout=self._quiet_s)
            if message is None:
                if asked:
                    raise TimeoutError(f"nothing heard for {2 * self._quiet_s:g} s")
                pubsub.ping()
                asked = True
                continue
            asked = False
            wait_s = FIRST_RETRY_S
            if message["type"] == "subscribe":
                self._hint(None)
            elif message["type"] == "message":
                self._hint(message["data"].decode(errors="replace").partition(" ")[0])
        return wait_s
