"""`redis://user:password@host:6379?db=2`: a journal for workers on many machines, in Redis.

Needs Redis 5 or newer, one server or an address that always leads to the present primary; Redis
Cluster is not supported. `rediss://` is over TLS, with the files `?ca=root.pem&cert=chain.pem&
key=key.pem`. All keys begin with `{namespace}:`, with `?namespace=rpcwheel-journal`; a user needs
these keys, and the rights that docs/guides/journals.md lists.

Calls are as durable as the server is configured to keep them:

* `appendonly yes` is needed: without it, a restart of the server loses all calls since the last
  snapshot. If it is off, a warning is logged.
* `appendfsync always` loses no call. With `everysec`, the default, a power failure loses those of a
  second or two. So does the death of the server's process if its disk is slow: Redis confirms calls
  during an fsync, and writes them to its file afterwards, at most two seconds later.
* Fail-over to a replica is asynchronous: it loses what the replica has not received yet. That also
  undoes results, whose calls are attempted again, with the same idempotency keys.
* `maxmemory-policy` must be `noeviction`, and is checked when the server is connected and when a
  lease is renewed: other policies delete calls. A server at `maxmemory` refuses new calls
  (`JournalFull`), and goes on delivering the stored ones.
* A call whose key is lost is removed by the request that meets it, which emits `FailbackLost`.

A call takes about 1,400 bytes of memory beyond its body. `select`, `retry` and `delete` look at all
calls, some hundreds at a time, so that others do not wait. If `retry` or `delete` raises, a part of
the calls may have been changed.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote

import redis
from redis.exceptions import BusyLoadingError, RedisError, ResponseError

from rpcwheel._concurrency.executor import reset_after_fork
from rpcwheel._engines.redis import (
    CLUSTER,
    PORT,
    RedisProblem,
    leave_replica,
    redis_error,
    redis_options,
)
from rpcwheel._engines.tls import Tls
from rpcwheel.errors import (
    ConfigurationError,
    JournalError,
    JournalFull,
    JournalOutcomeUnknown,
    JournalRefused,
    JournalUnavailable,
)
from rpcwheel.events import FailbackLost, emit

from .backend import (
    Delivered,
    Depth,
    JournalBackend,
    LostTakes,
    NewRow,
    Postponed,
    storable,
    stored_call,
)
from .redis_scripts import APPEND, COUNT, FREE_LOST, RELEASE, RENEW, REPORT, SCAN, TAKE
from .url import LOCATION_OPTIONS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from .backend import Filter, NewCall, Result, Route, StoredCall
    from .url import JournalUrl

_LOG: Final = logging.getLogger("rpcwheel")

TIMEOUT_S: Final = 5.0
"""How long a request waits for the server."""

SCHEMA_VERSION: Final = 1
"""The version of keys and scripts, in the key `version`."""

CHUNK: Final = 300
"""Calls that a script looks at. The server runs nothing else for the milliseconds that it takes."""

LAST_ID: Final = 10**16 - 1

NOT_CONNECTED: Final = ("connecting to", "max number of clients")
"""In the texts of errors that end a connection before a request is sent on it."""

ERRORS: Final[dict[RedisProblem, type[JournalError]]] = {
    RedisProblem.REFUSED: JournalRefused,
    RedisProblem.FULL: JournalFull,
    RedisProblem.TEMPORARY: JournalUnavailable,
}


class RedisJournal(JournalBackend):
    """A journal in a Redis server, by redis-py. Thread-safe."""

    def __init__(self, url: JournalUrl) -> None:
        self._options = _options_of(url)
        self.url = url
        self._prefix = url.options.get("namespace", LOCATION_OPTIONS["namespace"]) + ":"
        if self._prefix == ":":
            raise ConfigurationError(f"{url}: namespace must not be empty")
        self._closed = False
        self._has_warned = False
        self._lost = LostTakes()
        self.reset()
        reset_after_fork(self)

    def reset(self) -> None:
        """Connect again; also in a forked child, where the sockets belong to the parent."""
        self._client = redis.Redis(**self._options)
        self._scripts = {
            text: self._client.register_script(text)
            for text in (APPEND, TAKE, FREE_LOST, RENEW, REPORT, RELEASE, COUNT, SCAN)
        }
        self._lock = threading.Lock()
        self._is_checked = False

    # --- Calls ---

    def append(self, calls: Sequence[NewCall]) -> list[int]:
        if not calls:
            return []
        arguments: list[str | bytes | int] = []
        for row in map(NewRow.of, calls):
            has_order_key = 0 if row.order_key is None else 1
            arguments += (*row[:-1], has_order_key, row.order_key or "")
        self._ask(bool)  # connects and checks the server: if that fails, nothing was sent
        try:
            return [int(number) for number in self._run(APPEND, *arguments)]
        except JournalUnavailable as error:
            if _may_be_executed(error.__cause__):
                raise JournalOutcomeUnknown(str(error)) from error.__cause__
            raise

    def take(
        self, worker: str, lease_s: float, routes: Sequence[Route], within_s: float
    ) -> list[StoredCall]:
        if numbers := self._lost.of(worker):
            self._run(FREE_LOST, worker, *numbers)
        arguments: list[str | int] = []
        for route in routes:
            if route.limit > 0:
                arguments += (storable(route.queue), storable(route.target), route.limit)
        number = self._lost.new_number()
        lease_ms, within_ms = round(lease_s * 1e3), round(within_s * 1e3)
        now_ms, rows, is_more = 0, list[Any](), True
        try:
            while is_more and not rows:  # many calls were lost
                now_ms, rows, is_more = self._run(
                    TAKE, worker, lease_ms, within_ms, number, *arguments
                )
        except BaseException:
            self._lost.add(worker, number)
            raise
        return [_stored_call(row, now_ms) for row in rows]

    def renew(self, worker: str, lease_s: float) -> bool:
        """Renew the lease of a worker, after another check of the server's settings."""
        self._is_checked = False
        return bool(self._run(RENEW, worker, round(lease_s * 1e3)))

    def report(self, worker: str, results: Sequence[Result]) -> list[int]:
        if not results:
            return []
        arguments: list[str | int] = []
        for result in results:
            if isinstance(result, Delivered):
                arguments += (result.id, "delivered", 0, 0, "", "")
                continue
            attempts, error = int(result.attempts), storable(result.error)
            if isinstance(result, Postponed):
                delay_ms = round(result.delay_s * 1e3)
                arguments += (result.id, "postponed", attempts, delay_ms, error, "")
            else:
                arguments += (result.id, "dead", attempts, 0, error, storable(result.reason))
        return [int(number) for number in self._run(REPORT, worker, *arguments)]

    def release(self, worker: str) -> None:
        self._run(RELEASE, worker)

    # --- Operators ---

    def routes(self) -> list[tuple[str, str]]:
        return [_split(place) for place, _, (ready, *_) in self._counts() if ready > 0]

    def depths(self) -> list[Depth]:
        """Return the numbers that the scripts keep. Does not look at the calls."""
        depths = []
        for place, now_ms, (_, live, taken, dead, created_ms) in self._counts():
            age_s = max(0, now_ms - int(created_ms)) / 1e3
            depths.append(Depth(*_split(place), live - taken, taken, dead, age_s))
        return sorted(depths, key=lambda depth: (depth.queue, depth.target))

    def _counts(self) -> Iterator[tuple[bytes, int, list[Any]]]:
        places = self._ask(lambda: self._client.hkeys(f"{self._prefix}places"))
        for first in range(0, len(places), CHUNK):
            some = places[first : first + CHUNK]
            now_ms, rows = self._run(COUNT, *some)
            for place, row in zip(some, rows, strict=True):
                if row[1] or row[3]:  # otherwise its calls were deleted meanwhile
                    yield place, now_ms, row

    def select(self, chosen: Filter, *, after: int = 0, limit: int = 100) -> list[StoredCall]:
        return [
            _stored_call(row, now_ms)
            for now_ms, _, rows in self._scan("select", chosen, after, limit)
            for row in rows
        ]

    def retry(self, chosen: Filter) -> int:
        return sum(number for _, number, _ in self._scan("retry", chosen, 0, LAST_ID))

    def delete(self, chosen: Filter) -> int:
        return sum(number for _, number, _ in self._scan("delete", chosen, 0, LAST_ID))

    def close(self) -> None:
        self._closed = True
        self._client.close()

    def _scan(
        self, action: str, chosen: Filter, after: int, limit: int
    ) -> Iterator[tuple[int, int, list[Any]]]:
        """Look at calls in the order of their ids, and yield what the script returns.

        Calls that are changed are looked at in the reverse order, as is explained in `SCAN`.
        """
        self._check_open()
        conditions = _conditions_of(chosen)
        if chosen.ids is None:
            last = int(self._ask(lambda: self._client.get(f"{self._prefix}id")) or 0)
            while limit > 0:
                now_ms, next_id, number, rows = self._run(
                    SCAN, action, limit, "range", after, last, CHUNK, *conditions
                )
                yield now_ms, number, rows
                limit -= number
                if not next_id:
                    return
                if action == "select":
                    after = int(next_id)
                else:
                    last = int(next_id) - 1
            return
        ids = sorted({int(number) for number in chosen.ids if after < number <= LAST_ID})
        if action != "select":
            ids.reverse()
        for first in range(0, len(ids), CHUNK):
            if limit <= 0:
                return
            some = ids[first : first + CHUNK]
            now_ms, _, number, rows = self._run(
                SCAN, action, limit, "ids", 0, 0, 0, *conditions, *some
            )
            yield now_ms, number, rows
            limit -= number

    # --- Requests ---

    def _run(self, script: str, *args: str | bytes | int) -> Any:
        """Run a script, report the lost calls that it has removed, and return its reply."""
        reply, lost = self._ask(lambda: self._scripts[script](args=[self._prefix, *args]))
        ages: dict[tuple[str, str], list[float]] = {}
        for place, age_ms in lost:
            ages.setdefault(_split(place), []).append(age_ms / 1e3)
        for (queue, target), of_place in ages.items():
            calls = f"calls to {target}" if target else "calls of functions"
            reason = f"{self.url} has lost their data: were its keys deleted or evicted?"
            emit(FailbackLost(queue, (calls,), len(of_place), max(of_place), reason))
        return reply

    def _ask(self, request: Callable[[], Any]) -> Any:
        """Make a request, and turn errors of redis-py into ours."""
        self._check_open()
        try:
            if not self._is_checked:
                self._check_server()
            return request()
        except RedisError as error:
            leave_replica(self._client, error)
            if not isinstance(error, ResponseError):
                self._is_checked = False  # it may come back as another server
            raise redis_error(self.url, error, ERRORS) from error
        except Exception as error:
            if not self._closed:
                raise
            lost = redis.ConnectionError("closed during the request")
            lost.__cause__ = error  # many kinds of errors, as the connection was cut
            raise JournalUnavailable(f"{self.url}: {lost}") from lost

    def _check_open(self) -> None:
        if self._closed:
            raise JournalUnavailable(f"{self.url} was closed")

    def _check_server(self) -> None:
        """Check the configuration and the version of the keys.

        Raises:
            JournalRefused: The server would lose calls, or the keys were made by a newer rpcwheel.
        """
        with self._lock:
            if self._is_checked:
                return
            info: dict[str, Any] = self._client.info()
            policy = info.get("maxmemory_policy", "noeviction")
            if policy != "noeviction":
                raise JournalRefused(
                    f"{self.url}: the server deletes keys when its memory is full "
                    f"(maxmemory-policy {policy}): set maxmemory-policy to noeviction, or use "
                    "another Redis for the journal"
                )
            if info.get("cluster_enabled"):
                raise JournalRefused(f"{self.url}: {CLUSTER}")
            key = f"{self._prefix}version"
            version = self._client.get(key)
            if version is None and not self.creates:
                raise JournalRefused(
                    f"{self.url}: there are no keys {self._prefix}*; the first program that uses "
                    "the journal creates them"
                )
            if version is None:
                self._client.set(key, SCHEMA_VERSION, nx=True)
            elif not version.isdigit():
                raise JournalRefused(
                    f"{self.url}: the keys {self._prefix}* are those of another program; give the "
                    "journal a ?namespace= of its own"
                )
            elif int(version) != SCHEMA_VERSION:
                raise JournalRefused(
                    f"{self.url}: the keys {self._prefix}* were made by a newer rpcwheel (version "
                    f"{int(version)} of the keys, this one knows {SCHEMA_VERSION}): update rpcwheel"
                )
            if not info.get("aof_enabled") and not self._has_warned:
                self._has_warned = True
                _LOG.warning(
                    "%s: appendonly is off: a restart of the server loses calls; set appendonly "
                    "to yes",
                    self.url,
                )
            self._is_checked = True


def _options_of(url: JournalUrl) -> dict[str, Any]:
    """Return the arguments of `redis.Redis`, or raise ConfigurationError for the URL."""
    is_tls = url.scheme == "rediss"
    url.check_options("db", "namespace", *(("ca", "cert", "key") if is_tls else ()))
    try:
        host, port = url.parts.hostname, url.parts.port
    except ValueError:  # which may show the password
        host = port = None
    if not host or "," in url.parts.netloc or url.parts.path.strip("/"):
        raise ConfigurationError(
            f"{url}: a journal is {url.scheme}://user:password@host:{PORT}?db=0, with one host"
        )
    return redis_options(
        url,
        url.options.get("db", LOCATION_OPTIONS["db"]),
        TIMEOUT_S,
        Tls.from_options(url, url.options if is_tls else None),
        host=host,
        port=port or PORT,
        username=unquote(url.parts.username or "") or None,
        password=unquote(url.parts.password or "") or None,
    )


def _conditions_of(chosen: Filter) -> list[str | int]:
    """Return the pairs of `SCAN`."""
    age_ms = None if chosen.min_age_s is None else round(chosen.min_age_s * 1e3)
    states = None if chosen.states is None else "".join(str(int(each)) for each in chosen.states)
    if states == "":
        states = "none"  # no state has a digit in it
    pairs: list[str | int] = []
    for text in (states, chosen.queue, chosen.target, chosen.method, chosen.error):
        pairs += (0, "") if text is None else (1, storable(text))
    return [*pairs, *((0, "") if age_ms is None else (1, age_ms))]


def _stored_call(row: Sequence[Any], now_ms: int) -> StoredCall:
    number, fields = row
    names, body, numbers = fields[:4], fields[4], fields[5:9]
    error, order_key, state, reason = fields[9:]
    key = None if order_key is None else order_key.decode()
    texts = error.decode(), key, int(state), (reason or b"").decode()
    values = (int(number), *map(bytes.decode, names), body, *map(int, numbers), *texts)
    return stored_call(values, now_ms)


def _split(place: bytes) -> tuple[str, str]:
    """Return the queue and the target of a place."""
    length, _, names = place.partition(b":")
    return names[: int(length)].decode(), names[int(length) :].decode()


def _may_be_executed(error: BaseException | None) -> bool:
    """Whether a connection was lost after the request may have been sent."""
    if any(text in str(error) for text in NOT_CONNECTED):
        return False
    lost = isinstance(error, (redis.ConnectionError, redis.TimeoutError))
    return lost and not isinstance(error, BusyLoadingError)
