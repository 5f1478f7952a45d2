"""The sinks: passes each event to all of them, and contains their exceptions.

A sink runs on the thread where the event happened, often a timer's or a worker's, so it must be
quick and must not block. The tuple of sinks is replaced as a whole under a lock and read without
one, so `emit` costs one call per sink.
"""

import logging
import os
import threading
from collections.abc import Callable
from typing import Final, TypeAlias

from .events import Event
from .log import log_event

Sink: TypeAlias = Callable[[Event], None]

_LOG: Final = logging.getLogger("rpcwheel")


class _Hub:
    """The sinks of this process, and which of them have been reported as broken."""

    def __init__(self) -> None:
        self._sinks: tuple[Sink, ...] = (log_event,)
        self._broken: tuple[Sink, ...] = ()
        self.new_lock()

    def new_lock(self) -> None:
        """Take a fresh lock: in a forked child the old one may be held for ever."""
        self._lock = threading.Lock()

    def emit(self, event: Event) -> None:
        """Pass `event` to every sink. Thread-safe; an exception of a sink is logged, not raised."""
        for sink in self._sinks:
            try:
                sink(event)
            except Exception:  # noqa: BLE001 - a user's sink must not hurt a call or a timer
                self._report(sink)

    def add_sink(self, sink: Sink) -> None:
        """Pass every event from now on to `sink`; adding it a second time changes nothing.

        Args:
            sink: Called as `sink(event)` on whichever thread the event happened; must not block.
                If it raises, that is logged once, and it is still called.

        Raises:
            TypeError: `sink` is not callable.
        """
        if not callable(sink):
            raise TypeError(f"a sink must be callable as sink(event), not {sink!r}")
        with self._lock:
            if sink not in self._sinks:
                self._sinks = (*self._sinks, sink)

    def remove_sink(self, sink: Sink) -> None:
        """Pass no more events to `sink`, which may be `log_event`; an unknown sink is no error."""
        with self._lock:
            self._sinks = tuple(known for known in self._sinks if known != sink)
            self._broken = tuple(known for known in self._broken if known != sink)

    def _report(self, sink: Sink) -> None:
        with self._lock:
            if sink in self._broken:
                return
            self._broken = (*self._broken, sink)
        _LOG.exception(
            "the event sink %r raised; it is still called, but this is logged only once", sink
        )


_HUB: Final = _Hub()
emit: Final = _HUB.emit
add_sink: Final = _HUB.add_sink
remove_sink: Final = _HUB.remove_sink

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_HUB.new_lock)
