"""Applies policies to a channel, or to interceptors, of `grpc` or `grpc.aio`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from rpcwheel._grpc.connectivity import channel_target, has_address
from rpcwheel.call.client_state import ClientState
from rpcwheel.call.keeper import ChannelKeeper
from rpcwheel.errors import ConfigurationError

from .journal_routes import JournalRoutes
from .nesting import warn_if_nested

if TYPE_CHECKING:
    from collections.abc import Callable

    from rpcwheel.admission.targets import Breakers
    from rpcwheel.call.policy import CallPolicy
    from rpcwheel.failback.routes import MakeCall
    from rpcwheel.timer.api import Timer

    from .queues import FailbackQueuesBase

ChannelT = TypeVar("ChannelT")


class InterceptedChannelBase:
    """The policies of a channel, the calls that a journal has for it, and what its end means."""

    _channel_class: ClassVar[type[Any]]
    """The class of channels of the world."""
    _wrong_channel: ClassVar[str]
    """The error for another channel; `{!r}` is the channel."""

    def __init__(
        self,
        channel: Any,
        state: ClientState,
        owner: FailbackQueuesBase[Any] | None = None,
    ) -> None:
        """Apply policies to a channel, of the user or of the kit.

        If the kit has made it, its queues are the owner, and keep the connections of a closed
        channel while calls of it are queued.

        Raises:
            TypeError: `channel` is not a channel of the world.
        """
        if not isinstance(channel, self._channel_class):
            raise TypeError(self._wrong_channel.format(channel))
        self._channel = channel
        self._state = state
        self.call_policy = state.policy
        self._on_close: Callable[[], object] | None = None
        self._owner = owner
        if owner is not None:
            state.failback.keeper = ChannelKeeper(is_used=state.failback.queues_calls)
        state.begin_admission(channel_target(channel), is_shared=has_address(channel))
        if state.admission is not None:
            state.admission.add_channel(self)
        self._routes = JournalRoutes(state, channel, self._stored_calls())

    def _stored_calls(self) -> MakeCall:
        """Return what makes the calls of a journal through the user's channel."""
        raise NotImplementedError

    def check_health(self, done: Callable[[bool], object]) -> bool:
        """Check the health of the server; see `HealthChecks`."""
        raise NotImplementedError

    def on_close(self, callback: Callable[[], object]) -> None:
        """Call `callback()` when this channel is closed. Replaces an earlier callback."""
        self._on_close = callback

    def _begin_close(self) -> None:
        """Take no more calls of journals, and give up what the channels of a target share."""
        self._routes.close()
        if self._state.admission is not None:
            self._state.admission.remove_channel(self)


def client_state(
    policy: CallPolicy,
    *,
    timer: Timer | None,
    queues: object,
    queues_class: type[Any],
    breakers: Breakers | None = None,
) -> ClientState:
    """Make the state of a client.

    Without `queues` it gets new ones. `queues_class` is their class in `grpc` or `grpc.aio`.
    Without `breakers` it gets new ones, too.

    Raises:
        TypeError: An argument is of a wrong type.
    """
    checked_queues = queues_class(timer) if queues is None else queues
    if not isinstance(checked_queues, queues_class):
        name = f"{queues_class.__module__}.FailbackQueues"  # each world has its own
        raise TypeError(f"queues must be a {name}, or None, not {checked_queues!r}")
    return ClientState(policy, timer=timer, queue_of=checked_queues.queue_for, breakers=breakers)


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

    The classes are `InterceptedChannel` and `FailbackQueues` of `grpc` or `grpc.aio`. If `keeps`,
    the queues keep the connections of a closed channel while calls of it are queued. A warning
    names the frame `stacklevel`; 2 is the caller of this function. Other arguments are those of
    `client_state`.
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
