"""Failback for coroutines, with the names of `sync.py`.

The first attempt is awaited in the caller's task. Each further attempt is a task of its own, on the
event loop on which the call was first made. A queue may have calls of several loops.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from concurrent.futures import CancelledError, Future
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeVar

from rpcwheel._concurrency.closing import AsyncClosing
from rpcwheel._concurrency.executor import EXECUTOR
from rpcwheel._concurrency.loop import (
    await_future,
    begin_on_worker,
    call_on_loop,
    running_loop,
)
from rpcwheel.call.idempotency import new_key, with_idempotency_key
from rpcwheel.errors import FailbackError

from .invoker import InvokerBase, begin_close_all, checked_queues
from .queued_call import QueuedCall, SavedCall

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

    from rpcwheel.call.failback_policy import FailedCall
    from rpcwheel.call.failed_calls import FailedRpc
    from rpcwheel.durations import Duration

    from .invoker import Starter
    from .journaled import JournalStore
    from .queue import Attempt, FailbackQueue

__all__ = ["FailbackInvoker"]

P = ParamSpec("P")
R = TypeVar("R")


class FailbackInvoker(InvokerBase, AsyncClosing):
    """Awaits calls, and retries failed calls in the background. An async context manager.

    Example::

        async with FailbackInvoker(FailbackPolicy(retry_on="UNAVAILABLE")) as failback:
            await failback.invoke(stub.Push, event)
    """

    _blocks = False

    async def invoke(
        self, function: Callable[P, Awaitable[R]], /, *args: P.args, **kwargs: P.kwargs
    ) -> R | Any:
        """Await a call of `function`; if it fails with an error that `retry_on` names, queue it.

        Args:
            function: Called in this task now, and in a task of this loop for each further attempt,
                in a copy of the caller's context. A coroutine function, or one that returns a
                grpc.aio call.
            args: Protobuf messages are kept as bytes, as they are when `function` has returned its
                awaitable, and parsed again for each attempt; do not change other arguments while
                the call is queued.
            kwargs: The same.

        Returns:
            The result, or the policy's `default` if the call was queued (or dropped).

        Raises:
            FailbackFull: `max_pending` calls are queued; chained to the call's error.
            FailbackClosed: After `close()`; chained to the call's error.
            Exception: An error that `retry_on` does not name, unchanged.
            asyncio.CancelledError: The caller was canceled; the call is not retried.
        """
        queue, save = self._queue, partial(SavedCall.save, function, args, kwargs)
        attempt = partial(function, *args, **kwargs)
        if not queue.durable:
            return await _first_result(queue, attempt, save, queue.now_ns())
        self.start()
        with with_idempotency_key(new_key()):
            return await _first_result(queue, attempt, save, queue.now_ns())

    def enqueue(
        self, error: Exception, function: Callable[..., object], /, *args: object, **kwargs: object
    ) -> Literal["queued", "dropped"] | None:
        """Queue a call whose first attempt was made elsewhere and has failed.

        Call it on the loop on which the further attempts are to run. Arguments, result and errors
        are those of `rpcwheel.failback.FailbackInvoker.enqueue`.

        Raises:
            RuntimeError: The policy has a journal, to which a loop must not write.
        """
        if self._queue.durable:
            raise RuntimeError(
                f"{self._queue.name}: enqueue() would block the event loop until the journal has "
                "stored the call; let the decorated function make the first attempt"
            )
        queue, saved = self._queue, SavedCall.save(function, args, kwargs)
        return queue.enqueue(_queued_call(saved, error, queue.now_ns()))

    async def enqueue_rpc(
        self, error: Exception, failed: FailedRpc
    ) -> Literal["queued", "dropped"] | None:
        """Store a failed gRPC call in the journal; the results are those of `enqueue`."""
        store = self._journal
        return await _store(self._queue, store, store.failed_rpc(failed, error))

    def _starter(self) -> tuple[Starter, Callable[[], bool]]:
        loop = asyncio.get_running_loop()
        return partial(_start, loop), lambda: not loop.is_closed()

    async def flush(self, timeout: Duration | None = None) -> bool:  # noqa: ASYNC109 - as for grpc
        """Make every queued call due now, and wait until no call is pending.

        A call that fails again waits as the policy's `backoff` says.

        Args:
            timeout: Seconds to wait at most; None waits until all are delivered or given up.

        Returns:
            Whether no call was pending in the end.
        """
        self.start()
        return await flush(self._queue, timeout)

    async def close(self, drain_timeout: Duration = 5.0) -> list[FailedCall]:
        """Queue no more calls, try to deliver the queued ones, and report the others.

        Queued calls are retried for `drain_timeout` seconds, however many attempts the policy
        allows. Returns those that have not succeeded by then. Calls of a loop that was closed
        cannot be retried; they are returned too. If the wait is canceled, the rest is reported at
        once, as an event and in the log. `rpcwheel.failback.FailbackInvoker.close` has the details.
        """
        return await close_all([self], drain_timeout)


# --- For the invoker above, and for a decorated function that turns out to return awaitables ---


async def flush(queue: FailbackQueue, timeout: Duration | None) -> bool:  # noqa: ASYNC109
    """See `FailbackInvoker.flush`."""
    seconds = queue.begin_flush(timeout)
    return await _wait_done(queue.when_flushed(), seconds)


async def close_all(invokers: Iterable[InvokerBase], drain_timeout: Duration) -> list[FailedCall]:
    """Close queues together; `drain_timeout` is for all of them. See `FailbackInvoker.close`.

    Raises:
        RuntimeError: Called inside an attempt of one of the queues. None is closed then.
    """
    queues = checked_queues("close()", invokers)
    closing: list[FailbackQueue] = []
    failed: list[FailedCall] = []
    try:
        seconds = begin_close_all(queues, drain_timeout, closing)
        if seconds > 0:
            waits = (_wait_done(queue.calls.when_empty(), seconds) for queue in closing)
            await asyncio.gather(*waits)
    finally:  # also if it is canceled: every call must be reported
        for ended in [_end_close(queue) for queue in closing]:
            reported = await await_future(ended)
            failed += reported
    return failed


def _end_close(queue: FailbackQueue) -> Future[list[FailedCall]]:
    """End a queue: with a journal, on a worker thread, as it blocks."""
    if queue.durable:
        return begin_on_worker(queue.end_close)
    ended: Future[list[FailedCall]] = Future()
    ended.set_result(queue.end_close())
    return ended


async def _wait_done(done: Future[None], seconds: float) -> bool:
    try:
        await await_future(done, seconds)
    except TimeoutError:
        return done.done()
    except CancelledError:  # by `close`
        return False
    finally:
        done.cancel()
    return True


def follow(queue: FailbackQueue, begun: object, call: SavedCall, started_ns: int) -> Awaitable[Any]:
    """Get an awaitable for the result of a call that has begun: a task, if a loop is running."""
    result = _first_result(queue, lambda: begun, lambda: call, started_ns)
    loop = running_loop()
    return result if loop is None else loop.create_task(result)


async def _first_result(
    queue: FailbackQueue, attempt: Callable[[], Any], save: Callable[[], SavedCall], started_ns: int
) -> Any:
    """Await the first attempt; queue the call if it fails."""
    saved: SavedCall | None = None
    try:
        result = attempt()
        if inspect.isawaitable(result):
            saved = save()  # now: other tasks may change a message while the attempt runs
            result = await result
    except asyncio.CancelledError:
        queue.calls.count("failed")
        raise
    except Exception as error:
        saved = save() if saved is None else saved.with_current_context()
        call, store = _queued_call(saved, error, started_ns), queue.store
        outcome = queue.enqueue(call) if store is None else await _store(queue, store, call)
        if outcome:
            return queue.policy.default
        raise
    queue.calls.count("succeeded")
    return result


async def _store(
    queue: FailbackQueue, store: JournalStore, call: QueuedCall
) -> Literal["queued", "dropped"] | None:
    """Queue a call. If the caller is canceled meanwhile, the call is stored all the same."""
    delay_ns = queue.first_delay_ns(call)
    if delay_ns is None:
        return None
    appended = store.append_later(call, delay_ns)
    end = partial(queue.end_enqueue, call, delay_ns, partial(store.end_append, appended, delay_ns))
    try:
        with contextlib.suppress(FailbackError, TimeoutError):  # raised by `end`
            await await_future(appended, store.journal.url.timeout_s)
    except asyncio.CancelledError:
        report = partial(_report_enqueued, end)
        appended.add_done_callback(lambda _: EXECUTOR.submit((queue, "first attempts"), report))
        raise
    return end()


def _report_enqueued(end: Callable[[], object]) -> None:
    """Count and report a call whose caller was canceled, after it was stored or refused."""
    with contextlib.suppress(FailbackError):
        end()


# --- Further attempts ---


def _queued_call(saved: SavedCall, error: BaseException, started_ns: int) -> QueuedCall:
    return QueuedCall(saved, error, started_ns, partial(_start, asyncio.get_running_loop()))


def _start(loop: asyncio.AbstractEventLoop, attempt: Attempt) -> None:
    """Make an attempt on its loop. If the loop is closed, now or later, it is lost."""
    attempt.queue.on_loops = True
    if attempt.background is not None:
        attempt.background.is_lost = loop.is_closed
    if not call_on_loop(loop, _start_task, loop, attempt):
        attempt.loop_closed()


def _start_task(loop: asyncio.AbstractEventLoop, attempt: Attempt) -> None:
    name = f"retry of {attempt.call.label}"
    task = loop.create_task(_make(attempt), name=name, context=attempt.context())
    attempt.task = task
    task.add_done_callback(partial(_on_task_done, attempt))
    if attempt.background is not None:
        attempt.background.cancel = partial(call_on_loop, loop, task.cancel)


def _on_task_done(attempt: Attempt, task: asyncio.Task[None]) -> None:
    """Lose the call if its task was canceled, as by `asyncio.run` at its end.

    The task may not have begun: then nothing in its coroutine has run. Or its attempt has ended, if
    the function has canceled its own task and raised another error.
    """
    if task.cancelled() and attempt.call.attempt is attempt:
        attempt.lost("its retry was cancelled")


async def _make(attempt: Attempt) -> None:
    call = attempt.call
    if call.reason:
        await _failed(attempt, call.error)
        return
    if not attempt.begin():
        return
    try:
        result = call.saved()
        if inspect.isawaitable(result):
            await result
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise  # `_on_task_done` ends the attempt
        await _failed(attempt, error)  # from within, as by a channel that was closed
    except Exception as error:  # noqa: BLE001 - the queue reports it
        await _failed(attempt, error)
    except BaseException:
        attempt.lost("the program is being ended")
        raise
    else:
        attempt.succeeded()


async def _failed(attempt: Attempt, error: BaseException) -> None:
    hook = attempt.failed(error)
    if hook is not None:
        with attempt.dead_letter():
            result = hook()
            if inspect.isawaitable(result):
                await result
