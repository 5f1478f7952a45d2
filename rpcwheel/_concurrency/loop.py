"""Calls on an event loop from any thread, and results of worker threads awaited on a loop."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from contextvars import Context
from typing import TYPE_CHECKING, Final, TypeVar

from .executor import EXECUTOR

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

R = TypeVar("R")

LONGEST_TIMEOUT_S: Final = 1e8
"""Three years. Some event loops fail with longer delays."""


def call_on_loop(
    loop: asyncio.AbstractEventLoop, callback: Callable[..., object], *args: object
) -> bool:
    """Schedule `callback(*args)` on the loop, from any thread; False if the loop is closed.

    It runs in an empty context, and not in that of the caller.
    """
    try:
        loop.call_soon_threadsafe(callback, *args, context=Context())
    except RuntimeError:
        return False
    return True


def running_loop() -> asyncio.AbstractEventLoop | None:
    """Return the loop that runs on this thread, or None."""
    return asyncio._get_running_loop()  # noqa: SLF001 - the public function raises if there is none


async def on_worker(work: Callable[[], R], *, key: Hashable = None) -> R:
    """Run blocking work on a worker thread, and await its result.

    Args:
        work: The function to run. It continues if this coroutine is canceled.
        key: The key for `EXECUTOR`; None: a new one.
    """
    return await await_future(begin_on_worker(work, key=key))


def begin_on_worker(work: Callable[[], R], *, key: Hashable = None) -> Future[R]:
    """Run blocking work on a worker thread; the arguments are those of `on_worker`."""
    future: Future[R] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001 - raised where the result is awaited
            future.set_exception(error)

    EXECUTOR.submit(future if key is None else key, run)
    return future


async def await_future(future: Future[R], timeout_s: float | None = None) -> R:
    """Await a future of another thread. Canceling the await does not cancel the future.

    Raises:
        TimeoutError: It is not done within `timeout_s`.
    """
    if not future.done():
        loop = asyncio.get_running_loop()
        done = loop.create_future()
        future.add_done_callback(lambda _: call_on_loop(loop, _set_done, done))
        async with asyncio.timeout(loop_timeout(timeout_s)):
            await done
    try:
        return future.result()
    finally:
        del future  # else a cycle: its error, the traceback of the error, and this frame


def loop_timeout(timeout_s: float | None) -> float | None:
    """Return the timeout, or None (no limit) if event loops may fail with it."""
    return None if timeout_s is None or timeout_s > LONGEST_TIMEOUT_S else timeout_s


def _set_done(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
