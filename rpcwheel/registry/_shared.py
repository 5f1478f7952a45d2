"""Registries that were opened for channels: those of one URL have one session together.

The first channel opens it, and the last that lets go of it closes it.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from rpcwheel.durations import to_ns, to_seconds
from rpcwheel.timer.clock import checked_timer

from .policy import RegistryPolicy
from .provider import Settings
from .providers import open_provider

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from rpcwheel.timer.api import Timer

    from .provider import Provider
    from .url import RegistryUrl

__all__ = ["Shared", "check_policy", "provider_of"]

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
