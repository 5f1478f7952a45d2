"""Keeps the connections of a closed channel while queued calls need them."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


class ChannelKeeper:
    """Counts the queued calls of one channel. Thread-safe.

    The channel of a kit may be closed before its queued calls are delivered. Then its connections
    are kept until the last of these calls has left its queue.
    """

    def __init__(self, *, is_used: bool) -> None:
        """Begin without a call, for an open channel whose calls may be queued if `is_used`."""
        self._lock = threading.RLock()  # a finalizer may queue or end a call at any time
        self._calls = 0
        self._is_over = False
        self._close: Callable[[], object] | None = None
        self.is_used = is_used

    def add(self) -> bool:
        """Count a call that is about to be queued. False: the connections are closed."""
        with self._lock:
            if self._is_over:
                return False
            self._calls += 1
            self.is_used = True
            return True

    def remove(self) -> None:
        """Note that a call has left its queue, or was not queued. Does not block."""
        with self._lock:
            self._calls -= 1
            close = None if self._calls else self._close
            self._is_over = self._is_over or close is not None
        if close is not None:
            close()

    def keep(self, close: Callable[[], object]) -> bool:
        """Note that the channel is closed.

        Args:
            close: Called on any thread when the last queued call has left its queue; must not
                block.

        Returns:
            Whether the connections are kept. If not, `close` is not called.
        """
        with self._lock:
            if self._calls and not self._is_over:
                self._close = close
                return True
            self._is_over = True
            return False

    def end(self) -> None:
        """Keep the connections no longer; `close` is not called."""
        with self._lock:
            self._is_over, self._close = True, None


class KeptDelivery:
    """Makes a queued call again. Its channel is kept until the call has left its queue."""

    __slots__ = ("_keeper", "attempts", "channel", "label", "timeout_s")

    def __init__(
        self, method: str, channel: object, timeout_s: float | None, attempts: int = 1
    ) -> None:
        """Begin without a channel that is kept, after a number of attempts.

        Deliveries with the same `channel` are paced together; None: with no others.
        """
        self.label = method
        """The name of the call in failback's events."""
        self.channel = channel
        self.timeout_s = timeout_s
        self.attempts = attempts
        """The number of attempts so far, which their metadata has."""
        self._keeper: ChannelKeeper | None = None

    def __call__(self, *requests: Any) -> Any:
        """Make an attempt."""
        raise NotImplementedError

    def keep(self, keeper: ChannelKeeper) -> bool:
        """Keep the connections of a channel. False: they are closed."""
        is_kept = keeper.add()
        self._keeper = keeper if is_kept else None
        return is_kept

    def release_channel(self) -> None:
        """Keep the connections no longer, as the call has left its queue. Idempotent."""
        keeper, self._keeper = self._keeper, None
        if keeper is not None:
            keeper.remove()
