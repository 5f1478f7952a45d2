"""A timeout on the best timer there is, for both worlds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rpcwheel.durations import to_seconds
from rpcwheel.errors import TimerError
from rpcwheel.timer import shared_timer

if TYPE_CHECKING:
    from rpcwheel.timer import Timeout
    from rpcwheel.timer.api import TaskLike, Timer

__all__ = ["timeout_on"]


def timeout_on(timer: Timer | None, task: TaskLike, drain_ns: int) -> Timeout | None:
    """Have `task` run after `drain_ns`, on `timer` or else on `shared_timer()`.

    The connection has been replaced already: that its timer was stopped, is full, or can't start
    its thread is no reason to fail, nor to let calls run on for ever.

    Returns:
        The timeout; None if there is no timer for it.
    """
    for one in (timer, None):
        try:
            return (shared_timer() if one is None else one).new_timeout(task, to_seconds(drain_ns))
        except (TimerError, RuntimeError):  # "can't start new thread"
            continue
    return None
