"""The ways in which a process delivers the calls of a journal."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
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


@dataclass(slots=True)
class TargetRoutes:
    """The routes to one target, the oldest first, and how many of its calls are taken."""

    routes: list[CallRoute] = field(default_factory=list)
    capacity: int = 0
    """How many calls could be in the memory at the last look at the journal."""
    has_more: bool = False
    """Whether the last look took `capacity` calls, so that more may be ready in the journal."""


class Routes:
    """The routes of one queue. Thread-safe."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Begin without a route, in a forked child: its channels are the parent's."""
        self._lock = threading.RLock()  # a finalizer may drop a channel
        self._targets: dict[str, TargetRoutes] = {}

    def add(self, route: CallRoute) -> None:
        """Deliver the calls of a target from now on. If it has several routes, by the first."""
        with self._lock:
            self._targets.setdefault(route.target, TargetRoutes()).routes.append(route)

    def remove(self, route: CallRoute) -> None:
        """Begin no more attempts by a route. Idempotent."""
        with self._lock:
            target = self.target(route.target)
            if route in target.routes:
                target.routes.remove(route)
            if not target.routes:
                self._targets.pop(route.target, None)

    def target(self, name: str) -> TargetRoutes:
        """Get a target; one without routes is not kept."""
        with self._lock:
            return self._targets.get(name) or TargetRoutes()

    def to(self, name: str, method: str | None = None) -> CallRoute | None:
        """Get the route to a target; None: this process does not deliver its calls.

        Args:
            name: The target.
            method: A method that the route must cover; None for any.
        """
        with self._lock:
            target = self.target(name)
            routes = target.routes = [route for route in target.routes if route.is_open()]
            if not routes:
                self._targets.pop(name, None)
        return next((each for each in routes if method is None or each.covers(method)), None)

    def open_targets(self) -> dict[str, TargetRoutes]:
        """Get the targets to which there are routes."""
        with self._lock:
            targets = list(self._targets.items())
        return {name: target for name, target in targets if self.to(name) is not None}
