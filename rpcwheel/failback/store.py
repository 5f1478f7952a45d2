"""`Store` keeps the calls of a queue while they wait, in the memory.

Its subclass in `journaled.py` keeps them in a journal.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from rpcwheel.errors import FailbackClosed, FailbackFull

if TYPE_CHECKING:
    from concurrent.futures import Future

    from .held_calls import HeldCalls
    from .queued_call import QueuedCall, QueueEntry

AFTER_CLOSE = "it came after close(), or at the end of the program"


class Store:
    """The store of one queue. Thread-safe. This one is the memory: the calls that the queue holds.

    The docstrings say also what `JournalStore` does.
    """

    durable: ClassVar[bool] = False
    """Whether its calls survive the process. If so, they leave the memory between attempts, and the
    store gives them to the queue when they are due. If not, the queue sets their timeouts."""

    def __init__(self, calls: HeldCalls, max_pending: int) -> None:
        """Begin without a call; at most `max_pending` calls are accepted."""
        self._calls = calls
        self._max_pending = max_pending

    @property
    def pending(self) -> int:
        """How many calls of the queue there are."""
        return len(self._calls)

    def ensure_counted(self, *, block: bool) -> None:
        """Count the calls, if `pending` needs that and it was never done."""

    def entries(self) -> list[QueueEntry]:
        """List the calls, oldest first. A durable store blocks."""
        return self._calls.entries()

    def prepare(self, call: QueuedCall) -> str | None:
        """Prepare a failed call for `append`; return why it cannot be made a second time."""
        return call.saved.obstacle

    def append(self, call: QueuedCall, delay_ns: int) -> None:
        """Accept a failed call. It is as safe as in this store when this returns.

        Raises:
            FailbackError: It is not accepted; the message says why.
        """
        calls = self._calls
        with calls.lock:  # so that no call is added after `close` has reported the others
            if calls.closed:
                raise FailbackClosed(AFTER_CLOSE)
            if len(calls) >= self._max_pending:
                raise FailbackFull(
                    f"max_pending ({len(calls)}) calls are queued already; raise max_pending, or "
                    'drop such calls with overflow="drop"'
                )
            calls.add(call)
            calls.count("queued_total")

    def may_attempt(self, call: QueuedCall) -> bool:
        """Whether no other process may have the call. Does not block."""
        return True

    def postpone(self, call: QueuedCall, delay_ns: int, *, counts: bool) -> None:
        """Keep a call until its next attempt. Called under the lock of the calls.

        Args:
            call: The call, with the error of its attempt.
            delay_ns: When it is due.
            counts: Whether the attempt counts, and its error replaces that of an earlier one.
        """

    def settle(self, call: QueuedCall, outcome: str) -> None:
        """Note that a call has ended. Called under the lock of the calls.

        Args:
            call: The call, which has left the memory.
            outcome: The counter of `FailbackStats`.
        """

    def give_back(self, call: QueuedCall) -> bool:
        """Keep a call for other processes, as this one cannot attempt it any more.

        Called under the lock of the calls. False: it is lost.
        """
        return False

    def flushed(self) -> Future[None]:
        """Make all calls due; get a future for when this process can deliver none any more."""
        return self._calls.when_empty()

    def reset(self) -> None:
        """Begin anew in a forked child, after the queue has forgotten its calls."""

    def close(self, *, at_exit: bool) -> None:
        """Give all calls back, after the queue was closed. Idempotent; may block."""
