"""What feeds one channel: a subscription at a registry, and the reason if nothing comes of it."""

from __future__ import annotations

import threading
import weakref
from functools import partial
from typing import TYPE_CHECKING

from rpcwheel._concurrency.executor import EXECUTOR
from rpcwheel.errors import RegistryError

from .alarm import Alarm
from .doubting import tell_why

if TYPE_CHECKING:
    from collections.abc import Callable

    from rpcwheel.errors import TimerError
    from rpcwheel.instance import Snapshot
    from rpcwheel.timer.api import Timer

    from .face import Registry, Subscription
    from .named import NamedChannel
    from .selecting import Selection

__all__ = ["Follower"]


class Follower:
    """Follows a service for a channel, which is held weakly. Thread-safe."""

    def __init__(
        self,
        registry: Registry,
        selection: Selection,
        *,
        wait_ns: int,
        timer: Timer | None,
        let_go: Callable[[], object],
    ) -> None:
        """Do nothing yet.

        Args:
            registry: Where.
            selection: Whom.
            wait_ns: How long calls wait for something to be known; after that they are told why
                nothing is. That the registry refuses is told at once.
            timer: Where that is waited for.
            let_go: Called at the end.
        """
        self._registry = registry
        self._selection = selection
        self._wait_ns = wait_ns
        self._let_go = let_go
        self._lock = threading.RLock()
        self._doubt = Alarm(timer, self._rang, _not_told)
        self._subscription: Subscription | None = None
        self._closed = False

    def begin(self, channel: NamedChannel) -> None:
        """Follow.

        Raises:
            RegistryClosed: The registry is closed.
        """
        self._channel = weakref.ref(channel)
        self._subscription = self._registry.subscribe(self._selection.service, self._tell)
        EXECUTOR.submit(self, self._ask)

    def close(self) -> None:
        """Follow no more. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._doubt.clear()
        if self._subscription is not None:
            self._subscription.close()
        self._let_go()

    def _tell(self, snapshot: Snapshot) -> None:
        """On a worker."""
        channel = self._channel()
        if channel is not None:
            channel.update(self._selection.of(snapshot))

    def _ask(self, *, last: bool = False) -> None:
        """Find out whether anything will be known, and why not. On a worker."""
        if self._closed:
            return
        try:
            self._registry.lookup(self._selection.service)
        except RegistryError as error:
            again = tell_why(self._channel(), error, last=last)
            with self._lock:
                if again and not self._closed:
                    self._doubt.wake(self._doubt.now_ns() + self._wait_ns)

    def _rang(self) -> None:
        """On the timer's thread."""
        with self._lock:
            self._doubt.rang()
        EXECUTOR.submit(self, partial(self._ask, last=True))


def _not_told(_: TimerError) -> None:
    """Nobody is told why, then: each call says only that nothing is known."""
