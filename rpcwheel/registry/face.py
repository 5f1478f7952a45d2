"""A registry for code that blocks.

What is decided stands in `core.py` and `seen.py`, what is done in `session.py`; here is only the
waiting.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from concurrent.futures import TimeoutError as NotYet
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Self

from rpcwheel.errors import NotPublished

from .base import (
    RegistrationBase,
    RegistryBase,
    checked_close,
    checked_wait,
    no_answer,
    not_published,
    not_withdrawn,
    patience,
)
from .entry import State

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

    from rpcwheel.durations import Duration
    from rpcwheel.instance import ServiceInstance, Snapshot
    from rpcwheel.timer.api import Timer

    from .directory import Directory
    from .policy import RegistryPolicy
    from .provider import Provider

__all__ = ["FailbackRegistry", "Registration", "Registry", "Subscription", "open_registry"]


class Registry(ABC):
    """What a registry does for servers and clients. Thread-safe."""

    @abstractmethod
    def register(self, instance: ServiceInstance, *, wait: Duration | None = None) -> Registration:
        """Have an instance published, and kept so; the same `service` and `id` again: changed."""

    @abstractmethod
    def unregister(
        self, what: ServiceInstance | Registration, *, wait: Duration | None = None
    ) -> None:
        """Have it published no more."""

    @abstractmethod
    def subscribe(
        self, service: str, listener: Callable[[Snapshot], object] | None = None
    ) -> Subscription:
        """Follow the instances of a service."""

    @abstractmethod
    def unsubscribe(self, subscription: Subscription) -> None:
        """Follow them no more."""

    @abstractmethod
    def lookup(self, service: str, *, wait: Duration | None = None) -> Snapshot:
        """The instances of a service, now."""

    @abstractmethod
    def close(self, timeout: Duration = 2.0) -> None:
        """Withdraw what was published, and end."""


class Registration(RegistrationBase):
    """An instance that a registry has taken on. Thread-safe; goes on without this object."""

    _owner: FailbackRegistry

    def wait_published(self, timeout: Duration | None = None) -> bool:
        """Wait until the registry has it, as it was given or changed last.

        Args:
            timeout: Seconds; None: as long as it takes.

        Returns:
            Whether it has; False too if it was unregistered meanwhile, or the registry closed.
        """
        reached = self._owner._session.when(self._entry, State.PUBLISHED)  # noqa: SLF001
        return _result(reached, checked_wait(timeout, "timeout"))

    def unregister(self, wait: Duration | None = None) -> None:
        """Have it published no more; as `Registry.unregister`."""
        self._owner.unregister(self, wait=wait)


class Subscription:
    """Follows a service until it is closed. Thread-safe; a context manager that closes."""

    def __init__(
        self,
        owner: FailbackRegistry,
        listener: Callable[[Snapshot], object] | None,
        directory: Directory,
    ) -> None:
        """For `FailbackRegistry.subscribe` only."""
        self._owner = owner
        self._directory = directory
        self._listening = None if listener is None else directory.add(listener)

    @property
    def service(self) -> str:
        """Its name."""
        return self._directory.service

    @property
    def snapshot(self) -> Snapshot | None:
        """What is known now; None: nothing yet."""
        return self._directory.snapshot

    def wait(self, timeout: Duration | None = None) -> Snapshot:
        """Wait until something is known, of the registry or of an earlier run (`source`).

        Raises:
            NotPublished: Nothing was known in `timeout` seconds, or it was closed.
        """
        wait_s = checked_wait(timeout, "timeout")
        snapshot = self._directory.wait(wait_s)
        if snapshot is None:
            raise NotPublished(f"nothing is known of {self.service} at {self._owner.url} yet")
        return snapshot

    def close(self) -> None:
        """End it; no call of the listener begins after this. Idempotent; waits for nothing."""
        if self._listening is not None:
            self._listening.close()
        self._owner._session.following.unfollow(self.service, self)  # noqa: SLF001

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Subscription of {self.service} at {self._owner.url}>"


class FailbackRegistry(RegistryBase[Registration], Registry):
    """A registry that may fail: what it should know, it is told until it knows.

    What is registered stays so through failures, restarts, wipes and expired leases of the engine,
    until it is unregistered; each failed request is made again by the latest intent, without limit.

    Args, errors: as `open_registry`; `provider` may be a `Provider` of one's own too, whose lease
    is then to be the policy's.

    Thread-safe; a context manager that closes. One that is dropped unclosed warns
    (`ResourceWarning`) and goes on; at the interpreter's exit it does nothing, and its lease runs
    out. In a forked child it is closed, and contacts nobody: open another there.
    """

    _registration: ClassVar[type[Registration]] = Registration

    def register(self, instance: ServiceInstance, *, wait: Duration | None = None) -> Registration:
        """Have an instance published, and kept so; the same `service` and `id` again: changed.

        Args:
            instance: The latest one given by its key is what counts.
            wait: Seconds to wait until it is published. None: not at all; an engine that can't be
                reached is then no error.

        Raises:
            NotPublished: Not within `wait`; its cause is the last error. It is tried on.
            RegistryClosed: After `close()`.
            TypeError: It is no `ServiceInstance`.
        """
        registration, wait_s = self._want(instance, wait)
        if wait_s is not None and not registration.wait_published(wait_s):
            raise not_published(self._session, registration._entry, wait_s)  # noqa: SLF001
        return registration

    def unregister(
        self, what: ServiceInstance | Registration, *, wait: Duration | None = None
    ) -> None:
        """Have it published no more; again, or of one that is gone: nothing happens.

        Args:
            what: What was registered; or any instance, as it was looked up: it is taken out if it
                is still of the same `epoch`.
            wait: Seconds to wait until the engine has said that it is gone. None: not at all.

        Raises:
            RegistryUnavailable: Not within `wait`; its cause is the last error. It is tried on.
            RegistryClosed: After `close()`.
            TypeError, ConfigurationError: It is neither; it is of another registry.
        """
        entry, wait_s = self._drop(what, wait)
        gone = self._session.when(entry, State.GONE) if wait_s is not None else None
        if gone is not None and wait_s is not None and not _result(gone, wait_s):
            raise not_withdrawn(self._session, entry, wait_s)

    def subscribe(
        self, service: str, listener: Callable[[Snapshot], object] | None = None
    ) -> Subscription:
        """Follow the instances of a service.

        Args:
            service: Its name.
            listener: Called as `listener(snapshot)` on a worker thread, first with what is known,
                then at each change; one call at a time, only the latest. What it raises is an event
                (`CallbackFailed`), and harms nothing.

        Raises:
            RegistryClosed: After `close()`.
            TypeError, ConfigurationError: The name is none; the listener can't be called.
        """
        self._check_service(service, listener)
        make = partial(Subscription, self, listener)
        return self._session.following.follow(service, make)

    def unsubscribe(self, subscription: Subscription) -> None:
        """As `subscription.close()`."""
        subscription.close()

    def lookup(self, service: str, *, wait: Duration | None = None) -> Snapshot:
        """The instances of a service, now.

        If it is subscribed to, this is what is known; else the engine is asked, for at most `wait`
        seconds (None: the policy's `timeout`). If that fails: what it said last, or to an earlier
        run (`source="cache"`).

        Raises:
            RegistryUnavailable: The engine can't be asked, and nothing is known. Never an empty
                list in its place.
            RegistryRefused: The engine will not answer, and nothing is known.
            RegistryClosed: After `close()`.
        """
        wait_s = checked_wait(wait)
        self._check_service(service)
        known = self._session.following.known(service)
        if known is not None:
            return known
        patience_s = patience(self._session, wait_s)
        asked = self._session.look_up(service)
        try:
            return asked.result(patience_s)
        except NotYet:
            error: Exception = no_answer(self.url, patience_s)
        except Exception as failure:  # noqa: BLE001 - raised there if there is no better answer
            error = failure
        return self._session.last(service, error)

    def services(self) -> list[str]:
        """The names of all services in the registry, in order; asks the engine.

        Raises:
            RegistryUnavailable, RegistryRefused: It can't be asked, or will not answer.
            RegistryClosed: After `close()`.
        """
        patience_s = patience(self._session, None)
        try:
            return list(self._session.services().result(patience_s))
        except NotYet:
            raise no_answer(self.url, patience_s) from None

    def close(self, timeout: Duration = 2.0) -> None:
        """Withdraw what was published, and end: no thread, watch, timeout or connection is left.

        One that takes its place in this process is to register after this: both have one `epoch`,
        so a late withdrawal would take out the other's, until that renews.

        Args:
            timeout: Seconds to wait for that at most. If the engine answers later, or never, a
                daemon thread sees to the rest: what can't be withdrawn is gone with the lease.

        Idempotent; a later call waits for the first.
        """
        wait_s = checked_close(timeout)
        try:
            self._session.close().result(wait_s)
        except NotYet:
            self._session.abandon()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def open_registry(
    url: str | Provider, *, policy: RegistryPolicy | None = None, timer: Timer | None = None
) -> FailbackRegistry:
    """Open the registry of a URL; contacts nobody yet.

    Args:
        url: `memory://name`, `sqlite:///path`, `etcd://host:port`, `zookeeper://...`,
            `redis://...`, or of a provider of one's own; see `rpcwheel.registry.url`. Or a
            provider, such as a `FlakyProvider` in tests.
        policy: Lease, timeout, retries. None: the defaults of `RegistryPolicy`.
        timer: Any rpcwheel timer; None takes `shared_timer()` when one is first needed.

    Raises:
        ConfigurationError: The URL makes no sense; the message says what does.
        ExtraMissing: A package that the engine needs is not installed; it says which.
        TypeError: An argument is of a wrong type.
    """
    return FailbackRegistry(url, policy=policy, timer=timer)


def _result(future: Future[bool], wait_s: float | None) -> bool:
    try:
        return future.result(wait_s)
    except NotYet:
        future.cancel()
        return False
