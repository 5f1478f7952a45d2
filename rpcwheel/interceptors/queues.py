"""The failback queues and the state of a client, for `grpc` and `grpc.aio`."""

from __future__ import annotations

import threading
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from rpcwheel._grpc.connectivity import channel_target
from rpcwheel.call.client_state import ClientState
from rpcwheel.call.failback_policy import same_name_problem
from rpcwheel.errors import ConfigurationError, public_name, safe_repr
from rpcwheel.failback.invoker import InvokerBase

from .nesting import warn_if_nested

if TYPE_CHECKING:
    from collections.abc import Callable

    from rpcwheel.admission.targets import Breakers
    from rpcwheel.call.config import MethodConfigs
    from rpcwheel.call.failback_policy import FailbackPolicy
    from rpcwheel.call.keeper import ChannelKeeper
    from rpcwheel.call.policy import CallPolicy
    from rpcwheel.failback.held_calls import FailbackStats
    from rpcwheel.failback.queued_call import QueueEntry
    from rpcwheel.failback.routes import CallRoute, MakeCall
    from rpcwheel.failback.stored import StoredFunction, StoredRpc
    from rpcwheel.journal.backend import StoredCall
    from rpcwheel.timer.api import Timer

ChannelT = TypeVar("ChannelT")
InvokerT = TypeVar("InvokerT", bound=InvokerBase)


@public_name("FailbackQueues")
class FailbackQueuesBase(Generic[InvokerT]):
    """One queue for each policy, created by the first call that needs it. Thread-safe.

    A `FailbackInvoker` owns each queue.
    """

    def __init__(self, make_invoker: Callable[[FailbackPolicy], InvokerT]) -> None:
        """Begin without a queue.

        Args:
            make_invoker: Creates an invoker with an empty queue.
        """
        self._make_invoker = make_invoker
        self._lock = threading.Lock()
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
            if id(policy) not in self._by_policy:
                name = policy.name or name
                if policy.journal is not None and name in self._by_name:
                    invoker = self._with_same_name(policy, name)
                    self._by_policy[id(policy)] = (policy, invoker)
                    return invoker
                name = self._unused_name(name)
                invoker = self._make_invoker(policy.model_copy(update={"name": name}))
                self._by_name[name] = invoker
                self._by_policy[id(policy)] = (policy, invoker)  # a kept policy keeps its id
                if self._closed:
                    self._close_empty(invoker)
            return self._by_policy[id(policy)][1]

    def _with_same_name(self, policy: FailbackPolicy, name: str) -> InvokerT:
        """Return the invoker of an equal policy: calls in a journal are stored under the name.

        Raises:
            ConfigurationError: The policy with that name is another one.
        """
        for cached_policy, invoker in self._by_policy.values():
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

    def _begin_close(self) -> None:
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

    def _close_empty(self, invoker: InvokerT) -> None:
        """Close a new invoker, whose queue is empty. Called by `queue_for` after `close`."""
        raise NotImplementedError

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


def client_state(
    policy: CallPolicy,
    *,
    timer: Timer | None,
    queues: object,
    queues_class: type[Any],
    breakers: Breakers | None = None,
) -> ClientState:
    """Make the state of a client.

    Args:
        policy: The policies of its calls.
        timer: Any rpcwheel timer, or None.
        queues: The `FailbackQueues` for its calls; None makes new ones.
        queues_class: The class of `queues`, which differs between `grpc` and `grpc.aio`.
        breakers: Those of the kit; None for new ones.

    Raises:
        TypeError: An argument is of a wrong type.
    """
    checked_queues = queues_class(timer) if queues is None else queues
    if not isinstance(checked_queues, queues_class):
        raise TypeError(f"queues must be a FailbackQueues, or None, not {checked_queues!r}")
    return ClientState(policy, timer=timer, queue_of=checked_queues.queue_for, breakers=breakers)


class JournalRoutes:
    """Delivers the calls that a journal has for the target of one channel. Thread-safe.

    It exists as long as the channel or one of its multicallables, as a program may keep only a
    stub. The queues refer to it weakly.
    """

    def __init__(self, state: ClientState, channel: Any, calls: MakeCall) -> None:
        """Begin to deliver.

        Args:
            state: The state of the client; gets the channel's target, and keeps this object.
            channel: The user's channel.
            calls: Makes a stored call through it.

        Raises:
            ConfigurationError: The target of the channel is not known.
        """
        self._closed = False
        failback = state.failback
        self._keeper = failback.keeper
        self._calls = calls
        self._routes: list[tuple[Any, CallRoute]] = []
        if not failback.journaled:
            return
        failback.target, failback.routes = channel_target(channel), self
        make, is_open = partial(_make, weakref.ref(self)), partial(_is_open, weakref.ref(self))
        covers = partial(_covers, state.configs)
        for policy, pattern in failback.journaled:
            target = policy.target or failback.target
            if target is None:
                raise ConfigurationError(
                    f"the target of {channel!r} is not known, so its calls cannot be stored in a "
                    'journal: give one, FailbackPolicy(target="orders:50051", journal=...)'
                )
            invoker: Any = failback.queue_of(policy, pattern)
            self._routes.append((invoker, invoker.add_route(target, make, is_open, covers)))

    def _make(self, call: StoredCall, body: StoredRpc | StoredFunction) -> Any:
        """Make a stored call, whose channel is kept until the call has left the memory."""
        delivery: Any
        delivery, requests, options = self._calls(call, body)
        if self._keeper is not None and not delivery.keep(self._keeper):
            raise LookupError("the channel was closed")
        return delivery, requests, options

    def close(self) -> None:
        """Take no more calls for the channel. Idempotent."""
        self._closed = True
        for invoker, route in self._routes:
            invoker.remove_route(route)


def _make(
    routes: weakref.ref[JournalRoutes], call: StoredCall, body: StoredRpc | StoredFunction
) -> Any:
    existing = routes()
    if existing is None:
        raise LookupError("the channel was dropped")
    return existing._make(call, body)


def _covers(configs: MethodConfigs, method: str) -> bool:
    """Whether the policies of a client store calls of a method in a journal."""
    failback = configs.config_for(method).failback
    return failback is not None and failback.journal is not None


def _is_open(routes: weakref.ref[JournalRoutes]) -> bool:
    """Whether the channel was neither closed nor dropped."""
    existing = routes()
    return existing is not None and not existing._closed  # noqa: SLF001 - of this module


def apply_policies_with(
    channel_class: Callable[..., ChannelT],
    queues_class: type[FailbackQueuesBase[Any]],
    channel: Any,
    policy: CallPolicy,
    *,
    timer: Timer | None,
    queues: FailbackQueuesBase[Any] | None,
    keeps: bool = False,
    stacklevel: int,
    breakers: Breakers | None = None,
) -> ChannelT:
    """Apply policies to a channel, for `intercept_channel` and kits.

    Args:
        channel_class: The `InterceptedChannel` of the world.
        queues_class: The `FailbackQueues` of the world.
        channel: The channel of the user or of the kit.
        policy: The policies of all methods.
        timer: As for `client_interceptors`.
        queues: As for `client_interceptors`.
        keeps: Whether `queues` keep the connections of a closed channel while calls of it are
            queued.
        stacklevel: The frame that a warning names; 2 is the caller of this function.
        breakers: Those of the kit; None for new ones.
    """
    state = client_state(
        policy, timer=timer, queues=queues, queues_class=queues_class, breakers=breakers
    )
    intercepted = channel_class(channel, state, queues if keeps else None)
    warn_if_nested(channel, policy, stacklevel=stacklevel)
    return intercepted


def refuse_journal(state: ClientState) -> None:
    """Check that no policy of interceptors has a journal.

    Raises:
        ConfigurationError: One has: interceptors do not know a channel for stored calls.
    """
    if state.failback.journaled:
        raise ConfigurationError(
            "failback.journal has no effect with client_interceptors(), which do not know the "
            "channel through which stored calls are delivered after a restart; use "
            "intercept_channel(channel) in place of grpc.intercept_channel"
        )
