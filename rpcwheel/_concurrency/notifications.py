"""A queue for events and callbacks that must not run under a lock or on one of gRPC's threads."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

from rpcwheel.events import emit

from .callbacks import run_callback
from .executor import SerialExecutor

if TYPE_CHECKING:
    from collections.abc import Callable

    from rpcwheel.events import Event

LIMIT: Final = 1024
"""Notifications that may wait. Beyond it the oldest are dropped, as a sink may hang forever."""

FLUSH_TIMEOUT_S: Final = 0.25
"""Seconds for which a component that closes waits for its last notifications."""


class NotificationQueue(SerialExecutor):
    """Emits events and calls listeners in order, one at a time. Thread-safe.

    A sink or listener that hangs delays only the later notifications of this queue.
    """

    def __init__(self, *, run: Callable[[Callable[[], object]], object] | None = None) -> None:
        """Create an empty queue; `run` as in `SerialExecutor`."""
        super().__init__(limit=LIMIT, run=run)

    def emit(self, *events: Event) -> None:
        """Emit events after the waiting notifications; together they count once for `LIMIT`."""
        if events:
            self.submit(partial(_emit_all, events))

    def call(self, subject: str, callback: Callable[..., object], *args: object) -> None:
        """Call a listener after the waiting notifications. Exceptions become `CallbackFailed`."""
        self.submit(partial(run_callback, subject, callback, *args, catch=BaseException))


def _emit_all(events: tuple[Event, ...]) -> None:
    for event in events:
        emit(event)
