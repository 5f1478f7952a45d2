"""The deadline of the work at hand: where it is kept, and how to give one to a piece of work."""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from rpcwheel.durations import NEVER, to_ns
from rpcwheel.rpc import DEADLINE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rpcwheel.durations import Duration

__all__ = ["Deadline", "current_deadline", "deadline_scope"]


@dataclass(frozen=True, slots=True, order=True)
class Deadline:
    """A point in time, on the monotonic clock of this process."""

    at_ns: int
    """By `time.monotonic_ns()`."""

    @classmethod
    def after(cls, timeout: Duration) -> Self:
        """The deadline of what begins now and may take so long.

        Raises:
            TypeError: `timeout` is no time.
            ConfigurationError: It is NaN.
        """
        return cls(min(time.monotonic_ns() + to_ns(timeout, what="timeout"), NEVER))

    def remaining(self) -> float:
        """Seconds that are left; 0.0 when it has passed, never negative."""
        return max(0, self.at_ns - time.monotonic_ns()) / 1e9

    def expired(self) -> bool:
        """Whether it has passed: what is computed now reaches nobody."""
        return time.monotonic_ns() >= self.at_ns


def current_deadline() -> Deadline | None:
    """The deadline of the call that is being served, or of the scope; None if there is none.

    A context variable: what a handler calls sees it, tasks made by it too, threads do not unless
    they run in a copy of its context (`asyncio.to_thread` does, a bare `ThreadPoolExecutor` not).
    """
    at_ns = DEADLINE.get()
    return None if at_ns is None else Deadline(at_ns)


@contextmanager
def deadline_scope(timeout: Duration) -> Iterator[Deadline]:
    """Give all calls in a `with` block one deadline together.

    Inside another scope, or a call that is being served, the earlier deadline holds. It limits
    calls made through rpcwheel's interceptors; other code may ask `current_deadline()`.

    Args:
        timeout: Seconds from now, or a `timedelta`.

    Raises:
        TypeError: `timeout` is no time.
        ConfigurationError: It is NaN.
    """
    deadline = Deadline.after(timeout)
    outer = DEADLINE.get()
    if outer is not None and outer < deadline.at_ns:
        deadline = Deadline(outer)
    token = DEADLINE.set(deadline.at_ns)
    try:
        yield deadline
    finally:
        DEADLINE.reset(token)
