"""Watches of etcd: one stream and one thread for all services of a backend.

The thread opens the stream, receives its responses, reads, and calls the watchers, as
`etcd_watch_core` decides. Other threads, such as the timer's, only put requests into the stream's
queue or end the stream, neither of which blocks.
"""

from __future__ import annotations

import threading
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Final

from rpcwheel._concurrency.executor import EXECUTOR
from rpcwheel.durations import NEVER, to_ns
from rpcwheel.errors import RegistryError, RegistryUnavailable
from rpcwheel.events import TaskFailed, emit
from rpcwheel.registry.backend import View
from rpcwheel.registry.one_shot_timer import OneShotTimer
from rpcwheel.timer.manual import clock_of

from . import etcd_watch_core as core
from .etcd_client import messages
from .watch_notifier import WatchNotifier

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from rpcwheel.registry.backend import Settings, Watcher

    from .etcd_client import EtcdClient, WatchStream

REREAD_INTERVAL_S: Final = 600.0
"""Between reads of all watched services although nothing has changed: a safety net only."""

MAX_RETRY_S: Final = 5.0
JOIN_TIMEOUT_S: Final = 1.0


class EtcdWatches:
    """All watches of one backend. Thread-safe. Its thread runs from the first watch to `stop`."""

    def __init__(
        self,
        client: EtcdClient,
        read: Callable[[Iterable[bytes]], tuple[int, list[Mapping[str, bytes]]]],
        settings: Settings,
    ) -> None:
        """Prepare; starts nothing.

        `read` reads the revision, and the records by id below each of the prefixes as of that
        revision. It may raise RegistryError.
        """
        self._client = client
        self._read = read
        self._now_ns = clock_of(settings.timer)
        self._messages = messages()
        probe_interval_s = settings.lease_s / 3
        self._core = core.WatchCore(
            probe_interval_ns=to_ns(probe_interval_s),
            timeout_ns=to_ns(settings.timeout_s),
            reread_interval_ns=to_ns(REREAD_INTERVAL_S),
            max_retry_ns=to_ns(min(probe_interval_s, MAX_RETRY_S)),
        )
        self._changed = threading.Condition()  # not held while anything blocks or is notified
        self._watchers: dict[int, tuple[WatchNotifier, bytes]] = {}  # with the prefix
        self._last_number = 0
        self._thread: threading.Thread | None = None
        self._stream: WatchStream | None = None
        self._requests: SimpleQueue[object] = SimpleQueue()
        self._must_open = False
        self._closed = False
        self._timer = OneShotTimer(settings.timer, self._tick, client.where)

    def watch(self, prefix: bytes, watcher: Watcher) -> WatchNotifier:
        """Notify the watcher of all keys below a prefix from now on.

        Raises:
            RegistryUnavailable: The system can't start a thread.
        """
        with self._changed:
            self._last_number += 1
            number = self._last_number
            notifier = WatchNotifier(watcher, lambda _: self._remove(number))
            if not self._closed:
                self._start_thread()
                self._watchers[number] = notifier, prefix
                self._perform(self._core.add(number, prefix, self._now_ns()))
        if self._closed:
            notifier.close()
        return notifier

    def stop(self) -> None:
        """Close all watches, and let the thread end soon. Idempotent."""
        with self._changed:
            self._closed = True
            watchers = list(self._watchers.values())
            self._end_stream()
            self._changed.notify_all()
        for notifier, _ in watchers:
            notifier.close()
        with self._changed:
            self._set_timer()

    def join(self) -> None:
        """Wait for the thread to end, at most `JOIN_TIMEOUT_S`."""
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(JOIN_TIMEOUT_S)

    def _remove(self, number: int) -> None:
        if self._client.forked:  # the lock may be held by a thread of the parent
            return
        with self._changed:
            if self._watchers.pop(number, None) is not None:
                self._perform(self._core.remove(number))

    # With the lock, on any thread

    def _start_thread(self) -> None:
        if self._thread is not None:
            return
        thread = threading.Thread(target=self._run, name="rpcwheel-etcd-watch", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # "can't start new thread"
            raise RegistryUnavailable(f"{self._client.where}: {error}") from error
        self._thread = thread

    def _perform(self, actions: list[core.Action]) -> list[core.Action]:
        """Perform the actions that do not block; returns the others, for the watch thread."""
        messages = self._messages
        others: list[core.Action] = []
        for action in actions:
            match action:
                case core.OpenStream():
                    self._must_open = True
                    self._changed.notify_all()
                case core.CreateWatch(number, prefix):
                    create = messages.WatchCreateRequest(
                        key=prefix, range_end=range_end(prefix), watch_id=number
                    )
                    self._requests.put(messages.WatchRequest(create=create))
                case core.CancelWatch(number):
                    cancel = messages.WatchCancelRequest(watch_id=number)
                    self._requests.put(messages.WatchRequest(cancel=cancel))
                case core.SendProbe():
                    self._requests.put(
                        messages.WatchRequest(progress=messages.WatchProgressRequest())
                    )
                case core.EndStream(unresponsive):
                    self._end_stream(unresponsive=unresponsive)
                case core.Read() | core.NotifyView() | core.NotifyContactLost():
                    others.append(action)
        self._set_timer()
        return others

    def _end_stream(self, *, unresponsive: bool = False) -> None:
        """End the stream; also drop its connection if that is `unresponsive`."""
        if self._stream is not None:
            EXECUTOR.submit(self, self._stream.drop if unresponsive else self._stream.cancel)

    def _set_timer(self) -> None:
        self._timer.set(NEVER if self._closed else self._core.next_wake_ns)

    # On the timer's thread

    def _tick(self) -> None:
        if self._client.forked:
            return
        with self._changed:
            if not self._closed:
                self._perform(self._core.tick(self._now_ns()))

    # On the watch thread

    def _run(self) -> None:
        while self._wait_until_needed():
            try:
                self._run_stream()
                reason = "etcd has ended the stream"
            except RegistryError as error:
                reason = str(error)
            except Exception as error:  # noqa: BLE001 - a bug in this package; watches continue
                emit(TaskFailed(timer="etcd", task="watch", error=error))
                reason = repr(error)
            with self._changed:
                self._stream = None
                actions = self._perform(self._core.ended(reason, self._now_ns()))
            self._perform_blocking(actions)

    def _wait_until_needed(self) -> bool:
        """Wait until a stream must be opened; False if the backend was closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._must_open or self._closed)
            self._must_open = False
            return not self._closed

    def _run_stream(self) -> None:
        """Open a stream and handle its responses until it ends."""
        requests: SimpleQueue[object] = SimpleQueue()
        stream = None
        try:
            with self._changed:
                first = next((prefix for _, prefix in self._watchers.values()), b"")
            stream = self._client.watch(iter(requests.get, None), first)
            with self._changed:
                self._stream, self._requests = stream, requests
                if self._closed:
                    self._end_stream()
                actions = self._perform(self._core.opened(self._now_ns()))
            self._perform_blocking(actions)
            for message in stream:
                response = self._response(message)
                is_refused = response.created and response.canceled
                if is_refused and self._client.has_new_token(stream, first):
                    return
                with self._changed:
                    actions = self._perform(self._core.received(response, self._now_ns()))
                self._perform_blocking(actions)
        finally:
            if stream is not None:
                stream.cancel()
            requests.put(None)  # ends gRPC's thread, which waits for the next request

    def _response(self, message: Any) -> core.WatchResponse:
        """Convert etcd's message; changes of an unknown watch are left out."""
        number = message.watch_id if message.watch_id > 0 else -1
        watcher = self._watchers.get(number)
        prefix = watcher[1] if watcher else b""
        changes = (
            core.WatchChange(
                id_of(event.kv.key, prefix),
                None if event.type else event.kv.value,
                event.kv.mod_revision,
            )
            for event in (message.events if watcher else ())
        )
        return core.WatchResponse(
            number=number,
            revision=message.header.revision,
            created=message.created,
            canceled=message.canceled,
            reason=message.cancel_reason,
            changes=tuple(changes),
        )

    def _perform_blocking(self, actions: list[core.Action]) -> None:
        """Read and call the watchers."""
        for action in actions:
            match action:
                case core.Read(prefixes):
                    revision, contents = self._read(prefixes.values())
                    by_number = dict(zip(prefixes, contents, strict=True))
                    with self._changed:
                        more = self._perform(self._core.read(by_number, revision, self._now_ns()))
                    self._perform_blocking(more)
                case core.NotifyView(number, records, revision, changed):
                    self._notify(number, View(records, revision, changed))
                case core.NotifyContactLost(number, reason):
                    where = self._client.where
                    is_complete = reason.startswith(where)  # the text of a RegistryError
                    self._notify(number, reason if is_complete else f"{where}: {reason}")

    def _notify(self, number: int, news: View | str) -> None:
        notifier, _ = self._watchers.get(number, (None, b""))
        if notifier is not None:
            notifier.add(news)
            notifier.start()


def id_of(key: bytes, prefix: bytes) -> str:
    """Return the id in a key below the prefix; others may have put keys that are not UTF-8."""
    return key[len(prefix) :].decode(errors="backslashreplace")


def range_end(prefix: bytes) -> bytes:
    """Return the first key after all that begin with the prefix, whose last byte is not 0xff."""
    return prefix[:-1] + bytes([prefix[-1] + 1])
