"""The sinks of this process, and `emit`, which calls them.

Sinks are added and removed under a lock. `emit` reads the tuple of sinks without a lock, so it
costs one call per sink.
"""

import contextlib
import logging
import os
import threading
from collections.abc import Callable
from typing import Final, TypeAlias

from rpcwheel.errors import check_callback

from .events import Event
from .log import log_event

Sink: TypeAlias = Callable[[Event], None]

_LOG: Final = logging.getLogger("rpcwheel")


class SinkList:
    """A list of sinks, and those whose exceptions were reported."""

    def __init__(self) -> None:
        self._sinks: tuple[Sink, ...] = (log_event,)
        self._broken: tuple[Sink, ...] = ()
        self.new_lock()

    def new_lock(self) -> None:
        """Replace the lock, in a forked child, where the old one may never be released."""
        self._lock = threading.RLock()  # a finalizer may emit at any time

    def emit(self, event: Event) -> None:
        """Call every sink with `event`. Thread-safe. Exceptions of sinks are logged, not raised.

        On the main thread, `SystemExit` and `KeyboardInterrupt` are raised: they may come from a
        signal handler. On other threads they would end a timer or a worker.
        """
        for sink in self._sinks:
            try:
                sink(event)
            except BaseException as error:
                is_main = threading.current_thread() is threading.main_thread()
                if is_main and isinstance(error, (SystemExit, KeyboardInterrupt)):
                    raise
                self._report(sink)

    def add_sink(self, sink: Sink) -> None:
        """Call `sink` with every event from now on. Adding a sink twice has no effect.

        Args:
            sink: Called as `sink(event)` on the thread on which the event happened; must not block.
                If it raises an exception, that is logged once, and it is still called.

        Raises:
            TypeError: `sink` is not callable, or a coroutine function.
        """
        check_callback(sink, "a sink", "sink(event)")
        with self._lock:
            if sink not in self._sinks:
                self._sinks = (*self._sinks, sink)

    def remove_sink(self, sink: Sink) -> None:
        """Stop calling `sink`, which may be `log_event`. An unknown sink is no error."""
        with self._lock:
            self._sinks = tuple(other for other in self._sinks if other != sink)
            self._broken = tuple(other for other in self._broken if other != sink)

    def _report(self, sink: Sink) -> None:
        with self._lock:
            if sink in self._broken:
                return
            self._broken = (*self._broken, sink)
        with contextlib.suppress(Exception):  # of a filter or handler of the user's
            _LOG.exception(
                "the event sink %r raised; it is still called, but later exceptions are not logged",
                sink,
            )


_SINKS: Final = SinkList()
emit: Final = _SINKS.emit
add_sink: Final = _SINKS.add_sink
remove_sink: Final = _SINKS.remove_sink

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_SINKS.new_lock)
