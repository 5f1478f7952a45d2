"""Who is told what became of a heartbeat: listeners and sinks, in order, and none can hold it up.

Facts wait in a queue under the lock of the heartbeat; one job at a time takes them out, where
users' code may run. A listener that hangs holds up the listeners and events of its own heartbeat,
and nothing else; when too many facts wait there, the oldest are forgotten.
"""

from __future__ import annotations

import inspect
import threading
from collections import deque
from typing import TYPE_CHECKING, Any, Final, cast

from rpcwheel.durations import to_seconds
from rpcwheel.observe import emit
from rpcwheel.observe.events import (
    CallbackFailed,
    ConnectionAlive,
    ConnectionDead,
    Event,
    HeartbeatMissed,
)

from .rules import Changed, Died, Missed, Revived

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from threading import RLock

__all__ = ["Teller", "checked_listener"]

MOST: Final = 1024
"""Facts that wait; one who hangs for ever must not take all memory."""


class Teller:
    """The facts of one heartbeat, on their way out."""

    def __init__(
        self,
        owner: Any,
        lock: RLock,
        soon: Callable[[Callable[[], object]], object],
        calls: Callable[[], int],
    ) -> None:
        """Begin.

        Args:
            owner: The heartbeat.
            lock: Its lock, re-entrant.
            soon: Runs a job where users' code may run.
            calls: Says how many calls are in flight on its connection.
        """
        self._owner = owner
        self._lock = lock
        self._soon = soon
        self._calls = calls
        self._facts: deque[object] = deque(maxlen=MOST)
        self._told = threading.Condition(lock)
        self._telling = False
        self._listeners: tuple[Callable[..., object], ...] = ()

    def add(self, listener: Callable[..., object]) -> None:
        """Call it from the next fact on."""
        with self._lock:
            self._listeners = (*self._listeners, listener)

    def remove(self, listener: object) -> None:
        """Call it no more; an unknown one is no error."""
        with self._lock:
            self._listeners = tuple(known for known in self._listeners if known != listener)

    @property
    def has_listeners(self) -> bool:
        """Whether users' own functions are called."""
        return bool(self._listeners)

    def take(self, *facts: object) -> None:
        """Keep what is to be told, of the core or an event as it is; `flush` has it told."""
        with self._lock:
            for fact in facts:
                if isinstance(fact, Died):  # its calls are counted before they are ended
                    self._facts.append(self._event(fact))
                elif self._listeners or not isinstance(
                    fact, Changed
                ):  # or each heartbeat costs more
                    self._facts.append(fact)

    def flush(self) -> None:
        """Have told what waits. Not under the lock."""
        with self._lock:
            if self._telling or not self._facts:
                return
            self._telling = True
        self._soon(self._tell)

    def wait(self, seconds: float) -> None:
        """Wait until all is told, but no longer than that. On a worker."""
        with self._told:
            self._told.wait_for(lambda: not self._telling, seconds)

    def _tell(self) -> None:
        for fact, listeners in self._waiting():
            if isinstance(fact, Changed):
                for listener in listeners:
                    self._call(listener, fact)
            else:
                emit(self._event(fact))

    def _waiting(self) -> Iterable[tuple[object, tuple[Callable[..., object], ...]]]:
        while True:
            with self._lock:
                if not self._facts:
                    self._telling = False
                    self._told.notify_all()
                    return
                item = self._facts.popleft(), self._listeners
            yield item

    def _call(self, listener: Callable[..., object], fact: Changed) -> None:
        try:
            listener(self._owner, fact.old, fact.new)
        except BaseException as error:  # noqa: BLE001 - a listener of the user's harms nothing
            emit(CallbackFailed(self._owner.target, repr(listener), error))

    def _event(self, fact: object) -> Event:
        target = self._owner.target
        match fact:
            case Missed(misses, silent_ns, answer):
                return HeartbeatMissed(target, misses, to_seconds(silent_ns), answer)
            case Died(silent_ns, misses):
                return ConnectionDead(target, to_seconds(silent_ns), misses, self._calls())
            case Revived(after_ns, rtt_ns):
                rtt_s = None if rtt_ns is None else to_seconds(rtt_ns)
                return ConnectionAlive(target, to_seconds(after_ns), rtt_s)
            case _:
                return cast("Event", fact)


def checked_listener(listener: object) -> Any:
    """Give `listener` back.

    Raises:
        TypeError: It can't be called with three arguments, or is a coroutine function.
    """
    if (
        not callable(listener)
        or inspect.iscoroutinefunction(listener)
        or not _takes(listener, "heartbeat", "old", "new")
    ):
        raise TypeError(
            "listener must be a plain function (heartbeat, old, new); for a coroutine give one "
            f"that starts a task of it; not {listener!r}"
        )
    return listener


def _takes(function: Callable[..., object], *arguments: object) -> bool:
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError:
        return False
    except ValueError:  # one that C made, and that does not say
        return True
    return True
