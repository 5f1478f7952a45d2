"""Failback for code that blocks: the caller gets its answer at once, worker threads do the rest.

What is decided stands in `core.py`; here are the threads and the futures. The first try runs on
the caller's thread. A retry runs on a worker (`rpcwheel._concurrency.executor`), never on the
timer's thread; a future that the function returns is finished on a worker too, never on the thread
of gRPC that completes it.
"""

from __future__ import annotations

import inspect
import threading
import time
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any, ParamSpec, Self, TypeVar

from rpcwheel._concurrency.executor import EXECUTOR
from rpcwheel.errors import ConfigurationError

from .core import First
from .entry import Call, State, label_of
from .invoker import InvokerBase
from .policy import checked_policy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from rpcwheel.durations import Duration
    from rpcwheel.timer.api import Timer

    from .entry import Entry, FailedCall
    from .ledger import Ledger
    from .policy import FailbackPolicy

__all__ = ["FailbackInvoker"]

P = ParamSpec("P")
R = TypeVar("R")


class FailbackInvoker(InvokerBase):
    """Makes calls, and makes those again that fail. Thread-safe; a context manager that closes.

    Example::

        with FailbackInvoker(FailbackPolicy(retry_on="UNAVAILABLE")) as failback:
            failback.invoke(stub.Push, event)
    """

    def __init__(self, policy: FailbackPolicy, *, timer: Timer | None = None) -> None:
        """Make an empty queue.

        Args:
            policy: What to try again, and how.
            timer: Any rpcwheel timer; None takes `shared_timer()` when the first call is queued.

        Raises:
            ConfigurationError: The policy's `dead_letter` is a coroutine function.
            TypeError: `policy` or `timer` is none.
        """
        if inspect.iscoroutinefunction(checked_policy(policy).dead_letter):
            raise ConfigurationError(
                "dead_letter is a coroutine function, but this is called where no event loop is; "
                "give a plain function, or use rpcwheel.failback.aio"
            )
        super().__init__(policy, timer=timer)

    def invoke(self, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R | Any:
        """Call `function`; if it fails in a way that `retry_on` names, queue the call.

        Args:
            function: Called on this thread now, and on a worker thread for each retry, in a copy
                of the caller's context.
            args: Protobuf messages are kept as bytes and made anew for each retry; do not change
                others while the call is queued.
            kwargs: The same.

        Returns:
            What `function` returned, or the policy's `default` if the call was queued (or dropped).
            If it returned a future (grpc's or `concurrent.futures`'): a `concurrent.futures.Future`
            that ends in the same way. Cancelling that one cancels the call, which is not retried.

        Raises:
            FailbackFull: `max_pending` calls are queued; chained to the call's error.
            FailbackClosed: After `close()`; chained to the call's error.
            Exception: An error that `retry_on` does not name, unchanged.
        """
        ledger = self._ledger
        started_ns = ledger.now_ns()
        try:
            result = function(*args, **kwargs)
        except Exception as error:
            rest = partial(Call.at_rest, function, args, kwargs)
            if ledger.park(rest, error, started_ns, partial(_launch, ledger)):
                return ledger.policy.default
            raise
        if inspect.isawaitable(result):
            return self._await(result, Call.at_rest(function, args, kwargs), started_ns)
        if _is_future(result):
            return _follow(ledger, result, Call.at_rest(function, args, kwargs), started_ns)
        ledger.book.count(First.DELIVERED)
        return result

    def park(
        self, error: Exception, function: Callable[..., object], /, *args: object, **kwargs: object
    ) -> bool:
        """Queue a call whose first try was made elsewhere and has failed.

        Args:
            error: How it failed.
            function: What to call for each retry; it and the arguments as for `invoke`.
            args: See there.
            kwargs: See there.

        Returns:
            Whether the caller is to get the policy's `default`; if not, `error` is not one that
            `retry_on` names.

        Raises:
            FailbackFull, FailbackClosed: As `invoke`; chained to `error`.
        """
        ledger = self._ledger
        rest = partial(Call.at_rest, function, args, kwargs)
        return ledger.park(rest, error, ledger.now_ns(), partial(_launch, ledger))

    def _await(self, result: Any, call: Call, started_ns: int) -> Any:
        raise _no_loop(call, result)

    def flush(self, timeout: Duration | None = None) -> bool:
        """Try every queued call now, and wait until nothing is pending.

        Calls that fail again go on in their rhythm while this waits.

        Args:
            timeout: Seconds to wait at most; None waits until all are delivered or given up.

        Returns:
            Whether nothing was pending in the end.

        Raises:
            RuntimeError: Called by a retried function of this queue, which would wait for itself.
        """
        return flush_all([self], timeout)

    def close(self, drain_timeout: Duration = 5.0) -> list[FailedCall]:
        """Queue no more calls, try to deliver those that are queued, and report the others.

        From now on a call that fails raises `FailbackClosed`; one that succeeds still works.
        Idempotent: a later or simultaneous `close` returns an empty list at once.

        Args:
            drain_timeout: Seconds to go on trying, however many retries the policy allows, and with
                waits of half the time that is left at most. 0: not at all. Infinite: until every
                call is delivered.

        Returns:
            The calls that were queued and were not delivered in that time, oldest first; also as an
            event and an error log. Calls that failed meanwhile in a way that `retry_on` does not
            name are among them if there is no `dead_letter`, and so are calls whose timer was
            stopped. Calls given up before went to `dead_letter`, the log and an event:
            `stats().abandoned`.

        Raises:
            RuntimeError: Called by a retried function of this queue, which would wait for itself.
        """
        return close_all([self], drain_timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _is_future(result: object) -> bool:
    """Whether it is a future of grpc or of `concurrent.futures`, by what its class can do."""
    kind = type(result)
    return hasattr(kind, "add_done_callback") and hasattr(kind, "result")


# --- Several queues at the same time, on the caller's thread: Ctrl-C ends the wait ---


def flush_all(invokers: Iterable[FailbackInvoker], timeout: Duration | None) -> bool:
    """Flush queues together; `timeout` is for all of them. See `FailbackInvoker.flush`."""
    ledgers = [invoker._ledger for invoker in invokers]  # noqa: SLF001 - the same room's
    seconds = [ledger.begin_flush(timeout) for ledger in ledgers]
    return _wait_empty(ledgers, max(seconds, default=0.0))


def close_all(invokers: Iterable[FailbackInvoker], drain_timeout: Duration) -> list[FailedCall]:
    """Close queues together; `drain_timeout` is for all of them. See `FailbackInvoker.close`."""
    begun: list[Ledger] = []
    seconds = 0.0
    failed: list[FailedCall] = []
    try:
        for invoker in invokers:
            left = invoker._ledger.begin_close(drain_timeout)  # noqa: SLF001 - the same room's
            if left is not None:
                begun.append(invoker._ledger)  # noqa: SLF001
                seconds = left
        if seconds > 0:
            _wait_empty(begun, seconds)
    finally:  # also after Ctrl-C: nothing may be lost in silence
        for ledger in begun:
            failed += ledger.end_close()
    return failed


def _wait_empty(ledgers: Iterable[Ledger], seconds: float) -> bool:
    end = time.monotonic() + seconds
    return all(_is_empty_by(ledger, end) for ledger in ledgers)


def _is_empty_by(ledger: Ledger, end: float) -> bool:
    empty = threading.Event()
    ledger.book.when_empty(empty.set)
    try:
        return empty.wait(max(0.0, min(end - time.monotonic(), threading.TIMEOUT_MAX)))
    finally:
        ledger.book.forget(empty.set)


# --- The first try, when it is a future ---


def _follow(ledger: Ledger, inner: Any, call: Call, started_ns: int) -> Future[Any]:
    """Make the future that the caller gets for `inner`."""
    outer: Future[Any] = Future()
    outer.add_done_callback(partial(_pass_cancel, inner))
    inner.add_done_callback(partial(_on_done, ledger, outer, call, started_ns))
    return outer


def _pass_cancel(inner: Future[Any], outer: Future[Any]) -> None:
    if outer.cancelled():
        inner.cancel()


def _on_done(
    ledger: Ledger, outer: Future[Any], call: Call, started_ns: int, inner: Future[Any]
) -> None:
    # On gRPC's thread: only hand over. The key is not the retries', which may hang.
    step = partial(_settle, ledger, outer, call, started_ns, inner)
    EXECUTOR.submit((ledger, "first tries"), step)


def _settle(
    ledger: Ledger, outer: Future[Any], call: Call, started_ns: int, inner: Future[Any]
) -> None:
    if inner.cancelled():
        outer.cancel()
    if not outer.set_running_or_notify_cancel():
        ledger.book.count(First.RAISED)
        return
    try:
        result = inner.result()
    except BaseException as error:  # noqa: BLE001 - it goes to the caller, or is parked
        try:
            parked = ledger.park(lambda: call, error, started_ns, partial(_launch, ledger))
        except Exception as refusal:  # noqa: BLE001 - the same
            outer.set_exception(refusal)
        else:
            if parked:
                outer.set_result(ledger.policy.default)
            else:
                outer.set_exception(error)
    else:
        ledger.book.count(First.DELIVERED)
        outer.set_result(result)


# --- Retries ---


def _launch(ledger: Ledger, entry: Entry) -> None:
    EXECUTOR.submit(ledger, partial(ledger.run_inside, entry, partial(_try, ledger, entry)))


def _try(ledger: Ledger, entry: Entry) -> None:
    if entry.state is State.GONE:  # reported as undelivered, while it waited for a worker
        return
    try:
        result = entry.call()
    except BaseException as error:  # noqa: BLE001 - the ledger decides and reports
        _failed(ledger, entry, error)
        return
    if inspect.isawaitable(result):
        _failed(ledger, entry, _no_loop(entry.call, result))
    elif _is_future(result):
        if entry.background is not None:
            entry.background.cancel = getattr(result, "cancel", None)
        result.add_done_callback(partial(_on_retry_done, ledger, entry))
    else:
        ledger.delivered(entry)


def _on_retry_done(ledger: Ledger, entry: Entry, future: Future[Any]) -> None:
    # On gRPC's thread: only hand over.
    EXECUTOR.submit(
        ledger, partial(ledger.run_inside, entry, partial(_finish, ledger, entry, future))
    )


def _finish(ledger: Ledger, entry: Entry, future: Future[Any]) -> None:
    try:
        future.result()
    except BaseException as error:  # noqa: BLE001 - the ledger decides and reports
        _failed(ledger, entry, error)
    else:
        ledger.delivered(entry)


def _failed(ledger: Ledger, entry: Entry, error: BaseException) -> None:
    failed = ledger.failed(entry, error)
    if failed is None:
        return
    try:
        ledger.dead_letter(failed)
    except BaseException as broken:  # noqa: BLE001 - a hook cannot hurt; reported
        ledger.bury(entry, broken)
    else:
        ledger.bury(entry)


def _no_loop(call: Call, result: object) -> TypeError:
    """What is wrong with a function that returns something to await where no loop is."""
    if inspect.iscoroutine(result):
        result.close()  # or Python warns that it was never awaited
    return TypeError(
        f"{label_of(call.function)} returned something to await, which only an event loop can do; "
        "make it an `async def`, or use rpcwheel.failback.aio.FailbackInvoker"
    )
