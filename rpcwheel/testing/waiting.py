"""Waiting in a test for something that other threads or tasks do."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

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
