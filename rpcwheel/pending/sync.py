"""Pending calls for threads: the future is a `concurrent.futures.Future`."""

from __future__ import annotations

import contextlib
from concurrent.futures import Future, InvalidStateError
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from rpcwheel._concurrency.callbacks import run_callback
from rpcwheel._concurrency.executor import EXECUTOR

from .table import PendingTable, V

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

__all__ = ["CallFuture", "PendingCalls"]

T = TypeVar("T")


class CallFuture(Future[T]):
    """The future of a pending call. Created by `PendingCalls.open`, and ended by its table.

    A `concurrent.futures.Future`, also for `wait`, `as_completed` and `asyncio.wrap_future`.
    Callbacks run on the thread that delivers the response or cancels the call, as with any such
    future. If the call timed out, lost its connection or was closed, they run on a worker thread,
    never on the timer's thread. What a callback raises becomes a `CallbackFailed` event.
    """

    def __init__(self, calls: PendingTable[Any, Any], key: Hashable) -> None:
        """Create a future. Called by `PendingCalls.open`."""
        super().__init__()
        self._calls = calls
        self._key = key
        self._runs_callbacks_here = True  # whether the thread that ends it may run callbacks
        self._callbacks: list[Callable[[Future[T]], object]] = []
        super().add_done_callback(_run_callbacks)

    def cancel(self) -> bool:
        """Cancel the call: removes it and its timeout at once. The server does not learn of it.

        Returns:
            Whether the call is canceled; False, and nothing changes, if it ended otherwise.
        """
        if not self._calls.withdraw(self._key, self):
            return self.cancelled()
        if not super().cancel():
            return False  # the user has ended it, which only the table should do
        return not self.set_running_or_notify_cancel()  # wakes `concurrent.futures.wait`

    def add_done_callback(self, fn: Callable[[Future[T]], object]) -> None:
        """Call `fn(future)` when the call has ended; if it has, at once on this thread."""
        with self._condition:
            if not self.done():
                self._callbacks.append(fn)
                return
        self._run([fn])

    def result(self, timeout: float | None = None) -> T:
        """Wait for the response.

        Args:
            timeout: Seconds to wait. The call stays pending afterwards.

        Returns:
            The value that was received.

        Raises:
            CallTimeout: The call timed out.
            TimeoutError: `timeout` has passed, and the call is pending (`done()` is False).
            concurrent.futures.CancelledError: The call was canceled.
            BaseException: The error given to `failed`, `lost` or `close`.

        If the wait is interrupted, for example by Ctrl-C, the call is canceled.
        """
        try:
            return super().result(timeout)
        except BaseException as error:
            self._cancel_if_interrupted(error)
            raise
        finally:
            del self  # else a cycle: the error, its traceback, this frame, and the future

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the end, and return the error or None; otherwise as `result`."""
        try:
            return super().exception(timeout)
        except BaseException as error:
            self._cancel_if_interrupted(error)
            raise
        finally:
            del self

    def _cancel_if_interrupted(self, error: BaseException) -> None:
        if not isinstance(error, TimeoutError) and not self.done():
            self.cancel()

    def end(self, value: Any, error: BaseException | None, *, may_run_callbacks: bool) -> None:
        """End the future with `error`, or with `value` if that is None. Called by the table.

        Args:
            value: The result.
            error: The exception.
            may_run_callbacks: Whether this thread may run callbacks of the user.
        """
        self._runs_callbacks_here = may_run_callbacks
        with contextlib.suppress(InvalidStateError):  # the user has ended it
            if error is None:
                self.set_result(value)
            else:
                self.set_exception(error)

    def run_callbacks(self) -> None:
        """Run the callbacks, on this thread or on a worker thread. Called by the done callback."""
        callbacks, self._callbacks = self._callbacks, []
        if self._runs_callbacks_here or not callbacks:
            self._run(callbacks)
        else:
            EXECUTOR.submit(self._calls, partial(self._run, callbacks))

    def _run(self, callbacks: list[Callable[[Future[T]], object]]) -> None:
        # On a thread of the user, Ctrl-C and sys.exit() in a callback are the user's.
        catch = Exception if self._runs_callbacks_here else BaseException
        for callback in callbacks:
            run_callback(self._calls.name, callback, self, name="done callback", catch=catch)


def _run_callbacks(future: Future[Any]) -> None:
    if isinstance(future, CallFuture):
        future.run_callbacks()


class PendingCalls(PendingTable[CallFuture[V], V]):
    """The pending calls of a transport, by key (Dubbo `DefaultFuture`).

    For type checkers: `PendingCalls[bytes]` is one whose responses are bytes.

    Example::

        calls = PendingCalls()

        def call(request: bytes) -> bytes:
            future = calls.open(key := next(ids), timeout=2.0, connection=sock)
            sock.sendall(frame(key, request))
            calls.sent(key)
            return future.result()

        def read() -> None:                       # on the transport's thread
            for key, response in frames(sock):
                calls.received(key, response)
            calls.lost(sock, ConnectionError("the server closed the connection"))
    """

    def _new_future(self, key: Hashable) -> CallFuture[V]:
        return CallFuture(self, key)

    def _end(
        self,
        future: CallFuture[V],
        value: object,
        error: BaseException | None,
        *,
        may_run_callbacks: bool,
    ) -> None:
        future.end(value, error, may_run_callbacks=may_run_callbacks)
