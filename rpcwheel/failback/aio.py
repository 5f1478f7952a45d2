"""Failback for coroutines: the twin of `sync.py`, with the same names.

The first try is awaited in the caller's task. A retry is a task of its own, on the loop on which
the call was first made. The book is the ledger's, which any number of loops may share.
"""

from __future__ import annotations

import asyncio
import inspect
from functools import partial
from typing import TYPE_CHECKING, Any, ParamSpec, Self, TypeVar

from rpcwheel._concurrency.executor import EXECUTOR
from rpcwheel._concurrency.loop import call_on_loop, loop_timeout

from .core import First
from .entry import Call, State
from .invoker import InvokerBase

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from rpcwheel.durations import Duration

    from .entry import Entry, FailedCall
    from .ledger import Ledger

__all__ = ["FailbackInvoker"]

P = ParamSpec("P")
R = TypeVar("R")

_TASKS: set[asyncio.Task[None]] = set()
"""Retries under way: a loop itself keeps only weak references to its tasks."""


class FailbackInvoker(InvokerBase):
    """Makes calls, and makes those again that fail. An async context manager that closes.

    Example::

        async with FailbackInvoker(FailbackPolicy(retry_on="UNAVAILABLE")) as failback:
            await failback.invoke(stub.Push, event)
    """

    async def invoke(
        self, function: Callable[P, Awaitable[R]], /, *args: P.args, **kwargs: P.kwargs
    ) -> R | Any:
        """Call `function` and await what it returns; queue the call if `retry_on` names its error.

        Args:
            function: Called in this task now, and in a task of this loop for each retry, in a copy
                of the caller's context. May be a coroutine function, or return a grpc.aio call.
            args: Protobuf messages are kept as bytes and made anew for each retry; do not change
                others while the call is queued.
            kwargs: The same.

        Returns:
            The result, or the policy's `default` if the call was queued (or dropped).

        Raises:
            FailbackFull: `max_pending` calls are queued; chained to the call's error.
            FailbackClosed: After `close()`; chained to the call's error.
            Exception: An error that `retry_on` does not name, unchanged.
            asyncio.CancelledError: The caller was cancelled; the call is not retried.
        """
        return await _settle(
            self._ledger,
            partial(function, *args, **kwargs),
            partial(Call.at_rest, function, args, kwargs),
            self._ledger.now_ns(),
        )

    def park(
        self, error: Exception, function: Callable[..., object], /, *args: object, **kwargs: object
    ) -> bool:
        """Queue a call whose first try was made elsewhere and has failed; as in the sync twin.

        Call it on the loop on which the retries are to run.
        """
        ledger = self._ledger
        rest = partial(Call.at_rest, function, args, kwargs)
        launch = partial(_launch, ledger, asyncio.get_running_loop())
        return ledger.park(rest, error, ledger.now_ns(), launch)

    async def flush(self, timeout: Duration | None = None) -> bool:  # noqa: ASYNC109 - as the twin
        """Try every queued call now, and wait until nothing is pending; as in the sync twin."""
        return await flush(self._ledger, timeout)

    async def close(self, drain_timeout: Duration = 5.0) -> list[FailedCall]:
        """Queue no more calls, try to deliver the queued ones, and report the others.

        As in the sync twin: queued calls are tried again for `drain_timeout` seconds, however many
        retries the policy allows, and those not delivered by then are returned. Calls of a loop
        that was closed cannot be tried; they are returned too. If the wait is cancelled, the rest
        is reported at once, as an event and in the log.
        """
        return await close(self._ledger, drain_timeout)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


# --- Over a ledger, for whoever has one: the invoker above, and what a decorated function has ---


async def flush(ledger: Ledger, timeout: Duration | None) -> bool:  # noqa: ASYNC109
    """See `FailbackInvoker.flush`."""
    return await _wait_empty(ledger, ledger.begin_flush(timeout))


async def close(ledger: Ledger, drain_timeout: Duration) -> list[FailedCall]:
    """See `FailbackInvoker.close`."""
    seconds = ledger.begin_close(drain_timeout)
    if seconds is None:
        return []
    try:
        if seconds > 0:
            await _wait_empty(ledger, seconds)
    finally:
        failed = ledger.end_close()
    return failed


def begin(
    ledger: Ledger, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Awaitable[Any]:
    """Call `function` now, and give something to await for how it ends."""
    started_ns = ledger.now_ns()
    try:
        started = function(*args, **kwargs)
    except Exception as error:  # noqa: BLE001 - raised again where it is awaited
        return follow(
            ledger, partial(_raise, error), Call.at_rest(function, args, kwargs), started_ns
        )
    return follow(ledger, lambda: started, Call.at_rest(function, args, kwargs), started_ns)


def follow(
    ledger: Ledger, begun: Callable[[], object], call: Call, started_ns: int
) -> Awaitable[Any]:
    """Give something to await for how a call ends that has begun: a task, if a loop is running."""
    settling = _settle(ledger, begun, lambda: call, started_ns)
    try:
        return asyncio.get_running_loop().create_task(settling)
    except RuntimeError:
        return settling


def _raise(error: Exception) -> None:
    raise error


async def _settle(
    ledger: Ledger, begun: Callable[[], Any], rest: Callable[[], Call], started_ns: int
) -> Any:
    """Await the first try, and answer its caller."""
    try:
        result = begun()
        if inspect.isawaitable(result):
            result = await result
    except asyncio.CancelledError:
        ledger.book.count(First.RAISED)
        raise
    except Exception as error:
        launch = partial(_launch, ledger, asyncio.get_running_loop())
        if ledger.park(rest, error, started_ns, launch):
            return ledger.policy.default
        raise
    ledger.book.count(First.DELIVERED)
    return result


async def _wait_empty(ledger: Ledger, seconds: float) -> bool:
    loop = asyncio.get_running_loop()
    empty = asyncio.Event()

    set_empty = partial(call_on_loop, loop, empty.set)
    ledger.book.when_empty(set_empty)
    try:
        async with asyncio.timeout(loop_timeout(seconds)):
            await empty.wait()
    except TimeoutError:
        return not ledger.book.pending
    finally:
        ledger.book.forget(set_empty)
    return True


# --- Retries ---


def _launch(ledger: Ledger, loop: asyncio.AbstractEventLoop, entry: Entry) -> None:
    if entry.background is not None:
        entry.background.is_lost = loop.is_closed
    if not call_on_loop(loop, _start_task, ledger, loop, entry):
        # On a worker, as this may be the timer's thread.
        EXECUTOR.submit(ledger, partial(ledger.lost, entry, "its event loop is closed"))


def _start_task(ledger: Ledger, loop: asyncio.AbstractEventLoop, entry: Entry) -> None:
    context = entry.call.fresh_context()
    task = loop.create_task(_try(ledger, entry), name=f"retry of {entry.label}", context=context)
    _TASKS.add(task)
    task.add_done_callback(_TASKS.discard)
    if entry.background is not None:
        entry.background.cancel = partial(call_on_loop, loop, task.cancel)


async def _try(ledger: Ledger, entry: Entry) -> None:
    if entry.state is State.GONE:  # reported as undelivered, while it waited for the loop
        return
    ledger.mark()
    try:
        result = entry.call()
        if inspect.isawaitable(result):
            await result
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():  # by whoever ends the loop's tasks
            ledger.lost(entry, "its retry was cancelled")
            raise
        await _failed(ledger, entry, error)  # from within, as by a channel that was closed
    except Exception as error:  # noqa: BLE001 - the ledger decides and reports
        await _failed(ledger, entry, error)
    except BaseException:
        ledger.lost(entry, "the program is being ended")
        raise
    else:
        ledger.delivered(entry)


async def _failed(ledger: Ledger, entry: Entry, error: BaseException) -> None:
    failed = ledger.failed(entry, error)
    if failed is None:
        return
    try:
        answer = ledger.dead_letter(failed)
        if inspect.isawaitable(answer):
            await answer
    except BaseException as broken:
        ledger.bury(entry, broken)
        if not isinstance(broken, Exception):
            raise
    else:
        ledger.bury(entry)
