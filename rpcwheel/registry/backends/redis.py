"""`redis://user:password@host:6379/shop.Orders`: a Redis server as the registry.

Data and scripts are described in `redis_scripts.py`. Leases are measured by the server's clock. A
process renews all its instances by one script, and checks by another whether anything has changed
in the namespace, both each third of a lease. Changes are also published as messages, so that
watchers see them at once; a lost message delays a change until the next check.

`rediss://`, or `?tls=true`, is over TLS, with `ca`, `cert` and `key` as files; `?db=2` is another
database. docs/registries.md lists the rights of a user. Needs Redis 5 or newer, one server or an
address that always leads to the present primary. Redis Cluster is not supported. The server need
not keep data on disk: what it loses is published again.

A server at `maxmemory` goes on renewing, updating and removing what is listed, and refuses new
instances (`RegistryUnavailable`) until it has memory again.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from typing import TYPE_CHECKING, Any, Final

import redis
from redis.exceptions import RedisError

from rpcwheel._concurrency.executor import SerialExecutor, reset_after_fork
from rpcwheel._engines.redis import (
    PORT,
    RedisProblem,
    leave_replica,
    redis_error,
    redis_options,
)
from rpcwheel._engines.tls import Tls
from rpcwheel.backoff import RANDOM
from rpcwheel.errors import (
    ConfigurationError,
    RegistryError,
    RegistryRefused,
    RegistryUnavailable,
)
from rpcwheel.registry.backend import RegistryBackend, View
from rpcwheel.registry.url import TLS_OPTIONS
from rpcwheel.timer.manual import clock_of

from .polling import PollingWatcher
from .redis_scripts import CHECK, KEYS, READ, REGISTER, RENEW, UNREGISTER

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from redis import Redis
    from redis.client import PubSub
    from redis.commands.core import Script

    from rpcwheel.instance import ServiceInstance
    from rpcwheel.registry.backend import Lost, Settings, Watch, Watcher
    from rpcwheel.registry.url import RegistryUrl

BATCH_SIZE: Final = 500
"""Instances per script. The server runs nothing else for the few milliseconds that it takes."""

RELEASE_TIMEOUT_S: Final = 1.5
"""Seconds that `close` waits for a server that does not answer; `timeout_s` if that is less."""

FULL_EVERY: Final = 720
"""Periods between full reads of all watched services, 240 leases (an hour by default): a safety net
only, so that the idle load does not grow with the services."""

JOIN_TIMEOUT_S: Final = 0.3
"""Seconds that `close` waits for the listener's thread, whose connection is cut."""

FIRST_RETRY_S: Final = 0.1
LONGEST_RETRY_S: Final = 5.0
"""The longest wait until the listener reconnects; it doubles after each failure."""

ERRORS: Final[dict[RedisProblem, type[RegistryError]]] = {
    RedisProblem.REFUSED: RegistryRefused,
    RedisProblem.FULL: RegistryUnavailable,
    RedisProblem.TEMPORARY: RegistryUnavailable,
}


class RedisBackend(RegistryBackend):
    """One Redis server, by redis-py. Thread-safe.

    While something is watched it has a thread that listens for changes; everything else runs on
    the workers of `rpcwheel._concurrency.executor`. In a forked child it starts again, without
    watches.
    """

    def __init__(self, url: RegistryUrl, settings: Settings) -> None:
        super().__init__(url, settings)
        self._options = _options_of(url, settings)
        self._prefix = f"{{{url.namespace}}}:"
        self._now_ns = clock_of(settings.timer)
        self._polling = PollingWatcher(
            url,
            self._read,
            timer=settings.timer,
            period_s=settings.lease_s / 3,
            retry_s=settings.lease_s / 3,
            full_every=FULL_EVERY,
            check=self._check_changes,
        )
        self.reset()
        reset_after_fork(self)

    def reset(self) -> None:
        """Reconnect; also in a forked child, where the sockets belong to the parent."""
        self._client = redis.Redis(**self._options)
        self._register, self._unregister, self._renew, self._check, self._reader = (
            self._client.register_script(script)
            for script in (REGISTER, UNREGISTER, RENEW, CHECK, READ)
        )
        self._listener = ChangeListener(
            self._client,
            f"{self._prefix}changes",
            silence_s=self.settings.lease_s / 3,
            changed=self._polling.request_read,
            lost=lambda error: self._polling.report_contact_lost(f"{self.url}: {error}"),
        )
        self._owner = f"{secrets.token_hex(8)}:{self._lease_ms}"
        self._published: dict[tuple[str, str], ServiceInstance] = {}
        self._renewed_ns = 0  # when the server was last known to have all of `_published`
        self._renewed_in = b""  # `began` of the server then
        self._began = b""  # of the server's data, as watches have seen it
        self._checked = b"", 0  # version and number of records of the namespace, at the last check
        self._versions: dict[str, bytes | None] = {}  # of watched services, at the last change

    @property
    def _lease_ms(self) -> int:
        return int(self.settings.lease_s * 1000)

    def publish(self, instances: Sequence[ServiceInstance]) -> None:
        for batch in _batches(instances):
            now_ns = self._now_ns()
            pairs = [part for instance in batch for part in (_field(instance), instance.encoded())]
            began = self._run(self._register, self._owner, *pairs)
            if not self._published:
                self._renewed_ns, self._renewed_in = now_ns, began
            self._published.update((instance.key, instance) for instance in batch)

    def withdraw(self, instances: Sequence[ServiceInstance]) -> None:
        for instance in instances:
            published = self._published.get(instance.key)
            if published is not None and published.epoch == instance.epoch:
                del self._published[instance.key]
        self._remove(instances, owner="")

    def renew(self, instances: Collection[ServiceInstance]) -> Mapping[tuple[str, str], Lost]:
        lost: dict[tuple[str, str], Lost] = {}
        now_ns, began = self._now_ns(), self._renewed_in
        for batch in _batches(instances):
            began, fields = self._run(self._renew, self._owner, *_fields_and_epochs(batch))
            missing = {field.decode() for field in fields}
            reason = self._reason(began, now_ns)
            lost |= {instance.key: reason for instance in batch if _field(instance) in missing}
        self._renewed_ns, self._renewed_in = now_ns, began
        return lost

    def lookup(self, service: str) -> View:
        return self._load(service, None)[1]

    def services(self) -> Sequence[str]:
        self._run(self._check)  # removes what has ended
        fields = self._ask(lambda: self._client.zrange(f"{self._prefix}index", 0, -1))
        parts = (field.decode(errors="replace").partition("/") for field in fields)
        return sorted({service for service, slash, _ in parts if slash})

    def watch(self, service: str, watcher: Watcher) -> Watch:
        self._check_open()
        try:
            self._listener.start()
        except RuntimeError as error:  # "can't start new thread"
            raise RegistryUnavailable(f"{self.url}: {error}") from error
        return self._polling.watch(service, watcher)

    def close(self) -> None:
        if self._closed:
            return
        self._polling.close()
        if self._published:
            worker = SerialExecutor()
            worker.submit(self._release)
            worker.wait(min(self.settings.timeout_s, RELEASE_TIMEOUT_S))
        self._closed = True
        self._listener.close(JOIN_TIMEOUT_S)
        self._client.close()  # also ends a release that hangs

    def _release(self) -> None:
        """Remove the instances that are still published. Ends at the first error."""
        with contextlib.suppress(RegistryError):
            self._remove(tuple(self._published.values()), self._owner)

    def _remove(self, instances: Sequence[ServiceInstance], owner: str) -> None:
        for batch in _batches(instances):
            self._run(self._unregister, owner, *_fields_and_epochs(batch))

    def _reason(self, began: bytes, now_ns: int) -> Lost:
        """Return why instances are lost that were there at the last renewal."""
        if not self._published:
            return "missing"
        if began != self._renewed_in:
            return "wiped"
        is_over = now_ns - self._renewed_ns > self.settings.lease_s * 1e9
        return "lease" if is_over else "missing"

    def _check_changes(self) -> None:
        """Have the watched services read that have changed since the last call.

        Raises:
            RegistryError: The server can't be asked.
        """
        began, *checked = self._run(self._check)
        self._compare(began)
        before, self._checked = self._checked, tuple(checked)
        services = tuple(self._polling.services)
        if self._checked == before or not services:
            return
        if self._checked[0] == before[0]:  # another program has changed the number of records
            self._polling.request_read()
            return
        versions = self._ask(lambda: self._client.hmget(f"{self._prefix}versions", services))
        previous, self._versions = self._versions, dict(zip(services, versions, strict=True))
        for service, version in self._versions.items():
            if service not in previous or previous[service] != version:
                self._polling.request_read(service)

    def _read(self, service: str, previous: View | None) -> View:
        began, view = self._load(service, previous)
        self._compare(began)
        return view

    def _compare(self, began: bytes) -> None:
        """Report to watchers if the server has lost its data since the last call."""
        before, self._began = self._began, began
        if before and before != began:
            self._polling.report_contact_lost(f"{self.url}: the server has lost its data")

    def _load(self, service: str, previous: View | None) -> tuple[bytes, View]:
        """Return `began` and all records of a service. Reads only the changes since `previous`."""
        since: str | int = "" if previous is None else previous.revision
        began, version, size, is_update, ids, values = self._run(self._reader, service, since)
        names = (each.decode(errors="replace") for each in ids)
        records: dict[str, bytes | None] = dict(zip(names, values, strict=True))
        if previous is None or not is_update:
            present = {name: data for name, data in records.items() if data is not None}
            return began, View(present, int(version))
        changed = {name for name, data in records.items() if previous.records.get(name) != data}
        merged = dict(previous.records)
        for name in changed:
            if (data := records[name]) is None:
                del merged[name]
            else:
                merged[name] = data
        if len(merged) != size:  # another program has written without changing the version
            return self._load(service, None)
        is_same = int(version) == previous.revision
        return began, previous if is_same else View(merged, int(version), frozenset(changed))

    def _run(self, script: Script, *args: str | bytes | int) -> Any:
        keys = [self._prefix + name for name in KEYS]
        return self._ask(lambda: script(keys=keys, args=[self._prefix, self._lease_ms, *args]))

    def _ask(self, request: Callable[[], Any]) -> Any:
        """Make a request, and turn errors of redis-py into ours."""
        self._check_open()
        try:
            return request()
        except Exception as error:
            self._check_open()  # many kinds of errors, as the connection was cut
            if not isinstance(error, RedisError):
                raise
            leave_replica(self._client, error)
            raise redis_error(self.url, error, ERRORS) from error


def _options_of(url: RegistryUrl, settings: Settings) -> dict[str, Any]:
    """Return the arguments of `redis.Redis` for a URL.

    Raises:
        ConfigurationError: The URL makes no sense for Redis.
    """
    url.check_options(*TLS_OPTIONS, "db")
    if len(url.hosts) != 1:
        wanted = f"{url.scheme}://127.0.0.1:{PORT}"
        raise ConfigurationError(f"{url}: it must name one host: {wanted}")
    host, port = url.hosts[0]
    return redis_options(
        url,
        url.options.get("db", "0"),
        settings.timeout_s,
        Tls.from_options(url, url.tls_options()),
        host=host,
        port=port or PORT,
        username=url.user or None,
        password=url.password or None,
    )


def _batches(instances: Iterable[ServiceInstance]) -> Iterator[tuple[ServiceInstance, ...]]:
    """Return the instances in parts of at most `BATCH_SIZE`."""
    rest = tuple(instances)
    for first in range(0, len(rest), BATCH_SIZE):
        yield rest[first : first + BATCH_SIZE]


def _field(instance: ServiceInstance) -> str:
    """Return the name of an instance in the hashes of a namespace."""
    return f"{instance.service}/{instance.id}"


def _fields_and_epochs(instances: Iterable[ServiceInstance]) -> list[str]:
    return [part for instance in instances for part in (_field(instance), instance.epoch)]


class ChangeListener:
    """A thread that receives the messages of one channel, and reconnects after errors.

    redis-py's `PubSub.run_in_thread` (8.1.0) does not do: it sends pings, but does not notice that
    they are not answered; it does not report that it has connected again, after which messages may
    have been missed; it connects on the caller's thread; and `stop` waits for its sleep to end.
    """

    def __init__(
        self,
        client: Redis,
        channel: str,
        *,
        silence_s: float,
        changed: Callable[[str | None], object],
        lost: Callable[[BaseException], object],
    ) -> None:
        """Do nothing until `start`.

        Args:
            client: Its pool of connections is used, one of them permanently.
            channel: The channel's name.
            silence_s: Seconds without a message after which a ping is sent. After as many more
                without a reply the connection is given up.
            changed: Called on the thread with each message; with None after connecting, as messages
                may have been missed.
            lost: Called on the thread with the error after which it connects anew.
        """
        self._client = client
        self._channel = channel
        self._silence_s = silence_s
        self._changed = changed
        self._lost = lost
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = threading.Event()
        self._retry_s = FIRST_RETRY_S

    def start(self) -> None:
        """Start the thread, unless it was started before.

        Raises:
            RuntimeError: The system can't start a thread.
        """
        with self._lock:
            if self._thread is None and not self._closed.is_set():
                thread = threading.Thread(target=self._run, name="rpcwheel-redis", daemon=True)
                thread.start()
                self._thread = thread

    def close(self, timeout_s: float) -> None:
        """End the thread, and wait for it at most so long. Cuts all connections of the client.

        Any thread but the listener's own.
        """
        self._closed.set()
        thread = self._thread
        end = time.monotonic() + timeout_s
        while thread is not None and thread.is_alive() and time.monotonic() < end:
            self._client.connection_pool.disconnect()  # again: it may just have reconnected
            thread.join(0.02)

    def _run(self) -> None:
        while not self._closed.is_set():
            try:
                with self._client.pubsub() as pubsub:  # type: ignore[no-untyped-call]
                    pubsub.subscribe(self._channel)
                    self._listen(pubsub)
            except Exception as error:
                if self._closed.is_set():  # many kinds of errors, as the connection was cut
                    return
                if not isinstance(error, (RedisError, OSError)):
                    raise
                self._lost(error)
            self._closed.wait(RANDOM.uniform(0, self._retry_s))
            self._retry_s = min(self._retry_s * 2, LONGEST_RETRY_S)

    def _listen(self, pubsub: PubSub) -> None:
        """Receive messages until closed. Raises TimeoutError if a ping is not answered."""
        is_silent = False
        while not self._closed.is_set():
            message = pubsub.get_message(timeout=self._silence_s)
            if message is None:
                if is_silent:
                    raise TimeoutError(f"nothing received for {2 * self._silence_s:g} s")
                pubsub.ping()
                is_silent = True
                continue
            is_silent = False
            if message["type"] == "subscribe":
                self._retry_s = FIRST_RETRY_S
                self._changed(None)
            elif message["type"] == "message":
                self._changed(message["data"].decode(errors="replace"))
