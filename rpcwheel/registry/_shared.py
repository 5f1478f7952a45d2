"""What channels by name need in both worlds.

Channels with the URL of one registry share its session: the first opens it, the last closes it.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from rpcwheel.balancer.policy import checked_policy
from rpcwheel.durations import to_ns, to_seconds
from rpcwheel.timer.clock import checked_timer

from .policy import RegistryPolicy
from .provider import Settings
from .providers import open_provider
from .target import Target

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from rpcwheel.balancer.policy import BalancerPolicy
    from rpcwheel.timer.api import Timer

    from .provider import Provider
    from .url import RegistryUrl

__all__ = ["Resolution", "Shared", "check_policy", "provider_of", "resolution_of"]

R = TypeVar("R")


@dataclass(slots=True)
class _Kept(Generic[R]):
    registry: R
    users: int


def check_policy(policy: RegistryPolicy | None) -> None:
    """Raise `TypeError` if it is none."""
    given: object = policy
    if given is not None and not isinstance(given, RegistryPolicy):
        raise TypeError(f"policy must be a RegistryPolicy or None, not {given!r}")


def provider_of(
    url: RegistryUrl, policy: RegistryPolicy | None, timer: Timer | None
) -> tuple[Provider, RegistryPolicy]:
    """The provider of a URL that was taken apart already, and the policy it is to keep.

    Raises:
        ConfigurationError: No engine has this scheme, or the URL makes no sense for it.
        ExtraMissing: A package that the engine needs is not installed.
        TypeError: The policy is none.
    """
    check_policy(policy)
    kept = RegistryPolicy() if policy is None else policy
    lease_s, timeout_s = (to_seconds(to_ns(time)) for time in (kept.lease, kept.timeout))
    return open_provider(url, Settings(lease_s, timeout_s, checked_timer(timer))), kept


class Shared(Generic[R]):
    """What is open, by what it was opened with. Thread-safe."""

    def __init__(self) -> None:
        self.forget()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self.forget)

    def forget(self) -> None:
        """In a forked child: the sessions are the parent's."""
        self._lock = threading.RLock()  # for what ends by the collector
        self._kept: dict[Hashable, _Kept[R]] = {}

    def acquire(self, key: Hashable, make: Callable[[], R]) -> R:
        """The one that is open, or a new one.

        Raises:
            Exception: What `make` raised; nothing is kept then.
        """
        with self._lock:
            kept = self._kept.get(key)
            if kept is None:
                kept = self._kept[key] = _Kept(make(), 0)
            kept.users += 1
            return kept.registry

    def release(self, key: Hashable, registry: R) -> bool:
        """Let go of one; True if nobody has it any more, so that it is to be closed."""
        with self._lock:
            kept = self._kept.get(key)
            if kept is None or kept.registry is not registry:
                return False  # of the parent of a fork
            kept.users -= 1
            if not kept.users:
                del self._kept[key]
            return not kept.users

    def __len__(self) -> int:
        with self._lock:
            return len(self._kept)


class Resolution(NamedTuple):
    """Which instances a channel by name follows."""

    target: Target
    registry: Any
    """The user's own; None: that of the target's URL."""
    policy: RegistryPolicy | None
    timer: Timer | None
    wait_ns: int
    """How long calls wait at most for the first instances."""


def resolution_of(
    target: str,
    registry_class: type[Any],
    class_name: str,
    *,
    service: str | None = None,
    registry: Any = None,
    group: str | None = None,
    version: str | None = None,
    registry_policy: RegistryPolicy | None = None,
    zone: str | None = None,
    policy: BalancerPolicy | None = None,
    timer: Timer | None = None,
    **settings: Any,
) -> tuple[Resolution, dict[str, Any]]:
    """Take apart the arguments of a channel by name.

    Args:
        target: That of the channel.
        registry_class: The registries of the channel's world.
        class_name: Their name, for errors.
        service: This and the following as for `rpcwheel.insecure_channel`.
        registry: As there.
        group: As there.
        version: As there.
        registry_policy: As there.
        zone: As there.
        policy: As there.
        timer: As there.
        **settings: The others; they are for the `BalancedChannel`.

    Returns:
        What the channel follows, and the settings of the `BalancedChannel`.

    Raises:
        TypeError, ConfigurationError: An argument makes no sense.
    """
    if registry is not None and not isinstance(registry, registry_class):
        raise TypeError(f"registry must be a {class_name} or None, not {registry!r}")
    check_policy(registry_policy)
    named = Target.of(
        target, has_registry=registry is not None, service=service, group=group, version=version
    )
    policy = checked_policy(policy)
    resolution = Resolution(named, registry, registry_policy, timer, to_ns(policy.pick_timeout))
    settings |= {"timer": timer, "policy": policy if zone is None else policy.changed(zone=zone)}
    return resolution, {name: one for name, one in settings.items() if one is not None}
