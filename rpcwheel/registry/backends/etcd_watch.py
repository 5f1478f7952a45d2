"""Watches of etcd: one stream for all services of a backend, with a thread that receives from it.

`PollingWatcher` asks for the view of a service when there is a hint that it has changed. The steps
for each service:

1. Create a watch for changes from now on.
2. When etcd has confirmed it, read all records; they are those of revision R.
3. Ignore changes up to R, and apply later ones to the view before.

Steps 1 and 2 are taken for many services together: after a restart of etcd, a process that watches
1,000 of them sends 8 reads.

So no change is missed, and no watch starts at a revision of the past. That would be unsafe: etcd
may have compacted it. Or, if etcd has lost its data, the new data may not have reached it: etcd
accepts such a watch, and stays silent until then.

What can go wrong, and how it is noticed:

* The connection is dead: a probe (etcd's progress request) is sent in regular intervals, and if no
  response comes in time, the stream is ended.
* etcd has lost its data: each response has etcd's revision. If it is lower than before, everything
  is read again.
* A change was missed for any other reason: everything is read again in longer intervals.

When a stream ends, for whatever reason, the watchers are notified that contact was lost, and the
next views begin with step 1 on another stream.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass, field
from itertools import count, islice
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from rpcwheel.backoff import RANDOM
from rpcwheel.durations import to_ns
from rpcwheel.errors import RegistryError, RegistryRefused, RegistryUnavailable
from rpcwheel.events import TaskFailed, emit
from rpcwheel.registry.backend import View
from rpcwheel.timer.manual import clock_of

from .etcd_client import MAX_OPERATIONS, messages
from .polling import FIRST_RETRY_S, PollingWatcher

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from rpcwheel.registry.backend import Settings, Watcher
    from rpcwheel.registry.url import RegistryUrl

    from .etcd_client import EtcdClient, WatchStream
    from .watch_notifier import WatchNotifier

FULL_EVERY: Final = 120
"""Probes, each a third of a lease after the other, until all watched services are read although
nothing has changed: 40 leases, 10 minutes by default. A safety net only."""

MAX_RETRY_S: Final = 5.0
JOIN_TIMEOUT_S: Final = 1.0

DATA_LOST: Final = "the registry has lost its data: its revision decreased"


class WatchChange(NamedTuple):
    """The last change of a record."""

    value: bytes | None
    """None if it was deleted."""
    revision: int


@dataclass(eq=False, slots=True)
class _KeyWatch:
    """The watch of a service on one stream. Guarded by the lock of `EtcdWatches`."""

    number: int
    """Its number on the wire."""
    service: str
    is_created: bool = False
    refusal: str = ""
    """Why etcd has refused it."""
    changes: deque[dict[str, WatchChange]] = field(default_factory=deque)
    """Those of the next views, by id. A record that is changed and then deleted is in two of them,
    so that watchers see whether the instance was DRAINING."""


@dataclass(frozen=True, slots=True)
class EtcdView(View):
    """A view, and the watch that has the changes since."""

    watch: object = None

    def with_changes(self, changes: Mapping[str, WatchChange]) -> EtcdView:
        """Return the view after those of the changes that are later; this one if there are none."""
        later = {id_: each for id_, each in changes.items() if each.revision > self.revision}
        if not later:
            return self
        records = dict(self.records)
        for id_, change in later.items():
            if change.value is None:
                records.pop(id_, None)
            else:
                records[id_] = change.value
        revision = max(change.revision for change in later.values())
        return EtcdView(records, revision, frozenset(later), self.watch)


@dataclass(eq=False, slots=True)
class _Stream:
    """One stream, and all that belongs to it. Guarded by the lock of `EtcdWatches`."""

    call: WatchStream
    requests: SimpleQueue[object]
    watches: dict[int, _KeyWatch] = field(default_factory=dict)
    """By their number."""
    by_service: dict[str, _KeyWatch] = field(default_factory=dict)
    """The same watches, and refused ones until that is reported."""
    creating: deque[_KeyWatch] = field(default_factory=deque)
    """Those whose create requests have no response yet; etcd responds to them in order."""
    numbers: Iterator[int] = field(default_factory=lambda: count(1))
    probed_ns: int | None = None
    """When a probe was sent; None: there was a response since."""
    end_reason: str = ""
    """Why it has ended, or is being ended."""

    def forget(self, watch: _KeyWatch) -> None:
        """Have the next view of the service use another watch."""
        del self.watches[watch.number], self.by_service[watch.service]


class EtcdWatches:
    """All watches of one backend. Thread-safe. Its thread runs as long as there is a stream.

    The stream stays open when the last watch is closed, for the next one.
    """

    def __init__(
        self,
        client: EtcdClient,
        url: RegistryUrl,
        settings: Settings,
        *,
        prefix_of: Callable[[str], bytes],
        read: Callable[[Sequence[str]], Sequence[View]],
    ) -> None:
        """Prepare; starts nothing.

        `prefix_of` returns the prefix of the keys of a service. `read` reads all records of some
        services as of one revision of etcd; it may raise RegistryError.
        """
        self._client = client
        self._prefix_of = prefix_of
        self._read = read
        self._now_ns = clock_of(settings.timer)
        self._timeout_s = settings.timeout_s
        self._messages = messages()
        period_s = settings.lease_s / 3
        self._polling = PollingWatcher(
            url,
            self._view,
            timer=settings.timer,
            period_s=period_s,
            retry_s=min(period_s, MAX_RETRY_S),
            full_every=FULL_EVERY,
            check=self._probe,
        )
        self._changed = threading.Condition()  # not held while anything blocks
        self._stream: _Stream | None = None
        self._thread: threading.Thread | None = None
        self._last_revision = 0
        """The highest revision of etcd that was seen, since it last lost its data."""
        self._read_ahead: dict[str, EtcdView] = {}
        """Views that were read with that of another service, and are to be returned next."""
        self._closed = False

    def watch(self, service: str, watcher: Watcher) -> WatchNotifier:
        """Notify the watcher of all records of a service from now on."""
        return self._polling.watch(service, watcher)

    def close(self) -> None:
        """Close all watches, and end the thread; waits at most `JOIN_TIMEOUT_S`. Idempotent."""
        self._polling.close()
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            stream, thread = self._stream, self._thread
        if stream is not None and thread is not None:
            stream.call.cancel()
            thread.join(JOIN_TIMEOUT_S)

    # On the worker of `PollingWatcher`

    def _view(self, service: str, previous: View | None) -> EtcdView:
        """Return the present records of a service: those of `previous` with the changes since.

        Without a `previous` view of the same watch they are read.
        """
        stream = self._stream
        if stream is None or stream.end_reason:
            stream = self._open()
        watch = self._created_watch(stream, service)
        if isinstance(previous, EtcdView) and previous.watch is watch:
            with self._changed:
                changes = watch.changes.popleft() if watch.changes else {}
            view = previous.with_changes(changes)
        else:
            ahead = self._read_ahead.pop(service, None)
            if ahead is None or ahead.watch is not watch:
                ahead = self._read_with_others(stream, watch)
            view = ahead
        if watch.changes:  # those of one view are left, or some came after a read for another one
            self._polling.request_read(service)
        return view

    def _read_with_others(self, stream: _Stream, watch: _KeyWatch) -> EtcdView:
        """Read a service, and in the same transaction the next ones to be read in full."""
        with self._changed:
            due = map(stream.by_service.get, self._polling.due_in_full())
            created = (each for each in due if each is not None and each.is_created)
            watches = [watch, *islice(created, MAX_OPERATIONS - 1)]
        before, self._read_ahead = self._last_revision, {}
        try:
            views = self._read([each.service for each in watches])
        except RegistryRefused:  # perhaps only one of the others
            views = self._read([watch.service])
        ahead = {
            each.service: EtcdView(view.records, view.revision, watch=each)
            for each, view in zip(watches, views, strict=False)
        }
        view = ahead.pop(watch.service)
        is_lost = view.revision < before
        with self._changed:
            seen = 0 if is_lost else self._last_revision
            self._last_revision = max(seen, view.revision)
        if is_lost:
            self._polling.report_contact_lost(f"{self._client.where}: {DATA_LOST}")
        self._read_ahead = ahead
        return view

    def _created_watch(self, stream: _Stream, service: str) -> _KeyWatch:
        """Return the watch of a service, which etcd has confirmed.

        If there is none, those of the services that are read in full next are created, too.

        Raises:
            RegistryError: etcd does not confirm the watch.
        """
        with self._changed:
            if service not in stream.by_service:
                for each in (service, *self._polling.due_in_full()):
                    if each not in stream.by_service:
                        self._create(stream, each)
            watch = stream.by_service[service]
            self._changed.wait_for(
                lambda: not stream.creating or stream.end_reason, self._timeout_s
            )
            if watch.refusal:
                del stream.by_service[service]
        if watch.is_created:
            return watch
        if watch.refusal:
            self._read([service])  # raises if etcd refuses this, too
            self._end(stream, f"a token is no longer valid: {watch.refusal}")
        elif not stream.end_reason:
            self._end(stream, f"no answer in {self._timeout_s:g} s")
        raise RegistryUnavailable(stream.end_reason)

    def _open(self) -> _Stream:
        requests: SimpleQueue[object] = SimpleQueue()
        call = self._client.watch(iter(requests.get, None))
        stream = _Stream(call, requests)
        thread = threading.Thread(
            target=self._run, args=(stream,), name="rpcwheel-etcd-watch", daemon=True
        )
        try:
            thread.start()
        except RuntimeError as error:  # "can't start new thread"
            _release(stream)
            raise RegistryUnavailable(f"{self._client.where}: {error}") from error
        with self._changed:
            self._stream, self._thread = stream, thread
            if self._closed:
                call.cancel()
        return stream

    def _create(self, stream: _Stream, service: str) -> None:
        number, prefix = next(stream.numbers), self._prefix_of(service)
        watch = stream.watches[number] = stream.by_service[service] = _KeyWatch(number, service)
        stream.creating.append(watch)
        create = self._messages.WatchCreateRequest(
            key=prefix, range_end=range_end(prefix), watch_id=number
        )
        stream.requests.put(self._messages.WatchRequest(create=create))

    def _probe(self) -> None:
        """Send a probe, or end the stream if the last one had no response in time.

        Without a stream, all services are read again anyway.
        """
        with self._changed:
            stream, now_ns = self._stream, self._now_ns()
            if stream is None or stream.end_reason:
                return
            if stream.probed_ns is None:
                stream.probed_ns = now_ns
                progress = self._messages.WatchProgressRequest()
                stream.requests.put(self._messages.WatchRequest(progress=progress))
                return
            is_late = now_ns - stream.probed_ns >= to_ns(self._timeout_s)
        if is_late:
            self._end(stream, f"no answer in {self._timeout_s:g} s")

    def _end(self, stream: _Stream, reason: str) -> None:
        """End a stream, and have the next one use another connection."""
        with self._changed:
            stream.end_reason = f"{self._client.where}: {reason}"
        stream.call.drop()

    # On the thread of the stream

    def _run(self, stream: _Stream) -> None:
        reason = f"{self._client.where}: etcd has ended the stream"
        try:
            for message in stream.call:
                self._received(stream, message)
        except RegistryError as error:
            reason = str(error)
        except Exception as error:  # noqa: BLE001 - a bug in this package; watches continue
            emit(TaskFailed(timer="etcd", task="watch", error=error))
            reason = f"{self._client.where}: {error!r}"
        _release(stream)
        with self._changed:
            stream.end_reason = stream.end_reason or reason
            self._changed.notify_all()
            if not any(watch.is_created for watch in stream.watches.values()):
                return  # the read that has opened the stream fails, and is repeated later
            self._changed.wait_for(lambda: self._closed, RANDOM.uniform(0, FIRST_RETRY_S))
        self._polling.report_contact_lost(stream.end_reason)

    def _received(self, stream: _Stream, message: Any) -> None:
        with self._changed:
            stream.probed_ns = None
            if message.created:
                self._note_created(stream, message)
                return
            watch = stream.watches.get(message.watch_id)
            if watch is not None and message.canceled:
                stream.forget(watch)
            elif watch is not None:
                self._note_changes(stream, watch, message.events)
            is_older = message.header.revision < self._last_revision and not message.events
        if watch is not None:
            self._polling.request_read(watch.service)
        elif is_older:
            self._polling.request_read(full=True)

    def _note_created(self, stream: _Stream, message: Any) -> None:
        """Note that etcd has created or refused the first of the watches that wait for it."""
        watch = stream.creating.popleft()
        watch.is_created = not message.canceled
        if message.canceled:
            watch.refusal = message.cancel_reason or "etcd has refused the watch"
            del stream.watches[watch.number]
        self._changed.notify_all()

    def _note_changes(self, stream: _Stream, watch: _KeyWatch, events: Iterable[Any]) -> None:
        """Add changes to their watch, or cancel it if the service has no watcher any more."""
        if watch.service not in self._polling.services:
            stream.forget(watch)
            cancel = self._messages.WatchCancelRequest(watch_id=watch.number)
            stream.requests.put(self._messages.WatchRequest(cancel=cancel))
            return
        prefix = self._prefix_of(watch.service)
        for event in events:
            id_, value = id_of(event.kv.key, prefix), None if event.type else event.kv.value
            if not watch.changes or (value is None and id_ in watch.changes[-1]):
                watch.changes.append({})
            watch.changes[-1][id_] = WatchChange(value, event.kv.mod_revision)
            self._last_revision = max(self._last_revision, event.kv.mod_revision)


def _release(stream: _Stream) -> None:
    stream.call.cancel()
    stream.requests.put(None)  # ends gRPC's thread, which waits for the next request


def id_of(key: bytes, prefix: bytes) -> str:
    """Return the id in a key below the prefix; others may have put keys that are not UTF-8."""
    return key[len(prefix) :].decode(errors="backslashreplace")


def range_end(prefix: bytes) -> bytes:
    """Return the first key after all that begin with the prefix, whose last byte is not 0xff."""
    return prefix[:-1] + bytes([prefix[-1] + 1])
