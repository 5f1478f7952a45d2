"""What the invokers of both twins have: a ledger, its figures, and an end that is never silent.

An invoker that is dropped with calls pending warns (`ResourceWarning`), and they go on. A program
that ends with calls pending logs them: when it exits, or when its main thread ends if a server of
`grpc` runs in it (see `rpcwheel.exiting`). A forked child begins with an empty queue: the calls are
the parent's.
"""

from __future__ import annotations

import atexit
import os
import warnings
import weakref
from typing import TYPE_CHECKING, Final

from rpcwheel.exiting import BACKGROUND

from .ledger import Ledger

if TYPE_CHECKING:
    from rpcwheel.timer.api import Timer

    from .core import FailbackStats
    from .policy import FailbackPolicy

__all__ = ["InvokerBase"]

_LEDGERS: Final[weakref.WeakSet[Ledger]] = weakref.WeakSet()


class InvokerBase:
    """Holds the ledger of one queue."""

    def __init__(self, policy: FailbackPolicy, *, timer: Timer | None = None) -> None:
        """Make an empty queue.

        Args:
            policy: What to try again, and how.
            timer: Any rpcwheel timer; None takes `shared_timer()` when a call is queued.

        Raises:
            TypeError: `policy` or `timer` is none.
        """
        self._ledger = Ledger(policy, timer)
        _LEDGERS.add(self._ledger)
        if not BACKGROUND.add(self._ledger):
            self._ledger.end_at_exit()

    @property
    def pending(self) -> int:
        """How many calls are queued or in retry."""
        return self._ledger.book.pending

    def stats(self) -> FailbackStats:
        """Count what has become of every call so far."""
        return self._ledger.book.stats()

    def __repr__(self) -> str:
        return f"<{type(self).__module__}.{type(self).__name__} {self._ledger.name!r}>"

    def __del__(self) -> None:
        ledger = getattr(self, "_ledger", None)
        if ledger is not None and ledger.book.pending:
            warnings.warn(
                f"{self!r} was dropped with {ledger.book.pending} calls pending: they go on, but "
                "nobody can wait for them; call close()",
                ResourceWarning,
                source=self,
                stacklevel=1,
            )


def _at_exit() -> None:
    """Report what the end of the program leaves undelivered."""
    for ledger in list(_LEDGERS):
        ledger.end_at_exit()


def _in_child() -> None:
    for ledger in list(_LEDGERS):
        ledger.book.disown()
        BACKGROUND.add(
            ledger
        )  # it was reset before: `rpcwheel._concurrency.executor` was imported earlier


atexit.register(_at_exit)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
