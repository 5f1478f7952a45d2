"""The failback queues of clients, for `grpc` and `grpc.aio`."""

from __future__ import annotations

import threading
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar, cast

from rpcwheel.call.failback_policy import same_name_problem
from rpcwheel.errors import ConfigurationError, public_name, safe_repr
from rpcwheel.failback.invoker import InvokerBase, checked_queues, close_empty

if TYPE_CHECKING:
    from rpcwheel.call.failback_policy import FailbackPolicy
    from rpcwheel.call.keeper import ChannelKeeper
    from rpcwheel.failback.held_calls import FailbackStats
    from rpcwheel.failback.queued_call import QueueEntry
    from rpcwheel.timer.api import Timer

InvokerT = TypeVar("InvokerT", bound=InvokerBase)


@public_name("FailbackQueues")
class FailbackQueuesBase(Generic[InvokerT]):
    """One queue for each policy, created by the first call that needs it. Thread-safe.

    A `FailbackInvoker` owns each queue.
    """

    _invoker_class: ClassVar[type[InvokerBase]]

    def __init__(self, timer: Timer | None = None) -> None:
        """Begin without a queue.

        Args:
            timer: Any rpcwheel timer; None takes `shared_timer()`.
        """
        self._timer = timer
        self._lock = threading.RLock()  # a finalizer or signal handler may make a call that fails
        self._closed = False
        self._by_policy: dict[int, tuple[FailbackPolicy, InvokerT]] = {}
        self._by_name: dict[str, InvokerT] = {}
        self._closing = 0  # how many threads and tasks run `close`
        self._kept: dict[Any, None] = {}
        """The channels that `keep` keeps; a set that any thread may change."""

    def queue_for(self, policy: FailbackPolicy, name: str) -> InvokerT:
        """Get the invoker with the queue of a policy (of this object, not of an equal one).

        Args:
            policy: How its calls are retried.
            name: The queue's name if the policy has none: the pattern under which the policy is
                given. If another queue has that name, a number is appended.

        Raises:
            ConfigurationError: The policy has a journal, and a different one has that name.
        """
        cached = self._by_policy.get(id(policy))
        if cached is not None:
            return cached[1]
        with self._lock:
            while id(policy) not in self._by_policy:
                self._add(policy, policy.name or name)
            return self._by_policy[id(policy)][1]

    def _add(self, policy: FailbackPolicy, name: str) -> None:
        """Make the queue of a policy, under the lock, or use that of an equal one with a journal.

        If a finalizer or signal handler makes the queue, or one of the same name, meanwhile, adds
        none.
        """
        if policy.journal is None:
            name = self._unused_name(name)
        elif name in self._by_name:
            self._by_policy[id(policy)] = (policy, self._with_same_name(policy, name))
            return
        named = policy.model_copy(update={"name": name})
        invoker = cast("InvokerT", self._invoker_class(named, timer=self._timer))
        key, entry = id(policy), (policy, invoker)  # a kept policy keeps its id
        # No call follows before the stores: a finalizer or signal handler could run in it.
        if name in self._by_name or key in self._by_policy:
            close_empty(invoker)
            return
        self._by_policy[key] = entry
        self._by_name[name] = invoker
        if self._closed:
            close_empty(invoker)

    def _with_same_name(self, policy: FailbackPolicy, name: str) -> InvokerT:
        """Return the invoker of an equal policy: calls in a journal are stored under the name.

        Raises:
            ConfigurationError: The policy with that name is another one.
        """
        for cached_policy, invoker in list(self._by_policy.values()):
            if invoker is self._by_name[name] and cached_policy == policy:
                return invoker
        raise ConfigurationError(same_name_problem(name))

    def keep(self, channel: Any, keeper: ChannelKeeper) -> bool:
        """Keep the connections of a channel that was closed, if calls of it are queued.

        They are closed when the last of these calls has left its queue, and at the end of `close`.

        Args:
            channel: Has `close_kept` and `close_kept_soon`.
            keeper: Counts the queued calls of the channel.

        Returns:
            Whether they are kept.
        """
        self._kept[channel] = None
        if keeper.keep(partial(self._release, channel)):
            return True
        self._kept.pop(channel, None)
        return False

    def _release(self, channel: Any) -> None:
        """Close the connections of a channel, unless `close` is about to. Does not block."""
        if not self._closing and self._take(channel):
            channel.close_kept_soon()

    def refuse_close_inside(self) -> None:
        """Check that `close` is not called inside an attempt of one of the queues.

        Raises:
            RuntimeError: It is.
        """
        checked_queues("close()", list(self._by_name.values()))

    def _begin_close(self) -> None:
        """Note that `close` begins.

        Raises:
            RuntimeError: It is called inside an attempt of one of the queues.
        """
        self.refuse_close_inside()
        with self._lock:  # `queue_for` may run on another thread
            self._closed = True
            self._closing += 1

    def _take_kept(self) -> list[Any]:
        """Return the channels whose connections `close` must close: none if another one runs."""
        with self._lock:
            self._closing -= 1
            if self._closing:
                return []
        kept = list(self._kept)
        return [channel for channel in kept if self._take(channel)]

    def _take(self, channel: Any) -> bool:
        """Forget a kept channel. False: another thread has, and closes its connections."""
        return self._kept.pop(channel, channel) is None

    def _unused_name(self, name: str) -> str:
        names = [name, *(f"{name} ({number})" for number in range(2, len(self._by_name) + 2))]
        return next(unused for unused in names if unused not in self._by_name)

    @property
    def pending(self) -> int:
        """How many calls are queued, those with a running attempt included, in all queues."""
        return sum(invoker.pending for invoker in list(self._by_name.values()))

    def stats(self) -> dict[str, FailbackStats]:
        """Get the counts of calls and attempts so far, by the name of the queue."""
        return {name: invoker.stats() for name, invoker in list(self._by_name.items())}

    def entries(self) -> dict[str, list[QueueEntry]]:
        """List the queued calls, oldest first, by the name of the queue.

        Thread-safe. Queues without calls are included. See `FailbackInvoker.entries`.
        """
        return {name: invoker.entries() for name, invoker in list(self._by_name.items())}

    @safe_repr
    def __repr__(self) -> str:
        return f"<{type(self).__name__} {sorted(self._by_name)} pending={self.pending}>"
