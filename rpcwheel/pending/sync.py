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
    """The answer to a pending call, to come. Made by `PendingCalls.open`, and ended by its table.

    A `concurrent.futures.Future` in every respect, for `wait` and `as_completed` and
    `asyncio.wrap_future` too. Callbacks run on the thread that gives the answer (or cancels), as
    with any such future; if the call timed out, lost its connection or was closed, on a worker of
    rpcwheel's, never on the timer's thread. What one raises becomes a `CallbackFailed` event.
    """

    def __init__(self, calls: PendingTable[Any, Any], key: Hashable, number: int) -> None:
        """For `PendingCalls.open`."""
        super().__init__()
        self._calls = calls
        self._key = key
        self._number = number
        self._here = True
        self._hooks: list[Callable[[Future[T]], object]] = []
        super().add_done_callback(_ended)

    def cancel(self) -> bool:
        """Give the call up: its entry and its timeout are gone at once. The peer is not told.

        Returns:
            Whether the call is cancelled; False if it has ended otherwise, then nothing changes.
        """
        if not self._calls.withdraw(self._key, self._number):
            return self.cancelled()
        if not super().cancel():
            return False  # the user has ended it, against all custom
        return not self.set_running_or_notify_cancel()  # wakes `concurrent.futures.wait`

    def add_done_callback(self, fn: Callable[[Future[T]], object]) -> None:
        """Call `fn(future)` when the call has ended; at once, on this thread, if it has."""
        with self._condition:
            if not self.done():
                self._hooks.append(fn)
                return
        self._run([fn])

    def result(self, timeout: float | None = None) -> T:
        """Wait for the answer.

        Args:
            timeout: Seconds to wait; the call goes on afterwards, and you may wait again.

        Returns:
            The value that was received.

        Raises:
            CallTimeout: No answer came in time.
            TimeoutError: `timeout` is over, and the call goes on (`done()` is False).
            concurrent.futures.CancelledError: The call was cancelled.
            BaseException: What `failed`, `lost` or `close` were given.

        If the wait is interrupted, by Ctrl-C for one, the call is cancelled: nobody waits for it
        any more.
        """
        try:
            return super().result(timeout)
        except BaseException as error:
            self._interrupted(error)
            raise
        finally:
            del self  # an error's traceback that held its future, which holds the error: a cycle

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the end, and give the error or None; otherwise as `result`."""
        try:
            return super().exception(timeout)
        except BaseException as error:
            self._interrupted(error)
            raise
        finally:
            del self

    def _interrupted(self, error: BaseException) -> None:
        if not isinstance(error, TimeoutError) and not self.done():
            self.cancel()

    def _conclude(self, value: Any, error: BaseException | None, *, here: bool) -> None:
        self._here = here
        with contextlib.suppress(InvalidStateError):  # as above
            if error is None:
                self.set_result(value)
            else:
                self.set_exception(error)

    def _tell(self) -> None:
        hooks, self._hooks = self._hooks, []  # it has ended: nobody appends any more
        if self._here or not hooks:
            self._run(hooks)
        else:
            EXECUTOR.submit(self._calls, partial(self._run, hooks))

    def _run(self, hooks: list[Callable[[Future[T]], object]]) -> None:
        # Ctrl-C and sys.exit() are for the user's thread that gave the answer.
        catch = Exception if self._here else BaseException
        for hook in hooks:
            run_callback(self._calls.name, hook, self, name="done callback", catch=catch)


def _ended(future: Future[Any]) -> None:
    if isinstance(future, CallFuture):
        future._tell()  # noqa: SLF001


class PendingCalls(PendingTable[CallFuture[V], V]):
    """The calls of a transport that wait for their answers, by key (Dubbo `DefaultFuture`).

    `PendingCalls[bytes]` says for type checkers what the answers are.

    Example::

        calls = PendingCalls()

        def call(request: bytes) -> bytes:
            future = calls.open(key := next(ids), timeout=2.0, connection=sock)
            sock.sendall(frame(key, request))
            calls.sent(key)
            return future.result()

        def read() -> None:                       # on the transport's thread
            for key, answer in frames(sock):
                calls.received(key, answer)
            calls.lost(sock, ConnectionError("the server has gone"))
    """

    def _future(self, key: Hashable, number: int) -> CallFuture[V]:
        return CallFuture(self, key, number)

    def _end(
        self, future: CallFuture[V], value: object, error: BaseException | None, *, here: bool
    ) -> None:
        future._conclude(value, error, here=here)  # noqa: SLF001
