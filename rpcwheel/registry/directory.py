"""What one process knows of one service: told by a provider, shown to whoever asks.

A directory is the hands of `Seen`. What a provider tells is only noted on its thread; reading it,
the file, users' listeners and events run on the shared workers, each in a row of its own:

* what is heard, in order (`_hearing`), which alone touches the core; of views in a row that come
  faster than it can read them, only the last, and what those said last that are gone by then;
* the events of that (`_events`), as a sink that hangs must not keep the list from changing;
* the listeners, in `ROWS` rows: one that hangs holds up no other as long as there are no more of
  them than rows, and a thousand of them don't start a thousand threads.

What is shown is one immutable object that is replaced as a whole, so that looking takes no lock.
One alarm waits for the core's next wake.
"""

from __future__ import annotations

import itertools
import threading
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

from rpcwheel._concurrency.callbacks import run_callback
from rpcwheel._concurrency.executor import EXECUTOR, SerialExecutor, reset_after_fork
from rpcwheel._concurrency.notifications import NotificationQueue
from rpcwheel.durations import to_ns
from rpcwheel.observe import RegistryFailed
from rpcwheel.timer.clock import checked_timer, clock_of

from .alarm import Alarm
from .policy import RegistryPolicy
from .seen import Rules, Seen, Shown

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from rpcwheel.errors import TimerError
    from rpcwheel.instance import ServiceInstance, Snapshot
    from rpcwheel.timer.api import Timer

    from .provider import View
    from .seen import Event
    from .snapshots import Snapshots

__all__ = ["Directory", "Listening"]

ROWS: Final = 16
"""Rows for the listeners of a service."""

MOST_NEWS: Final = 64
"""Views and doubts by turns that wait; a core that is too slow for them misses some in the middle,
never the first or the last."""

LOAD_S: Final = 0.5
"""Seconds to wait for the file: it is read before anything is heard, but its disk may hang."""


class Listening:
    """A listener that is told of a service, until this is closed."""

    def __init__(self, directory: Directory, tell: Callable[[Snapshot], object]) -> None:
        """For `Directory.add`."""
        self._directory = directory
        self._tell = tell
        self._waits = False  # a look is in its row already
        self._revision = -1  # of what it was told last
        self._closed = False

    def close(self) -> None:
        """Call it no more; one call may be running. Idempotent; any thread."""
        self._closed = True
        self._directory.remove(self)

    def due(self, row: SerialExecutor) -> None:
        """Have it told of what is shown by then, once for all that comes until then."""
        if not self._waits:
            self._waits = True
            row.submit(self._look)

    def _look(self) -> None:
        self._waits = False  # before looking: what comes after is told by another look
        snapshot = self._directory.snapshot
        if snapshot is None or self._closed or snapshot.revision == self._revision:
            return
        self._revision = snapshot.revision
        run_callback(snapshot.service, self._tell, snapshot, catch=BaseException)


class _Heard(NamedTuple):
    """What the registry has, and what those said last that are gone, where nobody has looked."""

    records: Mapping[str, bytes]
    last_words: Mapping[str, bytes]

    def after(self, void: _Heard) -> _Heard:
        """The same, in the place of one that nobody has looked at."""
        said = {**void.last_words, **void.records}
        return self._replace(
            last_words={key: said[key] for key in said.keys() - self.records.keys()}
        )


class Directory:
    """One service, as far as it is known. Thread-safe; a `Watcher` for `provider.watch`.

    Close the watch first, then the directory, then the `Snapshots`. A forked child has what was
    known, and hears nothing more, as the provider's threads are not there.
    """

    def __init__(
        self,
        service: str,
        registry: str,
        policy: RegistryPolicy | None = None,
        *,
        timer: Timer | None = None,
        snapshots: Snapshots | None = None,
    ) -> None:
        """Begin; nothing is known yet, but perhaps by the file.

        Args:
            service: Its name.
            registry: The registry's name in events: its URL without a password.
            policy: `lease`, `hold` and `protect` are heeded here.
            timer: None for `shared_timer()`.
            snapshots: The file that is read now, and kept up to date; it stays the caller's.
        """
        self.service = service
        self._registry = registry
        self._timer = checked_timer(timer)
        self._clock = clock_of(timer)
        self._snapshots = snapshots
        self._seen = Seen(registry, service, Rules.of(policy or RegistryPolicy()), self._clock())
        self._shown: Shown | None = None
        self._closed = False
        self._hearing, self._events = SerialExecutor(), NotificationQueue()
        self._rows = tuple(SerialExecutor() for _ in range(ROWS))
        self._turn = itertools.count()
        self._listeners: dict[Listening, SerialExecutor] = {}
        self.reset()
        reset_after_fork(self)
        if snapshots is not None:
            self._hearing.submit(partial(self._load, snapshots))

    def reset(self) -> None:
        """Begin anew in a forked child."""
        self._changed = threading.Condition()
        self._alarm = Alarm(self._timer, self._wake, self._refused)
        self._news: list[_Heard | str] = []  # not looked at yet; no two of a kind in a row

    @property
    def snapshot(self) -> Snapshot | None:
        """What is known, with its age of now; None: nothing yet. Takes no lock."""
        shown = self._shown
        return None if shown is None else shown.at(self._clock())

    def add(self, listener: Callable[[Snapshot], object]) -> Listening:
        """Tell it of what is known, if anything is, and of what will be.

        It is called on a worker, one call at a time, each with all that is known then: of several
        changes it may see only the last. What it raises is an event, `CallbackFailed`.
        """
        listening = Listening(self, listener)
        row = self._rows[next(self._turn) % ROWS]
        with self._changed:
            if not self._closed:
                self._listeners[listening] = row
        if self._shown is not None and not self._closed:
            listening.due(row)
        return listening

    def remove(self, listening: Listening) -> None:
        """Tell it no more; what is not there is no error. `listening.close()` does it."""
        with self._changed:
            self._listeners.pop(listening, None)

    def wait(self, timeout_s: float | None = None) -> Snapshot | None:
        """Wait until something is known, and give it; a file counts once the registry has failed.

        Args:
            timeout_s: Real seconds, at most; None: no limit.

        Returns:
            What is known; None: nothing in time, or closed.
        """
        if timeout_s is not None:
            timeout_s = min(timeout_s, threading.TIMEOUT_MAX)
        with self._changed:
            self._changed.wait_for(lambda: self._shown is not None or self._closed, timeout_s)
        return self.snapshot

    def saw(self, view: View) -> None:
        """Take note of what the registry has now. Never blocks; any thread."""
        self._hear(_Heard(view.records, {}))

    def suspect(self, reason: str) -> None:
        """Take note that the registry has lost contact or memory. Never blocks; any thread."""
        self._hear(reason)

    def close(self) -> None:
        """Call no listener any more, keep no timeout, wake who waits. Idempotent; never blocks.

        What is known is still shown. If the registry agrees with it now, the file is told so.
        """
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._alarm.clear()
            listeners = list(self._listeners)
            self._changed.notify_all()
        for listening in listeners:
            listening.close()
        shown = self._shown
        if self._snapshots is not None and shown is not None and shown.since_ns is None:
            self._snapshots.keep(self.service, shown.snapshot.instances)

    # On the workers

    def _load(self, snapshots: Snapshots) -> None:
        """Have the file read before anything else is heard, if it can be read soon."""
        done = threading.Event()

        def load() -> None:
            try:
                found = snapshots.load(self.service)
                if found is not None:
                    age_ns = to_ns(found.age_s)
                    remember = partial(self._seen.remember, found.instances, age_ns)
                    self._hearing.submit(partial(self._think, remember), first=True)
            finally:
                done.set()

        EXECUTOR.submit((snapshots, "file"), load)
        done.wait(LOAD_S)

    def _hear(self, what: _Heard | str) -> None:
        """Have it looked at, in the place of what it makes void."""
        with self._changed:
            if self._closed:
                return
            news, waits = self._news, bool(self._news)
            if waits and isinstance(news[-1], str) == isinstance(what, str):
                void = news.pop()
                if isinstance(what, _Heard) and isinstance(void, _Heard):
                    what = what.after(void)
            news.append(what)
            if len(news) > MOST_NEWS:
                self._pass_over(news)
        if not waits:
            self._hearing.submit(self._look)

    @staticmethod
    def _pass_over(news: list[_Heard | str]) -> None:
        """Leave out a doubt and a view, the second of each; the next view has its last words."""
        (void,) = (one for one in news[1:3] if isinstance(one, _Heard))
        del news[1:3]
        place = 1 if isinstance(news[1], _Heard) else 2
        after = news[place]
        if isinstance(after, _Heard):
            news[place] = after.after(void)

    def _look(self) -> None:
        with self._changed:
            news, self._news = self._news, []
        for one in news:
            if isinstance(one, str):
                self._think(partial(self._seen.suspect, one))
            else:
                self._think(partial(self._seen.saw, one.records, last_words=one.last_words))

    def _think(self, what: Callable[[int], list[Event]]) -> None:
        """Tell the core, and show what it makes of it."""
        if self._closed:
            return
        events = what(self._clock())
        before, shown = self._shown, self._seen.shown
        self._shown = shown
        if shown is not None and (before is None or before.snapshot is not shown.snapshot):
            with self._changed:
                listeners = list(self._listeners.items())
                self._changed.notify_all()
            for listening, row in listeners:
                listening.due(row)
            if self._snapshots is not None and shown.snapshot.source != "cache":
                instances = shown.snapshot.instances
                agrees = partial(self._agrees, instances)
                self._snapshots.keep(self.service, instances, agrees)
        if events:
            self._events.emit(*events)
        self._arm(self._seen.next_wake_ns)

    def _arm(self, wake_ns: int) -> None:
        """Have the alarm ring for the core's next wake."""
        with self._changed:
            self._alarm.clear()
            if not self._closed:
                self._alarm.wake(wake_ns)

    def _wake(self) -> None:
        with self._changed:
            self._alarm.rang()
        self._hearing.submit(partial(self._think, self._seen.step))

    def _refused(self, error: TimerError) -> None:
        self._events.emit(RegistryFailed(self._registry, "watch", error, None))

    def _agrees(self, instances: tuple[ServiceInstance, ...]) -> bool | None:
        """Whether the registry still has just these; None: who knows, nobody follows it here."""
        shown = self._shown
        if self._closed or shown is None:
            return None
        return shown.since_ns is None and shown.snapshot.instances is instances
