"""The failback queues and the state of a client, for `grpc` and `grpc.aio`."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from rpcwheel.call.config import ClientState
from rpcwheel.failback.queue import InvokerBase

if TYPE_CHECKING:
    from collections.abc import Callable

    from rpcwheel.call.policy import CallPolicy
    from rpcwheel.failback.policy import FailbackPolicy
    from rpcwheel.failback.queue import FailbackStats
    from rpcwheel.failback.queued_call import QueueEntry
    from rpcwheel.timer.api import Timer

__all__ = ["FailbackQueuesBase", "client_state"]

Queue = TypeVar("Queue", bound=InvokerBase)


class FailbackQueuesBase(Generic[Queue]):
    """One queue for each policy, created by the first call that needs it. Thread-safe."""

    def __init__(self, make: Callable[[FailbackPolicy], Queue]) -> None:
        """Begin without a queue.

        Args:
            make: Creates one.
        """
        self._make = make
        self._lock = threading.Lock()
        self._closed = False
        self._queues: dict[int, tuple[FailbackPolicy, Queue]] = {}
        self._named: dict[str, Queue] = {}

    def queue_for(self, policy: FailbackPolicy, name: str) -> Queue:
        """Get the queue of a policy (of this object, not of an equal one).

        Args:
            policy: How its calls are retried.
            name: The queue's name if the policy has none: the pattern under which the policy is
                given. If another queue has that name, a number is appended.
        """
        known = self._queues.get(id(policy))
        if known is not None:
            return known[1]
        with self._lock:
            if id(policy) not in self._queues:
                name = self._unused(policy.name or name)
                queue = self._named[name] = self._make(policy.model_copy(update={"name": name}))
                self._queues[id(policy)] = (policy, queue)  # with the policy, which keeps its id
                if self._closed:
                    self._end(queue)
            return self._queues[id(policy)][1]

    def _end(self, queue: Queue) -> None:
        """Close a queue that was created after `close`."""
        raise NotImplementedError

    def _unused(self, name: str) -> str:
        names = [name, *(f"{name} ({number})" for number in range(2, len(self._named) + 2))]
        return next(one for one in names if one not in self._named)

    @property
    def pending(self) -> int:
        """How many calls are queued, those with a running attempt included, in all queues."""
        return sum(queue.pending for queue in list(self._named.values()))

    def stats(self) -> dict[str, FailbackStats]:
        """Get the counts of calls and attempts so far, by the name of the queue."""
        return {name: queue.stats() for name, queue in list(self._named.items())}

    def entries(self) -> dict[str, list[QueueEntry]]:
        """List the queued calls, oldest first, by the name of the queue.

        Thread-safe. Queues without calls are included. See `FailbackInvoker.entries`.
        """
        return {name: queue.entries() for name, queue in list(self._named.items())}

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {sorted(self._named)} pending={self.pending}>"


def client_state(
    policy: CallPolicy,
    timer: Timer | None,
    queues: object,
    queues_class: type[Any],
) -> ClientState:
    """Make the state of a client.

    Args:
        policy: The policies of its calls.
        timer: Any rpcwheel timer, or None.
        queues: The `FailbackQueues` for its calls; None makes new ones.
        queues_class: The class of `queues`, which differs between `grpc` and `grpc.aio`.

    Raises:
        TypeError: An argument is of a wrong type.
    """
    given = queues_class(timer) if queues is None else queues
    if not isinstance(given, queues_class):
        raise TypeError(f"queues must be a FailbackQueues, or None, not {given!r}")
    return ClientState(policy, timer=timer, queue_of=given.queue_for)
