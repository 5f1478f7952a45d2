"""Watches etcd: one stream and one thread for all services of a backend.

The thread opens the stream, listens to it, and does what `_etcd_core` says; nobody else tells the
watchers anything. Other threads (the timer's too) only put messages in the stream's queue or end
the stream, neither of which blocks.
"""

from __future__ import annotations

import threading
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Final

from rpcwheel._concurrency.executor import EXECUTOR
from rpcwheel.durations import NEVER, to_ns
from rpcwheel.errors import RegistryError, RegistryUnavailable
from rpcwheel.observe import TaskFailed, emit
from rpcwheel.observe.events import RegistryFailed
from rpcwheel.registry.backend import View
from rpcwheel.registry.one_shot_timer import OneShotTimer
from rpcwheel.timer.clock import clock_of

from .etcd_client import messages
from .etcd_watch_core import (
    Break,
    Cancel,
    Change,
    Create,
    Heard,
    Look,
    Open,
    Probe,
    Saw,
    Suspect,
    WatchCore,
)
from .watch_notifier import WatchNotifier

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from rpcwheel.errors import TimerError
    from rpcwheel.registry.backend import Settings, Watcher

    from .etcd_client import EtcdClient, Stream
    from .etcd_watch_core import Action

__all__ = ["EtcdWatches"]

RELOOK_S: Final = 60.0
"""Seconds between looks at all there is though nothing seems to be missing."""

LONGEST_RETRY_S: Final = 5.0
JOIN_S: Final = 1.0


class EtcdWatches:
    """All watches of one backend. Thread-safe. The thread lasts from the first one to `stop`."""

    def __init__(
        self,
        client: EtcdClient,
        look: Callable[[Iterable[bytes]], tuple[int, list[Mapping[bytes, bytes]]]],
        settings: Settings,
    ) -> None:
        """Take note.

        Args:
            client: For the stream.
            look: Asks etcd for the records below each of the prefixes, all as of one revision,
                which comes first. May raise RegistryError.
            settings: For the times.
        """
        self._client = client
        self._ask = look
        self._clock = clock_of(settings.timer)
        self._messages = messages()
        step_s = settings.lease_s / 3
        self._core = WatchCore(
            step_ns=to_ns(step_s),
            timeout_ns=to_ns(settings.timeout_s),
            relook_ns=to_ns(RELOOK_S),
            retry_ns=to_ns(min(step_s, LONGEST_RETRY_S)),
        )
        self._changed = threading.Condition()  # never held while something blocks or is told
        self._told: dict[int, tuple[WatchNotifier, bytes]] = {}  # with the prefix
        self._count = 0
        self._thread: threading.Thread | None = None
        self._stream: Stream | None = None
        self._requests: SimpleQueue[object] = SimpleQueue()
        self._to_open = False
        self._closed = False
        self._alarm = OneShotTimer(settings.timer, self._tick, self._refused)
        self._wake_ns = NEVER  # what it is set to

    def watch(self, prefix: bytes, watcher: Watcher) -> WatchNotifier:
        """Tell the watcher of all keys below a prefix, from now on.

        Raises:
            RegistryUnavailable: The system gives no thread.
        """
        with self._changed:
            self._count += 1
            number = self._count
            notifier = WatchNotifier(watcher, lambda _: self._drop(number))
            if not self._closed:
                self._start()
                self._told[number] = notifier, prefix
                self._order(self._core.add(number, prefix, self._clock()))
        if self._closed:
            notifier.close()
        return notifier

    def stop(self) -> None:
        """Tell nobody anything from now on, and have the thread end soon. Idempotent."""
        with self._changed:
            self._closed = True
            told = list(self._told.values())
            self._end_stream()
            self._changed.notify_all()
        for notifier, _ in told:
            notifier.close()
        with self._changed:
            self._plan()

    def join(self) -> None:
        """Wait for the thread to end, a second at most."""
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(JOIN_S)

    def _drop(self, number: int) -> None:
        if self._client.forked:  # whoever held the lock then is not here
            return
        with self._changed:
            if self._told.pop(number, None) is not None:
                self._order(self._core.remove(number))

    # With the lock, on any thread

    def _start(self) -> None:
        if self._thread is not None:
            return
        thread = threading.Thread(target=self._run, name="rpcwheel-etcd-watch", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # "can't start new thread"
            raise RegistryUnavailable(f"{self._client.where}: {error}") from error
        self._thread = thread

    def _order(self, actions: list[Action]) -> list[Action]:
        """Do what needs no blocking; gives the rest back, which only the thread gets."""
        rest: list[Action] = []
        for action in actions:
            match action:
                case Open():
                    self._to_open = True
                    self._changed.notify_all()
                case Create() | Cancel() | Probe():
                    self._requests.put(self._request(action))
                case Break(silent):
                    self._end_stream(silent=silent)
                case Look() | Saw() | Suspect():
                    rest.append(action)
        self._plan()
        return rest

    def _request(self, action: Create | Cancel | Probe) -> object:
        made = self._messages
        match action:
            case Create(number, prefix):
                create = made.WatchCreateRequest(
                    key=prefix, range_end=end_of(prefix), watch_id=number
                )
                return made.WatchRequest(create=create)
            case Cancel(number):
                return made.WatchRequest(cancel=made.WatchCancelRequest(watch_id=number))
            case Probe():
                return made.WatchRequest(progress=made.WatchProgressRequest())

    def _end_stream(self, *, silent: bool = False) -> None:
        """`silent`: since it has not answered, which is its connection's fault."""
        if self._stream is not None:
            EXECUTOR.submit(self, self._stream.leave if silent else self._stream.cancel)

    def _plan(self) -> None:
        """Have the alarm ring when the core wants to be woken."""
        wake_ns = NEVER if self._closed else self._core.next_wake_ns
        if wake_ns != self._wake_ns:
            self._alarm.clear()
        self._wake_ns = wake_ns
        self._alarm.wake(wake_ns)

    def _refused(self, error: TimerError) -> None:
        failed = RegistryFailed(self._client.where, "watch", error, None)
        EXECUTOR.submit(failed, partial(emit, failed))

    def _tick(self) -> None:
        if self._client.forked:
            return
        with self._changed:
            self._alarm.rang()
            if not self._closed:
                self._wake_ns = NEVER
                self._order(self._core.tick(self._clock()))

    # On the thread

    def _run(self) -> None:
        while self._may_open():
            try:
                self._follow()
                reason = "etcd has ended the stream"
            except RegistryError as error:
                reason = str(error)
            except Exception as error:  # noqa: BLE001 - a bug of ours; the watches must go on
                emit(TaskFailed(timer="etcd", task="watch", error=error))
                reason = repr(error)
            with self._changed:
                self._stream = None
                rest = self._order(self._core.ended(reason, self._clock()))
            self._do(rest)

    def _may_open(self) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._to_open or self._closed)
            self._to_open = False
            return not self._closed

    def _follow(self) -> None:
        """Listen to a stream until it ends."""
        requests: SimpleQueue[object] = SimpleQueue()
        stream = None
        try:
            with self._changed:
                first = next((prefix for _, prefix in self._told.values()), b"")
            stream = self._client.watch(iter(requests.get, None), first)
            with self._changed:
                self._stream, self._requests = stream, requests
                if self._closed:
                    self._end_stream()
                rest = self._order(self._core.opened(self._clock()))
            self._do(rest)
            for answer in stream:
                told = heard(answer)
                if told.created and told.canceled and self._client.outdated(stream, first):
                    return
                with self._changed:
                    rest = self._order(self._core.heard(told, self._clock()))
                self._do(rest)
        finally:
            if stream is not None:
                stream.cancel()
            requests.put(None)  # or gRPC's thread would wait for the next one for ever

    def _do(self, actions: list[Action]) -> None:
        """What only the thread may: block, and tell."""
        for action in actions:
            match action:
                case Look(prefixes):
                    revision, found = self._ask(prefixes.values())
                    with self._changed:
                        rest = self._order(
                            self._core.looked(
                                dict(zip(prefixes, found, strict=True)), revision, self._clock()
                            )
                        )
                    self._do(rest)
                case Saw(number, records, revision):
                    self._tell(number, records, revision)
                case Suspect(number, reason):
                    where = self._client.where
                    known = reason.startswith(where)  # an error says it already
                    self._tell(number, reason if known else f"{where}: {reason}")

    def _tell(self, number: int, news: Mapping[bytes, bytes] | str, revision: int = 0) -> None:
        notifier, prefix = self._told.get(number, (None, b""))
        if notifier is not None:
            if isinstance(news, str):
                notifier.add(news)
            else:
                notifier.add(View(by_id(news, prefix), revision))
            notifier.start()


def by_id(records: Mapping[bytes, bytes], prefix: bytes) -> dict[str, bytes]:
    """What follows the prefix; keys of others may be no text."""
    length = len(prefix)
    return {key[length:].decode(errors="backslashreplace"): records[key] for key in records}


def end_of(prefix: bytes) -> bytes:
    """The first key behind all that begin with the prefix, whose last byte is not the highest."""
    return prefix[:-1] + bytes([prefix[-1] + 1])


def heard(answer: Any) -> Heard:
    """A WatchResponse in our words."""
    return Heard(
        number=-1 if answer.watch_id in {-1, 0} else answer.watch_id,
        revision=answer.header.revision,
        created=answer.created,
        canceled=answer.canceled,
        reason=answer.cancel_reason,
        changes=tuple(
            Change(event.kv.key, None if event.type else event.kv.value, event.kv.mod_revision)
            for event in answer.events
        ),
    )
