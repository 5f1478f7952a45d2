"""The failback queues of the calls of clients, and the state of a client, for both worlds."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from rpcwheel.call.config import ClientState

if TYPE_CHECKING:
    from collections.abc import Callable

    from rpcwheel.call.policy import CallPolicy
    from rpcwheel.failback.core import FailbackStats
    from rpcwheel.failback.policy import FailbackPolicy
    from rpcwheel.timer.api import Timer

__all__ = ["FailbackQueuesBase", "client_state"]


class Invoker(Protocol):
    """What the queues of both worlds have."""

    @property
    def pending(self) -> int:
        """How many calls are queued or in retry."""

    def stats(self) -> FailbackStats:
        """Count what has become of every call so far."""


Queue = TypeVar("Queue", bound=Invoker)


class FailbackQueuesBase(Generic[Queue]):
    """One queue for each policy, made when first asked for. Thread-safe."""

    def __init__(self, make: Callable[[FailbackPolicy], Queue]) -> None:
        """Begin without a queue.

        Args:
            make: Makes one.
        """
        self._make = make
        self._lock = threading.Lock()
        self._closed = False
        self._queues: dict[int, tuple[FailbackPolicy, Queue]] = {}
        self._named: dict[str, Queue] = {}

    def queue_for(self, policy: FailbackPolicy, name: str) -> Queue:
        """The queue of a policy (of the object, not of its values), made when first asked for.

        Args:
            policy: How its calls are delivered.
            name: What it is called if the policy has no name: where that policy stands. With a
                number behind it if another queue has that name.
        """
        known = self._queues.get(id(policy))
        if known is not None:
            return known[1]
        with self._lock:
            if id(policy) not in self._queues:
                name = self._free(policy.name or name)
                queue = self._named[name] = self._make(policy.model_copy(update={"name": name}))
                self._queues[id(policy)] = (policy, queue)  # the policy too, or its id may return
                if self._closed:
                    self._end(queue)
            return self._queues[id(policy)][1]

    def _end(self, queue: Queue) -> None:
        """Close a queue that was made after `close`."""
        raise NotImplementedError

    def _free(self, name: str) -> str:
        """The name, with a number behind it if another queue has it."""
        names = [name, *(f"{name} ({number})" for number in range(2, len(self._named) + 2))]
        return next(one for one in names if one not in self._named)

    @property
    def pending(self) -> int:
        """How many calls are queued or in retry, in all queues."""
        return sum(queue.pending for queue in list(self._named.values()))

    def stats(self) -> dict[str, FailbackStats]:
        """What has become of every call so far, by the queue's name."""
        return {name: queue.stats() for name, queue in list(self._named.items())}

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {sorted(self._named)} pending={self.pending}>"


def client_state(
    policy: CallPolicy,
    timer: Timer | None,
    queues: object,
    own: type[Any],
) -> ClientState:
    """Make the state of a client.

    Args:
        policy: What applies to which calls.
        timer: Any rpcwheel timer, or None.
        queues: The `FailbackQueues` of this world; None makes new ones.
        own: The class of these queues.

    Raises:
        TypeError: An argument is of a wrong type.
    """
    given = own(timer) if queues is None else queues
    if not isinstance(given, own):
        raise TypeError(f"queues must be a FailbackQueues, or None, not {given!r}")
    return ClientState(policy, timer=timer, queue_of=given.queue_for)
