"""Failback for blocking code.

The first attempt runs on the caller's thread. Further attempts run on worker threads
(`rpcwheel._concurrency.executor`), never on the timer's thread. If the function returns a future,
its result is handled on a worker thread too, never on the thread of gRPC that completes it.
"""

from __future__ import annotations

import contextlib
import inspect
import threading
import time
from concurrent.futures import CancelledError, Future
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal, ParamSpec, TypeVar

from rpcwheel._concurrency.closing import Closing
from rpcwheel._concurrency.executor import EXECUTOR
from rpcwheel.call.idempotency import new_key, with_idempotency_key

from .invoker import InvokerBase, begin_close_all, checked_queues
from .queued_call import QueuedCall, SavedCall, label_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from rpcwheel.call.failback_policy import FailedCall
    from rpcwheel.call.failed_calls import FailedRpc
    from rpcwheel.durations import Duration

    from .invoker import Starter
    from .queue import Attempt, FailbackQueue

__all__ = ["FailbackInvoker"]

CANCEL_TIMEOUT_S: Final = 1.0
"""How long `close_all` waits for attempts that were canceled, and then a `JournalWorker` for the
loop of its coroutine functions."""

P = ParamSpec("P")
R = TypeVar("R")


class FailbackInvoker(InvokerBase, Closing):
    """Calls functions, and retries failed calls in the background. Thread-safe; a context manager.

    Example::

        with FailbackInvoker(FailbackPolicy(retry_on="UNAVAILABLE")) as failback:
            failback.invoke(stub.Push, event)
    """

    def invoke(self, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R | Any:
        """Call `function`; if it fails with an error that `retry_on` names, queue the call.

        Args:
            function: Called on this thread now, and on a worker thread for each further attempt, in
                a copy of the caller's context.
            args: Protobuf messages are kept as bytes, as `function` has left them, and parsed again
                for each attempt; do not change other arguments while the call is queued.
            kwargs: The same.

        Returns:
            What `function` returned, or the policy's `default` if the call was queued (or dropped).
            If it returned a future (grpc's or `concurrent.futures`'): a `concurrent.futures.Future`
            with the same result. Canceling that one cancels the call, which is not retried.

        Raises:
            FailbackFull: `max_pending` calls are queued; chained to the call's error.
            FailbackClosed: After `close()`; chained to the call's error.
            Exception: An error that `retry_on` does not name, unchanged.
        """
        queue = self._queue
        if queue.durable:
            self.start()
            with with_idempotency_key(new_key()):
                return self._invoke(function, args, kwargs)
        return self._invoke(function, args, kwargs)

    def _invoke(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        queue = self._queue
        started_ns = queue.now_ns()
        try:
            result = function(*args, **kwargs)
        except Exception as error:
            if _enqueue(queue, SavedCall.save(function, args, kwargs), error, started_ns):
                return queue.policy.default
            raise
        if inspect.isawaitable(result):
            return self._follow_awaitable(
                result, SavedCall.save(function, args, kwargs), started_ns
            )
        if _is_future(result):
            return _follow(queue, result, SavedCall.save(function, args, kwargs), started_ns)
        queue.calls.count("succeeded")
        return result

    def enqueue(
        self, error: Exception, function: Callable[..., object], /, *args: object, **kwargs: object
    ) -> Literal["queued", "dropped"] | None:
        """Queue a call whose first attempt was made elsewhere and has failed.

        Args:
            error: How it failed.
            function: Called for each further attempt; it and the arguments as for `invoke`.
            args: See there.
            kwargs: See there.

        Returns:
            "queued", or "dropped" if the queue is full and `overflow` is "drop": give the caller
            the policy's `default`. None: `error` is not one that `retry_on` names.

        Raises:
            FailbackFull, FailbackClosed: As `invoke`; chained to `error`.
        """
        queue, saved = self._queue, SavedCall.save(function, args, kwargs)
        self.start()
        return _enqueue(queue, saved, error, queue.now_ns())

    def enqueue_rpc(
        self, error: Exception, failed: FailedRpc
    ) -> Literal["queued", "dropped"] | None:
        """Store a failed gRPC call in the journal; the results are those of `enqueue`. Blocks."""
        return self._queue.enqueue(self._journal.failed_rpc(failed, error))

    def _starter(self) -> tuple[Starter, Callable[[], bool]]:
        return _start, lambda: True

    def _follow_awaitable(self, result: Any, call: SavedCall, started_ns: int) -> Any:
        """Raise an error: the function has returned an awaitable. Called by `invoke`."""
        raise _not_awaitable_here(call, result)

    def flush(self, timeout: Duration | None = None) -> bool:
        """Make every queued call due now, and wait until no call is pending.

        The attempts begin as the pacing allows (`FailbackPolicy.max_in_flight`), and count toward
        `max_attempts`. A call that fails again waits as the policy's `backoff` says.

        Args:
            timeout: Seconds to wait at most; None waits until all are delivered or given up.

        Returns:
            Whether no call was pending in the end, also if calls were given up; see `stats()`.

        Raises:
            RuntimeError: Called inside an attempt of this queue, which would wait for itself.
        """
        self.start()
        return flush_all([self], timeout)

    def close(self, drain_timeout: Duration = 5.0) -> list[FailedCall]:
        """Queue no more calls, try to deliver the queued ones, and report the others.

        From now on a call that fails raises `FailbackClosed`; one that succeeds still works.
        Idempotent: a later or simultaneous `close` returns an empty list at once.

        Args:
            drain_timeout: For how many seconds queued calls are retried, however many attempts the
                policy allows, with waits of at most half of the time that is left. 0: not at all.
                Infinite: until every call is delivered.

        Returns:
            The calls that were queued and were not delivered in that time, oldest first; they are
            also reported as an event and in the log. Calls that failed meanwhile with an error that
            `retry_on` does not name are among them if there is no `dead_letter`, and so are calls
            whose timer was stopped. Calls given up before went to `dead_letter`, the log and an
            event: `stats().gave_up`.

        Raises:
            RuntimeError: Called inside an attempt of this queue, which would wait for itself.
        """
        return close_all([self], drain_timeout)


# --- Several queues at the same time, on the caller's thread, where Ctrl-C interrupts the wait ---


def flush_all(invokers: Iterable[InvokerBase], timeout: Duration | None) -> bool:
    """Flush queues together; `timeout` is for all of them. See `FailbackInvoker.flush`."""
    queues = checked_queues("flush()", invokers)
    seconds = [queue.begin_flush(timeout) for queue in queues]
    end = time.monotonic() + max(seconds, default=0.0)
    done = [_is_done_by(future, end) for future in [queue.when_flushed() for queue in queues]]
    return all(done)


def close_all(
    invokers: Iterable[InvokerBase],
    drain_timeout: Duration,
    cancel: Callable[[], object] | None = None,
) -> list[FailedCall]:
    """Close queues together. See `FailbackInvoker.close`.

    Args:
        invokers: The invokers of the queues.
        drain_timeout: For all of them.
        cancel: Called after that time. Ends the attempts that still run, before their calls are
            given back to a journal.

    Raises:
        RuntimeError: Called inside an attempt of one of the queues. None is closed then.
    """
    queues = checked_queues("close()", invokers)
    closing: list[FailbackQueue] = []
    failed: list[FailedCall] = []
    try:
        seconds = begin_close_all(queues, drain_timeout, closing)
        if seconds > 0:
            _wait_empty(closing, seconds)
    finally:  # also after Ctrl-C: every call must be reported
        try:
            if cancel is not None:
                cancel()
                _wait_empty(closing, CANCEL_TIMEOUT_S)
        finally:
            waits: list[Callable[[], object]] = []
            for queue in closing:
                failed += queue.end_close(waits=waits)
            for wait in waits:  # together, as one journal after the other may take seconds
                wait()
    return failed


def _wait_empty(queues: Iterable[FailbackQueue], seconds: float) -> bool:
    end = time.monotonic() + seconds
    return all(_is_done_by(queue.calls.when_empty(), end) for queue in queues)


def _is_done_by(empty: Future[None], end: float) -> bool:
    try:
        empty.result(max(0.0, min(end - time.monotonic(), threading.TIMEOUT_MAX)))
    except (TimeoutError, CancelledError):  # canceled by `close`
        return False
    finally:
        empty.cancel()
    return True


# --- First attempts that return a future ---


def _is_future(result: object) -> bool:
    """Whether it is a future of grpc or of `concurrent.futures`, judged by its class's methods."""
    kind = type(result)
    return hasattr(kind, "add_done_callback") and hasattr(kind, "result")


def _follow(queue: FailbackQueue, inner: Any, call: SavedCall, started_ns: int) -> Future[Any]:
    """Make the future that the caller gets for `inner`."""
    outer: Future[Any] = Future()

    def on_outer_done(done: Future[Any]) -> None:
        if done.cancelled():
            inner.cancel()

    def on_inner_done(_: object) -> None:  # on gRPC's thread
        # Not the key of further attempts, which may hang.
        step = partial(call.copy_context().run, _complete, queue, outer, inner, call, started_ns)
        EXECUTOR.submit((queue, "first attempts"), step)

    outer.add_done_callback(on_outer_done)
    inner.add_done_callback(on_inner_done)
    return outer


def _complete(
    queue: FailbackQueue, outer: Future[Any], inner: Any, call: SavedCall, started_ns: int
) -> None:
    if inner.cancelled():
        outer.cancel()
    if not outer.set_running_or_notify_cancel():
        queue.calls.count("failed")
        return
    try:
        result = _first_result(queue, inner, call, started_ns)
    except BaseException as error:  # noqa: BLE001 - the caller gets it
        outer.set_exception(error)
    else:
        outer.set_result(result)


def _first_result(queue: FailbackQueue, inner: Any, call: SavedCall, started_ns: int) -> Any:
    try:
        result = inner.result()
    except BaseException as error:
        if _enqueue(queue, call, error, started_ns):
            return queue.policy.default
        raise
    queue.calls.count("succeeded")
    return result


# --- Further attempts ---


def _enqueue(
    queue: FailbackQueue, call: SavedCall, error: BaseException, started_ns: int
) -> Literal["queued", "dropped"] | None:
    return queue.enqueue(QueuedCall(call, error, started_ns, _start))


def _start(attempt: Attempt) -> None:
    _submit(attempt, partial(_make, attempt))


def _submit(attempt: Attempt, step: Callable[[], None]) -> None:
    """Run a step of an attempt on a worker thread, in a copy of the caller's context.

    Attempts that hang delay those to the same target only.
    """
    key = attempt.queue, attempt.call.pacing_key
    EXECUTOR.submit(key, partial(attempt.context().run, step))


def _make(attempt: Attempt) -> None:
    call = attempt.call
    if call.reason:
        _failed(attempt, call.error)
        return
    if not attempt.begin():
        return
    try:
        result = call.saved()
    except BaseException as error:  # noqa: BLE001 - the queue reports it
        _failed(attempt, error)
        return
    if inspect.isawaitable(result):
        _failed(attempt, _not_awaitable_here(call.saved, result))
    elif _is_future(result):
        if attempt.background is not None:
            attempt.background.cancel = getattr(result, "cancel", None)
        finish = partial(_finish, attempt, result)
        result.add_done_callback(lambda _: _submit(attempt, finish))  # on gRPC's thread
    else:
        attempt.succeeded()


def _finish(attempt: Attempt, future: Future[Any]) -> None:
    try:
        future.result()
    except BaseException as error:  # noqa: BLE001 - the queue reports it
        _failed(attempt, error)
    else:
        attempt.succeeded()


def _failed(attempt: Attempt, error: BaseException) -> None:
    hook = attempt.failed(error)
    if hook is not None:
        with contextlib.suppress(BaseException), attempt.dead_letter():
            hook()


def _not_awaitable_here(call: SavedCall, result: object) -> TypeError:
    """The error of a function that returned an awaitable where there is no event loop."""
    if inspect.iscoroutine(result):
        result.close()  # or Python warns that it was never awaited
    return TypeError(
        f"{label_of(call.function)} returned an awaitable, which needs an event loop; "
        "make it an `async def`, or use rpcwheel.failback.aio.FailbackInvoker"
    )
