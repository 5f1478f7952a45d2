"""A channel of `grpc.aio` to a service by its name: the twin of `named.py`.

The registry tells the channel on its loop which instances there are; the channel is known there
weakly, so one that is dropped unclosed lets go of its registry by itself.
"""

from __future__ import annotations

import asyncio
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from rpcwheel._concurrency.callbacks import run_callback
from rpcwheel._concurrency.executor import EXECUTOR
from rpcwheel._concurrency.loop import running_loop
from rpcwheel.cluster.aio import ClusterChannel
from rpcwheel.durations import to_ns

from ._aio_follower import Follower
from ._shared import Shared, check_policy, provider_of
from .aio_face import FailbackRegistry, Registry
from .selecting import (
    check_on_removed,
    checked_cluster,
    identity,
    select_by,
    split,
    without_service,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Hashable, Iterable, Sequence

    import grpc

    from rpcwheel.cluster._aio_fleet import Member
    from rpcwheel.cluster.pickers import Picker
    from rpcwheel.cluster.policy import ClusterPolicy
    from rpcwheel.instance import ServiceInstance
    from rpcwheel.timer.api import Timer

    from .policy import RegistryPolicy
    from .url import RegistryUrl

__all__ = ["NamedChannel", "channel"]

SESSIONS: Final[Shared[FailbackRegistry]] = Shared()
"""Of this process, for channels of grpc.aio, whatever loops they are on."""


class NamedChannel(ClusterChannel):
    """A channel that follows a service; made by `channel`."""

    def __init__(
        self,
        *args: Any,
        on_removed: Callable[[Member], object] | None = None,
        **settings: Any,
    ) -> None:
        """As the base; `on_removed` is told each member that is gone."""
        super().__init__(*args, **settings)
        self._on_removed = on_removed
        self._end: Callable[[], Awaitable[object]] | None = None

    def update(self, instances: Iterable[ServiceInstance]) -> None:
        """As in the base; for the registry, on the loop."""
        before = self.members
        super().update(instances)
        if self._on_removed is not None:
            for member in set(before).difference(self.members):
                run_callback(self.name, self._on_removed, member)

    def doubt(self, reason: str) -> None:
        """Have calls that wait in vain to know the members be told why; for the registry."""
        self._fleet.roster.doubt(reason)

    def ends_with(self, end: Callable[[], Coroutine[Any, Any, object]]) -> None:
        """Have it awaited once at the end: at the close, or by a worker when it is dropped."""
        dropped = weakref.finalize(self, EXECUTOR.submit, end, partial(_run, end))
        dropped.atexit = False

        async def once() -> None:
            if dropped.detach():
                await end()

        self._end = once

    async def close(self, grace: float | None = None) -> None:
        """Take no more calls, end those that run, and let go of the registry; as in the base."""
        try:
            await super().close(grace)
        finally:
            if self._end is not None:
                await self._end()


def channel(
    url: str = "",
    credentials: grpc.ChannelCredentials | None = None,
    *,
    service: str | None = None,
    registry: Registry | None = None,
    balance: str | Picker = "round_robin",
    options: Sequence[tuple[str, Any]] | None = None,
    compression: grpc.Compression | None = None,
    group: str | None = None,
    version: str | None = None,
    zone: str | None = None,
    policy: RegistryPolicy | None = None,
    cluster: ClusterPolicy | None = None,
    on_member: Callable[[Member], object] | None = None,
    on_removed: Callable[[Member], object] | None = None,
    timer: Timer | None = None,
) -> grpc.aio.Channel:
    """Make a channel to whoever serves a service, as a registry has it at each moment.

    As in the sync twin, on a running loop, where `on_member` and `on_removed` are called too.

    Raises:
        RuntimeError: No loop runs here.
        ConfigurationError: The URL or another value makes no sense; the message says what does.
        ExtraMissing: A package that the engine needs is not installed.
        TypeError: An argument is of a wrong type.
    """
    if running_loop() is None:
        raise RuntimeError("no event loop runs here: make the channel in a coroutine")
    if registry is not None and not isinstance(registry, Registry):
        raise TypeError(f"registry must be a rpcwheel.aio.Registry or None, not {registry!r}")
    check_policy(policy)
    check_on_removed(on_removed)
    parsed, named = split(url, registry, service)
    selection = select_by(parsed, named, group, version)
    cluster = checked_cluster(cluster, zone)
    made = NamedChannel(
        selection.service,
        balance=balance,
        credentials=credentials,
        options=options,
        compression=compression,
        policy=cluster,
        on_member=on_member,
        on_removed=on_removed,
        timer=timer,
    )
    found, let_go = _found(parsed, registry, policy, timer)
    follower = Follower(
        found,
        selection,
        wait_ns=to_ns(cluster.wait),
        timer=timer,
        let_go=let_go,
    )
    made.ends_with(follower.close)
    follower.begin(made)  # raises if a registry of the user's is closed: nothing is left of it
    return made


def _found(
    url: RegistryUrl | None,
    registry: Registry | None,
    policy: RegistryPolicy | None,
    timer: Timer | None,
) -> tuple[Registry, Callable[[], Awaitable[object]]]:
    """The registry that was given, or that channels by this URL share; and how it is let go of."""
    if registry is not None:
        return registry, _nothing
    assert url is not None  # noqa: S101 - `split` has seen to it
    alone = without_service(url)
    key = identity(alone), policy, id(timer)
    shared = SESSIONS.acquire(key, partial(_open, alone, policy, timer))
    return shared, partial(_let_go, key, shared)


def _open(url: RegistryUrl, policy: RegistryPolicy | None, timer: Timer | None) -> FailbackRegistry:
    provider, policy = provider_of(url, policy, timer)
    return FailbackRegistry(provider, policy=policy, timer=timer)


async def _let_go(key: Hashable, registry: FailbackRegistry) -> None:
    if SESSIONS.release(key, registry):
        await registry.close()


async def _nothing() -> None:
    """It is the user's to close."""


def _run(end: Callable[[], Coroutine[Any, Any, object]]) -> None:
    """On a worker, where there is no loop."""
    asyncio.run(end())
