"""The events that are emitted during a test, and waiting for what other threads or tasks do."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Self, TypeVar

from rpcwheel.events import Event, TaskSlow, add_sink, remove_sink

if TYPE_CHECKING:
    from collections.abc import Callable

E = TypeVar("E", bound=Event)
R = TypeVar("R")

POLL_S = 0.001


def wait_until(condition: Callable[[], R], timeout: float = 30.0) -> R:
    """Block until a condition is true. In a coroutine, await `aio_wait_until` instead.

    Args:
        condition: Called every millisecond, such as `lambda: events.of(FailbackDelivered)`.
        timeout: Seconds.

    Returns:
        The true value that `condition` returned.

    Raises:
        AssertionError: The condition has not become true in time.
    """
    end = time.monotonic() + timeout
    while not (value := condition()):
        assert_before(end, timeout)
        time.sleep(POLL_S)
    return value


async def aio_wait_until(condition: Callable[[], R], timeout: float = 30.0) -> R:  # noqa: ASYNC109
    """Run the event loop until a condition is true. As `wait_until`."""
    end = time.monotonic() + timeout
    while not (value := condition()):
        assert_before(end, timeout)
        await asyncio.sleep(POLL_S)
    return value


def assert_before(end: float, timeout: float) -> None:
    """Raise AssertionError after `end` on the monotonic clock."""
    if time.monotonic() >= end:
        raise AssertionError(f"not true within {timeout} s")


class RecordedEvents(list[Event]):
    """A list to which each event is added, from the `with` statement to its end.

    `TaskSlow` is left out: it depends on the load of the machine. Other threads add events, so a
    test waits for the events that it expects::

        (event,) = wait_until(lambda: events.of(FailbackDelivered))
    """

    def of(self, kind: type[E]) -> list[E]:
        """Return the events of a class so far, in order."""
        return [event for event in self if isinstance(event, kind)]

    def __enter__(self) -> Self:
        add_sink(self._add)
        return self

    def __exit__(self, *_: object) -> None:
        remove_sink(self._add)

    def _add(self, event: Event) -> None:
        if not isinstance(event, TaskSlow):
            self.append(event)
