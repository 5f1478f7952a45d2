"""From the workers to the loop: how a coroutine waits for what a worker does."""

from __future__ import annotations

import asyncio
import contextlib
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from rpcwheel._concurrency.executor import EXECUTOR

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["awaited", "bounded", "hand_over", "on_worker", "reached", "running_loop"]

R = TypeVar("R")

LONGEST_WAIT_S = 1e8
"""Three years: loops take no delay of any size."""


async def reached(future: Future[bool], wait_s: float | None) -> bool:
    """What it says in time, else False; whoever else waited for it does so no more."""
    try:
        return await awaited(future, wait_s)
    except TimeoutError:
        return False
    finally:
        future.cancel()


async def awaited(future: Future[R], wait_s: float | None) -> R:
    """Wait for a worker's future. It goes on if this is cancelled, or raises `TimeoutError`."""
    if not future.done():
        loop = asyncio.get_running_loop()
        arrived = loop.create_future()
        future.add_done_callback(lambda _: hand_over(loop, partial(_arrive, arrived)))
        async with asyncio.timeout(bounded(wait_s)):
            await arrived
    return future.result()


def _arrive(arrived: asyncio.Future[None]) -> None:
    if not arrived.done():
        arrived.set_result(None)


def bounded(wait_s: float | None) -> float | None:
    """As a loop takes it; None: no limit."""
    return None if wait_s is None or wait_s > LONGEST_WAIT_S else wait_s


def hand_over(loop: asyncio.AbstractEventLoop, step: Callable[[], object]) -> None:
    """Run a step on the loop, from any thread."""
    with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits there any more
        loop.call_soon_threadsafe(step)


def running_loop() -> asyncio.AbstractEventLoop | None:
    """The loop that runs on this thread, if one does."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


async def on_worker(work: Callable[[], R]) -> R:
    """Run what may block on a worker, and wait for it."""
    future: Future[R] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001 - it goes to whoever awaits
            future.set_exception(error)

    EXECUTOR.submit(future, run)
    return await awaited(future, None)
