"""The common part of the `FailbackInvoker` of `grpc` and that of `grpc.aio`."""

from __future__ import annotations

import warnings
import weakref
from typing import TYPE_CHECKING, Any, ClassVar, Final, TypeAlias

from rpcwheel._concurrency.executor import EXECUTOR
from rpcwheel.errors import ConfigurationError, is_coroutine_function, public_name, safe_repr

from .queue import FailbackQueue, refuse_inside
from .queued_call import definition_of, label_of
from .routes import CallRoute
from .stored_functions import FunctionCodec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from rpcwheel.call.failback_policy import FailbackPolicy
    from rpcwheel.durations import Duration
    from rpcwheel.timer.api import Timer

    from .held_calls import FailbackStats
    from .journaled import JournalStore
    from .queue import Attempt
    from .queued_call import QueueEntry
    from .routes import MakeCall

    Starter: TypeAlias = Callable[[Attempt], None]

_REGISTERED: Final[weakref.WeakValueDictionary[int, InvokerBase]] = weakref.WeakValueDictionary()
"""By the id. No `WeakSet`: it cannot be iterated while another thread adds to it."""


def registered_functions() -> list[InvokerBase]:
    """List the invokers of the functions that are decorated by `with_failback(journal=...)`."""
    invokers = (reference() for reference in _REGISTERED.valuerefs())
    return sorted((invoker for invoker in invokers if invoker is not None), key=repr)


def checked_queues(action: str, invokers: Iterable[InvokerBase]) -> list[FailbackQueue]:
    """Return the queues of invokers, before an action that concerns all of them.

    Raises:
        RuntimeError: It is called inside an attempt of one of them, and would wait for itself.
    """
    queues = [invoker._queue for invoker in invokers]  # noqa: SLF001 - of this module
    for queue in queues:
        refuse_inside(queue, action)
    return queues


def close_empty(invoker: InvokerBase) -> None:
    """Close an invoker that was just made. Does not block: a worker gives its journal back."""
    queue = invoker._queue  # noqa: SLF001 - of this module
    queue.begin_close(0)
    EXECUTOR.submit((queue, "close"), queue.end_close)


def begin_close_all(
    queues: Iterable[FailbackQueue], drain_timeout: Duration, closing: list[FailbackQueue]
) -> float:
    """Begin to close queues, and add each that was open to `closing`.

    Returns:
        How many seconds to wait before they are ended.
    """
    seconds = 0.0
    for queue in queues:
        drain_s = queue.begin_close(drain_timeout)
        if drain_s is not None:
            closing.append(queue)
            seconds = drain_s
    return seconds


@public_name("FailbackInvoker")
class InvokerBase:
    """A user's handle on a queue: what is the same for `grpc` and `grpc.aio`.

    If it is dropped while calls are pending, it warns (`ResourceWarning`); they are still retried.
    """

    _blocks: ClassVar[bool] = True
    """Whether its methods may block."""

    def __init__(self, policy: FailbackPolicy, *, timer: Timer | None = None) -> None:
        """Make an empty queue.

        Args:
            policy: Which errors are retried, and how.
            timer: Any rpcwheel timer; None takes `shared_timer()` when the first call is queued.

        Raises:
            ConfigurationError: The policy's `dead_letter` is a coroutine function, which only an
                invoker of `grpc.aio` can call; or its journal is not valid.
            TypeError: `policy` is not a FailbackPolicy, or `timer` is not a timer.
        """
        self._queue = FailbackQueue(policy, timer)
        if self._blocks and is_coroutine_function(policy.dead_letter):
            raise ConfigurationError(
                "dead_letter is a coroutine function, but it would be called on a thread without "
                "an event loop; give a plain function, or use rpcwheel.failback.aio"
            )

    @property
    def _journal(self) -> JournalStore:
        """The journal of the queue; TypeError if its policy has none."""
        if self._queue.store is None:
            raise TypeError(f"{self._queue.name}: its policy has no journal")
        return self._queue.store

    def register(self, function: Callable[..., Any]) -> None:
        """Store failed calls of this function, under the name of the queue.

        Raises:
            ConfigurationError: An argument cannot be stored, `order_key` names none, or a function
                of another qualified name has this journal and name.
        """
        codec = FunctionCodec(function, self._queue.name)
        codec.check_order_key(self._queue.policy.order_key)
        self._refuse_same_name(function)
        self._journal.codec = codec
        _REGISTERED[id(self)] = self

    def _refuse_same_name(self, function: Callable[..., Any]) -> None:
        """Check that no other function has the name, under which its calls are stored.

        It may be the same function, which was defined again: by a reload of its module, or as the
        module was imported under a second name, such as `__main__`.
        """
        name, url = self._queue.name, self._journal.journal.url
        for invoker in registered_functions():
            queue, store = invoker._queue, invoker._journal  # noqa: SLF001 - of this class
            is_same_queue = queue.name == name and store.journal.url.is_same_location(url)
            if invoker is self or queue.calls.closed or not is_same_queue or store.codec is None:
                continue
            label, other = label_of(function), label_of(store.codec.function)
            is_same = definition_of(function) == definition_of(store.codec.function)
            if label != other and not is_same:
                raise ConfigurationError(
                    f"{label} and {other} have the name {name!r} and the journal {url}: give each "
                    "its own, with_failback(name=...), because calls are stored under it"
                )

    def add_route(
        self,
        target: str,
        make: MakeCall,
        is_open: Callable[[], bool] = lambda: True,
        covers: Callable[[str], bool] = lambda _: True,
    ) -> CallRoute:
        """Deliver calls of the journal that are stored for a target; see `CallRoute`.

        Those of `grpc.aio` are delivered on the running loop.

        Raises:
            RuntimeError: It is of `grpc.aio`, and no event loop is running.
        """
        start, is_alive = self._starter()
        route = CallRoute(target, make, start, lambda: is_open() and is_alive(), covers)
        self._journal.add_route(route)
        return route

    def _starter(self) -> tuple[Starter, Callable[[], bool]]:
        """Return the `start` of routes, and whether their event loop still runs."""
        raise NotImplementedError

    def start(self) -> None:
        """Begin to deliver the calls of the decorated function that an earlier process has left.

        Those of a coroutine function are delivered on the running loop. Also done by the first call
        of the function. Idempotent. Without a journal, or for the queue of a channel, it has no
        effect.

        Raises:
            RuntimeError: The function is a coroutine function, and no event loop is running.
        """
        store = self._queue.store
        if store is not None and store.codec and store.routes.to("") is None:
            self.add_route("", store.codec.make)

    def remove_route(self, route: CallRoute) -> None:
        """Begin no more deliveries by a route. Idempotent."""
        self._journal.routes.remove(route)

    @property
    def pending(self) -> int:
        """How many calls are queued, those with a running attempt included.

        With a journal: of all processes, as last counted. The first access counts them, and blocks;
        with `grpc.aio` a worker thread counts them, and the value is 0 until then.
        """
        if self._queue.store is not None:
            self._queue.store.journal.counts.ensure(block=self._blocks)
        return self._queue.pending

    def stats(self) -> FailbackStats:
        """Get the counts of calls and attempts so far."""
        return self._queue.stats()

    def entries(self) -> list[QueueEntry]:
        """List the queued calls, oldest first. Thread-safe; with a journal it blocks.

        Returns:
            For each call the function's name or method path, its age, the attempts so far, the time
            until the next attempt, and the last error. Arguments are not in it. The list does not
            change afterwards.
        """
        return self._queue.entries()

    @safe_repr
    def __repr__(self) -> str:
        return f"<{type(self).__module__}.{type(self).__name__} {self._queue.name!r}>"

    def __del__(self) -> None:
        queue = getattr(self, "_queue", None)
        if queue is not None and not queue.durable and queue.pending:
            warnings.warn(
                f"{self!r} was dropped with {queue.pending} calls pending: they are still retried, "
                "but nothing can wait for them; call close()",
                ResourceWarning,
                source=self,
                stacklevel=1,
            )
