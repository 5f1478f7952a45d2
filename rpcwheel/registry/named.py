"""A channel to a service by its name: a channel of many members, fed by a registry.

The registry's worker tells the channel which instances there are; the channel is known there
weakly, so one that is dropped unclosed lets go of its registry by itself.
"""

from __future__ import annotations

import weakref
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from rpcwheel._concurrency.callbacks import run_callback
from rpcwheel._concurrency.executor import EXECUTOR
from rpcwheel.cluster.sync import ClusterChannel
from rpcwheel.durations import to_ns

from ._follower import Follower
from ._shared import Shared, check_policy, provider_of
from .face import FailbackRegistry, Registry
from .selecting import (
    check_on_removed,
    checked_cluster,
    identity,
    select_by,
    split,
    without_service,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Sequence

    import grpc

    from rpcwheel.cluster._fleet import Member
    from rpcwheel.cluster.pickers import Picker
    from rpcwheel.cluster.policy import ClusterPolicy
    from rpcwheel.instance import ServiceInstance
    from rpcwheel.timer.api import Timer

    from .policy import RegistryPolicy
    from .url import RegistryUrl

__all__ = ["NamedChannel", "channel"]

SESSIONS: Final[Shared[FailbackRegistry]] = Shared()
"""Of this process, for channels."""


class NamedChannel(ClusterChannel):
    """A channel that follows a service; made by `channel`."""

    def __init__(
        self,
        *args: Any,
        on_removed: Callable[[Member], object] | None = None,
        **settings: Any,
    ) -> None:
        """As the base, which is to be told later who its members are.

        Args:
            *args: Those of `ClusterChannel`.
            on_removed: Told each member that is gone.
            **settings: Those of `ClusterChannel`.
        """
        super().__init__(*args, **settings)
        self._on_removed = on_removed
        self._end: Callable[[], object] | None = None

    def update(self, instances: Iterable[ServiceInstance]) -> None:
        """As in the base; for the registry."""
        before = self.members
        super().update(instances)
        if self._on_removed is not None:
            for member in set(before).difference(self.members):
                run_callback(self.name, self._on_removed, member)

    def doubt(self, reason: str) -> None:
        """Have calls that wait in vain to know the members be told why; for the registry."""
        self._fleet.roster.doubt(reason)

    def ends_with(self, end: Callable[[], object]) -> None:
        """Have it called at the end, once: when it is closed, or by a worker when it is dropped."""
        dropped = weakref.finalize(self, EXECUTOR.submit, end, end)
        dropped.atexit = False
        self._end = lambda: end() if dropped.detach() else None

    def close(self) -> None:
        """End all calls, close all members, and let go of the registry. A second time, nothing.

        Not to be called where gRPC runs done-callbacks, as for any channel of grpc.
        """
        super().close()
        if self._end is not None:
            self._end()


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
) -> grpc.Channel:
    """Make a channel to whoever serves a service, as a registry has it at each moment.

        channel = rpcwheel.channel("etcd://127.0.0.1:2379/shop.Orders")
        orders = OrdersStub(channel)

    Contacts nobody yet, and waits for nothing. Calls wait until the instances are known, at most
    `cluster.wait` (5 s); then they end with UNAVAILABLE and the reason. A registry that goes away
    later harms no call: its last word counts.

    Args:
        url: The registry's, with the service: `"etcd://127.0.0.1:2379/shop.Orders"`. Channels of
            one process with the same registry share one session. With `registry=`, the name of the
            service.
        credentials: For TLS and such, to all instances. None: none, but for instances whose
            protocol is `grpcs`, which get grpc's own defaults.
        service: Its name, if the URL does not have it.
        registry: One of yours, which is left open.
        balance: How calls are spread: `"round_robin"`, `"weighted_random"`, `"least_active"`,
            `"consistent_hash:HEADER"`, or a `Picker`.
        options: As grpc takes them, for each member's connection.
        compression: As grpc takes it.
        group: Only instances of this group; `"*"`: of any. None: what the URL says
            (`?group=`), or any.
        version: The same.
        zone: Where this client is: members of the zone are called as long as any of them is up.
        policy: Of the registry, if it is given by URL; None: the defaults.
        cluster: How members are treated; None: the defaults.
        on_member: Told each member when its channel is made, on the thread that calls it first.
        on_removed: Told each member whose instance is gone, on a worker.
        timer: Any rpcwheel timer; None takes `shared_timer()`.

    Returns:
        A `ClusterChannel`; it is yours to close.

    Raises:
        ConfigurationError: The URL or another value makes no sense; the message says what does.
        ExtraMissing: A package that the engine needs is not installed.
        TypeError: An argument is of a wrong type.
    """
    if registry is not None and not isinstance(registry, Registry):
        raise TypeError(f"registry must be a rpcwheel.Registry or None, not {registry!r}")
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
    try:
        follower.begin(made)
    except BaseException:
        made.close()
        raise
    return made


def _found(
    url: RegistryUrl | None,
    registry: Registry | None,
    policy: RegistryPolicy | None,
    timer: Timer | None,
) -> tuple[Registry, Callable[[], object]]:
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


def _let_go(key: Hashable, registry: FailbackRegistry) -> None:
    if SESSIONS.release(key, registry):
        registry.close()


def _nothing() -> None:
    """It is the user's to close."""
