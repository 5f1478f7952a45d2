"""The current deadline: that of the call being served, or of a `deadline_scope`."""

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


@dataclass(frozen=True, slots=True, order=True)
class Deadline:
    """A point in time on the monotonic clock of this process."""

    at_ns: int
    """On `time.monotonic_ns()`."""

    @classmethod
    def after(cls, timeout: Duration) -> Self:
        """Return the deadline that is `timeout` from now: seconds, or a `timedelta`.

        Raises:
            TypeError: `timeout` is neither a number nor a `timedelta`.
            ConfigurationError: `timeout` is NaN.
        """
        at_ns = time.monotonic_ns() + to_ns(timeout, subject="timeout")
        return cls(min(at_ns, NEVER))  # an infinite timeout is `NEVER` already

    def remaining(self) -> float:
        """Return the seconds until the deadline; 0.0 if it has passed."""
        return max(0, self.at_ns - time.monotonic_ns()) / 1e9

    def expired(self) -> bool:
        """Whether the deadline has passed."""
        return time.monotonic_ns() >= self.at_ns


def current_deadline() -> Deadline | None:
    """Return the earlier one of the deadlines of the call being served and of `deadline_scope`.

    None if there is neither. The deadline is stored in a context variable: tasks that a handler
    creates inherit it; a thread has it only if it runs in a copy of the context
    (`asyncio.to_thread` does, a `ThreadPoolExecutor` does not).
    """
    at_ns = DEADLINE.get()
    return None if at_ns is None else Deadline(at_ns)


def left_ns() -> int | None:
    """Return the nanoseconds until the current deadline; None if it is infinite, or not set."""
    at_ns = DEADLINE.get()
    return None if at_ns is None or at_ns == NEVER else at_ns - time.monotonic_ns()


@contextmanager
def deadline_scope(timeout: Duration) -> Iterator[Deadline]:
    """Give all calls in a `with` block one common deadline.

    Inside another scope, or in a handler whose call has a deadline, the earlier deadline applies.
    The scope limits only calls through rpcwheel; code that waits for something else can limit it by
    `current_deadline()`.

    Args:
        timeout: Seconds from now, or a `timedelta`.

    Raises:
        TypeError: `timeout` is neither a number nor a `timedelta`.
        ConfigurationError: `timeout` is NaN.
    """
    deadline = Deadline.after(timeout)
    outer_ns = DEADLINE.get()
    if outer_ns is not None and outer_ns < deadline.at_ns:
        deadline = Deadline(outer_ns)
    token = DEADLINE.set(deadline.at_ns)
    try:
        yield deadline
    finally:
        DEADLINE.reset(token)
