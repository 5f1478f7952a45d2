"""The calls that a journal has for a channel: made again through it, as long as it is open."""

from __future__ import annotations

import weakref
from functools import partial
from typing import TYPE_CHECKING, Any

from rpcwheel._grpc.connectivity import channel_target
from rpcwheel.errors import ConfigurationError

if TYPE_CHECKING:
    from rpcwheel.call.client_state import ClientState
    from rpcwheel.call.config import MethodConfigs
    from rpcwheel.failback.routes import CallRoute, MakeCall
    from rpcwheel.failback.stored import StoredFunction, StoredRpc
    from rpcwheel.journal.backend import StoredCall


class JournalRoutes:
    """Delivers the calls that a journal has for the target of one channel. Thread-safe.

    It exists as long as the channel or one of its multicallables, as a program may keep only a
    stub. The queues refer to it weakly.
    """

    def __init__(self, state: ClientState, channel: Any, calls: MakeCall) -> None:
        """Begin to deliver the calls for a channel, which `calls` makes through it.

        The state gets the target of the channel, and keeps this object.

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
