"""The ways in which a process delivers the calls of a journal."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from rpcwheel.journal.backend import StoredCall

    from .stored import StoredFunction, StoredRpc


class MakeCall(Protocol):
    """Makes the function for the attempts of a stored call, and its arguments."""

    def __call__(
        self, call: StoredCall, body: StoredRpc | StoredFunction, /
    ) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
        """Raises ValueError if the call can never be made; the message says why."""


@dataclass(slots=True, eq=False)
class CallRoute:
    """A way to deliver the calls of one target: a channel, or the function of the queue."""

    target: str
    make: MakeCall
    start: Callable[[Any], None]
    """Starts an attempt; as `QueuedCall.start`."""
    is_open: Callable[[], bool] = lambda: True
    """Whether calls can still be made."""
    covers: Callable[[str], bool] = lambda _: True
    """Whether calls of a method are delivered. A channel delivers methods that have a policy with a
    journal: who can write to the journal must not call others with the channel's credentials."""


class Routes:
    """The routes of one queue. Thread-safe."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Begin without a route, in a forked child: its channels are the parent's."""
        self._lock = threading.RLock()  # a finalizer may drop a channel
        self._by_target: dict[str, list[CallRoute]] = {}

    def add(self, route: CallRoute) -> None:
        """Deliver the calls of a target from now on. If it has several routes, by the first."""
        with self._lock:
            self._by_target.setdefault(route.target, []).append(route)

    def remove(self, route: CallRoute) -> None:
        """Begin no more attempts by a route. Idempotent."""
        with self._lock:
            routes = self._by_target.get(route.target, [])
            # A new list: the finalizer that calls this may run while `to` reads the other one.
            self._by_target[route.target] = [each for each in routes if each is not route]

    def to(self, target: str, method: str | None = None) -> CallRoute | None:
        """Get the route to a target; None: this process does not deliver its calls.

        Args:
            target: The target.
            method: A method that the route must cover; None for any.
        """
        with self._lock:
            routes = [route for route in self._by_target.get(target, []) if route.is_open()]
            if routes:
                self._by_target[target] = routes
            else:
                self._by_target.pop(target, None)
        return next((each for each in routes if method is None or each.covers(method)), None)

    def open_targets(self) -> list[str]:
        """List the targets to which there are routes."""
        with self._lock:
            targets = list(self._by_target)
        return [target for target in targets if self.to(target) is not None]
