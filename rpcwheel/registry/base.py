"""What both faces of a registry share: what is checked at the door, and what needs no waiting."""

from __future__ import annotations

import threading
import warnings
import weakref
from typing import TYPE_CHECKING, Any, ClassVar, Final, Generic, TypeVar

from rpcwheel.durations import positive_ns, to_ns, to_seconds
from rpcwheel.errors import (
    ConfigurationError,
    NotPublished,
    RegistryClosed,
    RegistryError,
    RegistryUnavailable,
)
from rpcwheel.instance import ServiceInstance
from rpcwheel.timer.clock import checked_timer

from .policy import RegistryPolicy
from .provider import Provider, Settings
from .providers import open_provider
from .session import Session
from .snapshots import open_snapshots
from .url import parse_url

if TYPE_CHECKING:
    from rpcwheel.durations import Duration
    from rpcwheel.timer.api import Timer

    from .entry import Entry

__all__ = ["RegistrationBase", "RegistryBase"]

R = TypeVar("R", bound="RegistrationBase")

KEY_FIELDS: Final = {"service", "id", "epoch"}
"""What `update` does not change: another service or id is another registration."""


class RegistrationBase:
    """An instance that a registry has taken on. Thread-safe; goes on without this object."""

    def __init__(self, owner: RegistryBase[Any], entry: Entry) -> None:
        self._owner = owner
        self._entry = entry

    @property
    def instance(self) -> ServiceInstance:
        """What is wanted to be published, or was last."""
        return self._entry.instance

    @property
    def state(self) -> str:
        """One of these.

        "PENDING": not there yet, or not as it was changed last. "PUBLISHED". "LOST": it was there,
        the registry has forgotten it, and it is published again. "WITHDRAWING": unregistered, and
        perhaps still there. "GONE".
        """
        return self._entry.state.value

    @property
    def error(self) -> BaseException | None:
        """Why it could not be done when it was tried last; None if it could."""
        return self._entry.error

    def update(
        self,
        *,
        weight: int | None = None,
        status: str | None = None,
        metadata: dict[str, str] | None = None,
        **others: object,
    ) -> None:
        """Publish it with other values; those that are left out, or None, stay. Waits for nothing.

        Raises:
            ConfigurationError: A value is out of range; `service`, `id` and `epoch` don't change.
            TypeError: A value is of a wrong type.
            RegistryClosed: The registry is closed.
            NotPublished: It is unregistered; register it again.
        """
        given = {"weight": weight, "status": status, "metadata": metadata}
        changes = others | {name: value for name, value in given.items() if value is not None}
        if fixed := KEY_FIELDS & changes.keys():
            raise ConfigurationError(
                f"{', '.join(sorted(fixed))} can't be changed by update(); register another"
            )
        self._owner._session.change(self._entry, changes)  # noqa: SLF001

    def __repr__(self) -> str:
        instance = self.instance
        return f"<Registration of {instance.service}/{instance.id}: {self.state}>"


class RegistryBase(Generic[R]):
    """A session, and what is asked of it at the door."""

    _registration: ClassVar[type[Any]]

    def __init__(
        self,
        provider: Provider | str,
        *,
        policy: RegistryPolicy | None = None,
        timer: Timer | None = None,
    ) -> None:
        checked_timer(timer)
        if policy is not None and not isinstance(policy, RegistryPolicy):
            raise TypeError(f"policy must be a RegistryPolicy or None, not {policy!r}")
        opened, policy = _opened(provider, policy, timer)
        timer = opened.settings.timer if timer is None else timer
        snapshots = open_snapshots(opened.url, policy, timer=timer)
        self.policy = policy
        """How long it may believe in what, and how it is told again."""
        self._handles: weakref.WeakValueDictionary[int, R] = weakref.WeakValueDictionary()
        self._session = Session(opened, policy, timer=timer, snapshots=snapshots)

    @property
    def url(self) -> str:
        """Where the registry is, without the password; its name in events."""
        return self._session.name

    @property
    def up(self) -> bool:
        """Whether the engine has answered when it was last asked; False before that."""
        return self._session.up

    @property
    def closed(self) -> bool:
        """Whether `close()` was called."""
        return self._session.closed

    @property
    def registrations(self) -> tuple[R, ...]:
        """What is registered, or not withdrawn yet."""
        return tuple(self._handle(entry) for entry in self._session.entries())

    def _handle(self, entry: Entry) -> R:
        known = self._handles.get(id(entry))
        if known is None or known._entry is not entry:  # noqa: SLF001
            known = self._handles[id(entry)] = self._registration(self, entry)
        return known

    def _want(self, instance: ServiceInstance, wait: Duration | None) -> tuple[R, float | None]:
        """Take it on; and how many seconds are to be waited."""
        wait_s = checked_wait(wait)
        if not isinstance(instance, ServiceInstance):
            raise TypeError(f"instance must be a ServiceInstance, not {instance!r}")
        return self._handle(self._session.want(instance, hasty=wait is not None)), wait_s

    def _drop(self, what: object, wait: Duration | None) -> tuple[Entry, float | None]:
        wait_s = checked_wait(wait)
        if isinstance(what, RegistrationBase):
            if what._owner is not self:  # noqa: SLF001
                raise ConfigurationError(f"{what!r} is of another registry, {what._owner!r}")  # noqa: SLF001
            return self._session.drop(what._entry, hasty=wait is not None), wait_s  # noqa: SLF001
        if not isinstance(what, ServiceInstance):
            raise TypeError(f"give a ServiceInstance or a Registration, not {what!r}")
        return self._session.drop(what, hasty=wait is not None), wait_s

    def _check_service(self, service: str, listener: object = None) -> None:
        """Check the arguments of those who want to see, and that it is open."""
        ServiceInstance(service=service, host="checked", port=1)
        if listener is not None and not callable(listener):
            raise TypeError(f"a listener must be callable as listener(snapshot), not {listener!r}")
        self._session.check_open()

    def __repr__(self) -> str:
        state = "closed" if self.closed else "up" if self.up else "down"
        registered = len(self._session.entries())
        return f"<{type(self).__name__} {self.url}: {state}, {registered} registered>"

    def __del__(self) -> None:
        session = getattr(self, "_session", None)
        if session is not None and not session.closed:
            warnings.warn(
                f"a registry of {self.url} was dropped and not closed: what it publishes stays "
                "published until the program ends; use `with`, or call close()",
                ResourceWarning,
                source=self,
                stacklevel=1,
            )


def _opened(
    provider: object, policy: RegistryPolicy | None, timer: Timer | None
) -> tuple[Provider, RegistryPolicy]:
    """The provider, and the policy it is to keep."""
    if isinstance(provider, Provider):
        lease_s = provider.settings.lease_s
        if policy is None:
            return provider, RegistryPolicy(lease=lease_s, timeout=provider.settings.timeout_s)
        if to_ns(lease_s) != to_ns(policy.lease):
            raise ConfigurationError(
                f"the provider was made for a lease of {lease_s:g} s, the policy has "
                f"{to_seconds(to_ns(policy.lease)):g} s; give both the same"
            )
        return provider, policy
    if not isinstance(provider, str):
        raise TypeError(
            f"give a URL such as 'etcd://127.0.0.1:2379', or a Provider; not {provider!r}"
        )
    policy = RegistryPolicy() if policy is None else policy
    lease_s, timeout_s = (to_seconds(to_ns(time)) for time in (policy.lease, policy.timeout))
    return open_provider(parse_url(provider), Settings(lease_s, timeout_s, timer)), policy


def checked_wait(wait: Duration | None, what: str = "wait") -> float | None:
    """In seconds; None stays None.

    Raises:
        TypeError: Neither seconds nor a timedelta nor None.
        ConfigurationError: NaN or negative.
    """
    if wait is None:
        return None
    wait_ns = to_ns(wait, what=what)
    if wait_ns < 0:
        raise ConfigurationError(f"{what} must be 0 or more seconds, or None; not {wait!r}")
    return min(to_seconds(wait_ns), threading.TIMEOUT_MAX)


def not_published(session: Session, entry: Entry, wait_s: float) -> RegistryError:
    """The error of a `register` that did not wait long enough, with the last one as its cause."""
    if not entry.wanted and not session.closed:
        return NotPublished(f"{'/'.join(entry.instance.key)} was unregistered meanwhile")
    return _with_cause(NotPublished, "published at", session, entry, wait_s)


def not_withdrawn(session: Session, entry: Entry, wait_s: float) -> RegistryError:
    """The same of an `unregister`."""
    if entry.wanted:
        return RegistryUnavailable(f"{'/'.join(entry.instance.key)} was registered again meanwhile")
    return _with_cause(RegistryUnavailable, "withdrawn from", session, entry, wait_s)


def _with_cause(
    kind: type[RegistryError], done: str, session: Session, entry: Entry, wait_s: float
) -> RegistryError:
    name = "/".join(entry.instance.key)
    cause = entry.error or session.error
    why = "" if cause is None else f": {cause}"
    if session.closed:
        error: RegistryError = RegistryClosed(
            f"{session.name} was closed before {name} was {done} it{why}"
        )
    else:
        error = kind(
            f"{name} was not {done} {session.name} within {wait_s:g} s; it is tried on{why}"
        )
    error.__cause__ = cause
    return error


def no_answer(url: str, wait_s: float) -> RegistryUnavailable:
    """The error of a question that waited in vain."""
    return RegistryUnavailable(f"{url} has not answered within {wait_s:g} s")


def patience(session: Session, wait_s: float | None) -> float:
    """How long to wait for an answer, if it was not said: as long as a request may take."""
    return to_seconds(session.rules.timeout_ns) if wait_s is None else wait_s


def checked_close(timeout: Duration) -> float:
    """How long `close` may take, in seconds."""
    return min(to_seconds(positive_ns(timeout, what="timeout")), threading.TIMEOUT_MAX)
