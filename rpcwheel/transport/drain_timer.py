"""The timeout after which calls on an old connection are ended, in both worlds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rpcwheel.durations import to_seconds
from rpcwheel.errors import TimerError
from rpcwheel.events import ExecutorRejected, emit
from rpcwheel.timer import shared_timer

if TYPE_CHECKING:
    from rpcwheel.timer import Timeout
    from rpcwheel.timer.api import TaskLike, Timer


def new_drain_timeout(
    timer: Timer | None, end: TaskLike, drain_ns: int, target: str
) -> Timeout | None:
    """Run `end` after `drain_ns` on the timer (None: `shared_timer()`).

    Returns:
        None if the timer is stopped or full, or its thread can't be started. The event
        `ExecutorRejected` reports it. The caller ends the drain at once, or it would never end.
    """
    try:
        timer = shared_timer() if timer is None else timer
        return timer.new_timeout(end, to_seconds(drain_ns))
    except (TimerError, RuntimeError) as error:  # RuntimeError: "can't start new thread"
        name = str(getattr(timer, "name", type(timer).__name__))
        emit(ExecutorRejected(name, f"drain of a connection to {target}", error))
        return None
