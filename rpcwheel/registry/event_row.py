"""Events of one session, told in a row on a worker: a sink that hangs holds up nothing else."""

from __future__ import annotations

import threading
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from rpcwheel._concurrency.executor import SerialExecutor
from rpcwheel.observe import emit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = ["CHANCE_S", "EventRow"]

MOST: Final = 1024
"""Events that wait; a sink that hangs for ever must not take all memory."""

CHANCE_S: Final = 0.25
"""Seconds that the end waits for what is still to be told."""


class EventRow:
    """Tells events, in order. Thread-safe; never blocks but in `flush`."""

    def __init__(self) -> None:
        self._row = SerialExecutor(MOST)

    def tell(self, events: Iterable[Any]) -> None:
        """Have all sinks told."""
        for event in events:
            self._row.submit(partial(emit, event))

    def flush(self, timeout_s: float = CHANCE_S) -> bool:
        """Wait until all that waits is told, so long at most; whether it is."""
        told = threading.Event()
        self.then(told.set)
        return told.wait(timeout_s)

    def then(self, done: Callable[[], object]) -> None:
        """Call this, on a worker, when all that waits is told."""
        self._row.submit(done)
