"""What channels by name need in both worlds.

Channels with the URL of one registry share its session: the first opens it, the last closes it.
"""

from __future__ import annotations

import os
import threading
import weakref
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NamedTuple, TypeVar

from rpcwheel.balancer.policy import checked_policy
from rpcwheel.durations import to_ns, to_seconds
from rpcwheel.errors import RegistryRefused
from rpcwheel.timer.clock import checked_timer

from .alarm import Alarm
from .policy import RegistryPolicy
from .provider import Settings
from .providers import open_provider
from .target import Target

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from rpcwheel.balancer.policy import BalancerPolicy
    from rpcwheel.errors import RegistryError, TimerError
    from rpcwheel.instance import Snapshot
    from rpcwheel.timer.api import Timer

    from .provider import Provider
    from .url import RegistryUrl

__all__ = ["Resolution", "ResolverBase", "Shared", "check_policy", "provider_of", "resolution_of"]

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


class ResolverBase:
    """Updates one channel, which it holds weakly, with the instances of a service."""

    sessions: ClassVar[Shared[Any]]
    """Of this process, for channels."""
    registry_class: ClassVar[Callable[..., Any]]

    def __init__(self, channel: Any, resolution: Resolution) -> None:
        """Open the registry of the target if none is given. Does nothing else.

        Raises:
            ConfigurationError, ExtraMissing: The registry can't be opened.
        """
        self._channel = weakref.ref(channel)
        self._target, registry, policy, timer, self._wait_ns = resolution
        self._key = self._target.registry_key, policy, id(timer)
        if self._target.url is not None:
            make = partial(self._open, self._target.url, policy, timer)
            registry = self.sessions.acquire(self._key, make)
        self._registry: Any = registry
        self._lock = threading.RLock()
        self._alarm = Alarm(timer, self._wait_is_over, _ignore)
        self._subscription: Any = None
        self._closed = False

    def _open(self, url: RegistryUrl, policy: RegistryPolicy | None, timer: Timer | None) -> Any:
        provider, policy = provider_of(url, policy, timer)
        return self.registry_class(provider, policy=policy, timer=timer)

    def _update(self, snapshot: Snapshot) -> None:
        channel = self._channel()
        if channel is not None:
            channel.update(self._target.select(snapshot))

    def _report(self, error: RegistryError, *, wait: bool) -> None:
        """Report to calls why there are no instances.

        Args:
            error: Of the lookup.
            wait: Whether calls wait, and the registry is asked again, if it is unavailable.
        """
        channel = self._channel()
        if channel is None:
            return
        wait = wait and not isinstance(error, RegistryRefused)
        channel.report_error(str(error), wait=wait)
        with self._lock:
            if wait and not self._closed:
                self._alarm.wake(self._alarm.now_ns() + self._wait_ns)

    def _wait_is_over(self) -> None:
        """Look the service up again. Runs on the timer's thread."""
        raise NotImplementedError


def _ignore(_: TimerError) -> None:
    """Without a timer, waiting calls get the reason only when their own wait is over."""
