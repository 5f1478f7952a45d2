"""The public registry, for code that blocks. `aio.py` awaits the same object.

Here arguments are checked, and callers wait. `reconciler.py` and `cache.py` decide, `session.py`
makes the requests.
"""

from __future__ import annotations

import threading
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from rpcwheel._concurrency.closing import Closing
from rpcwheel.durations import positive_ns, to_ns, to_seconds
from rpcwheel.errors import (
    ConfigurationError,
    NotPublished,
    RegistryClosed,
    RegistryError,
    RegistryRefused,
    RegistryUnavailable,
    is_coroutine_function,
    public_name,
    safe_repr,
    short_repr,
)
from rpcwheel.instance import ServiceInstance
from rpcwheel.timer.manual import checked_timer

from .backend import RegistryBackend, Settings
from .backends import open_backend
from .policy import RegistryPolicy
from .reconciler import RegistrationState
from .session import RegistrySession
from .snapshot_files import open_snapshot_files
from .url import RegistryUrl, parse_url

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

    from rpcwheel.durations import Duration
    from rpcwheel.instance import Snapshot
    from rpcwheel.timer.api import Timer

    from .reconciler import RegistrationRecord

KEY_FIELDS: Final = {"service", "id", "epoch"}
"""What `update` does not change: another service or id is another registration."""


@dataclass(frozen=True, repr=False)
@public_name("Registration")
class RegistrationBase:
    """What the registrations of both worlds have in common."""

    _owner: Any
    _record: RegistrationRecord

    @property
    def instance(self) -> ServiceInstance:
        """The instance that is to be published, or was published last."""
        return self._record.instance

    @property
    def state(self) -> str:
        """The state of the publication.

        "PENDING": not published yet, or not with its last change. "PUBLISHED". "LOST": the registry
        has lost it, and it is being published again. "WITHDRAWING": unregistered, and perhaps still
        in the registry. "GONE".
        """
        return self._record.state.value

    @property
    def error(self) -> BaseException | None:
        """Why the last request for it failed; None: it succeeded."""
        return self._record.error

    def update(
        self,
        *,
        weight: int | None = None,
        status: str | None = None,
        metadata: dict[str, str] | None = None,
        **others: object,
    ) -> None:
        """Publish it with other values; those left out, or None, stay. Does not wait.

        Raises:
            ConfigurationError: A value is out of range; `service`, `id` and `epoch` can't change.
            TypeError: A value has a wrong type.
            RegistryClosed: The registry is closed.
            NotPublished: It was unregistered; register it again.
        """
        arguments = {"weight": weight, "status": status, "metadata": metadata}
        changes = others | {name: value for name, value in arguments.items() if value is not None}
        if fixed := KEY_FIELDS & changes.keys():
            raise ConfigurationError(
                f"{', '.join(sorted(fixed))} can't be changed by update(); register another"
            )
        self._owner._session.change(self._record, changes)

    @safe_repr
    def __repr__(self) -> str:
        instance = self.instance
        return f"<Registration of {instance.service}/{instance.id}: {self.state}>"

    def _when(self, state: RegistrationState) -> Future[bool]:
        reached: Future[bool] = self._owner._session.when(self._record, state)
        return reached

    def _not_published(self, wait_s: float) -> RegistryError:
        """Return the error of a `register` that was not done in time; its cause is the last one."""
        record, session = self._record, self._owner._session
        if not record.wanted and not session.closed:
            return NotPublished(f"{'/'.join(record.instance.key)} was unregistered meanwhile")
        return _with_cause(NotPublished, "published at", session, record, wait_s)

    def _not_withdrawn(self, wait_s: float) -> RegistryError:
        """Return the error of an `unregister` that was not done in time."""
        record = self._record
        if record.wanted:
            return RegistryUnavailable(
                f"{'/'.join(record.instance.key)} was registered again meanwhile"
            )
        session = self._owner._session
        return _with_cause(RegistryUnavailable, "withdrawn from", session, record, wait_s)


class Registration(RegistrationBase):
    """An instance that a registry keeps published, also without this object. Thread-safe."""

    def wait_published(self, timeout: Duration | None = None) -> bool:
        """Wait until the registry has it, with its last change.

        Args:
            timeout: Seconds; None: as long as it takes.

        Returns:
            Whether it has; False too if it was unregistered meanwhile, or the registry closed.
        """
        return self._reaches(RegistrationState.PUBLISHED, checked_wait(timeout, "timeout"))

    def unregister(self, wait: Duration | None = None) -> None:
        """Withdraw it; as `Registry.unregister`."""
        self._owner.unregister(self, wait=wait)

    def _reaches(self, state: RegistrationState, wait_s: float | None) -> bool:
        reached = self._when(state)
        try:
            return reached.result(wait_s)
        except TimeoutError:
            return False
        finally:
            reached.cancel()


class Subscription(Closing):
    """Follows a service until it is closed. Thread-safe; a context manager that closes."""

    def __init__(
        self, owner: Registry, service: str, listener: Callable[[Snapshot], object] | None
    ) -> None:
        """Start to follow; called by `Registry.subscribe` only."""
        self._owner = owner
        self._watches = owner._session.watches
        self._watch = self._watches.acquire(service, self)
        self._listener = None if listener is None else self._watch.add_listener(listener)

    @property
    def service(self) -> str:
        """The name of the service."""
        return self._watch.service

    @property
    def snapshot(self) -> Snapshot | None:
        """The present snapshot; None if there is none yet."""
        return self._watch.snapshot

    def wait(self, timeout: Duration | None = None) -> Snapshot:
        """Wait until something is known, from the registry or an earlier run (`source`).

        Raises:
            NotPublished: Nothing was known within `timeout` seconds, or it was closed.
        """
        wait_s = checked_wait(timeout, "timeout")
        snapshot = self._watch.wait(wait_s)
        if snapshot is not None:
            return snapshot
        service = f"{self.service} at {self._owner.url}"
        if self._watch.closed:
            raise NotPublished(
                f"nothing was known of {service} when this subscription ended; subscribe again, in "
                "a forked child with a registry that is opened there"
            )
        raise NotPublished(f"nothing is known of {service} yet")

    def close(self) -> None:
        """End it. No call of the listener begins after this. Idempotent; does not wait."""
        if self._listener is not None:
            self._listener.close()
        self._watches.release(self._watch, self)

    @safe_repr
    def __repr__(self) -> str:
        return f"<Subscription of {self.service} at {self._owner.url}>"


@public_name("Registry")
class RegistryBase:
    """What the registries of both worlds have in common: state, and checks of arguments."""

    _session: RegistrySession
    _blocking: Any
    """The `Registry` that makes the requests: the same, or that of the one for `grpc.aio`."""

    @property
    def url(self) -> str:
        """Where the registry is, without the password; its name in events."""
        return self._session.name

    @property
    def up(self) -> bool:
        """Whether the registry answered the last request; False before the first."""
        return self._session.health.up

    @property
    def closed(self) -> bool:
        """Whether `close()` was called."""
        return self._session.closed

    @safe_repr
    def __repr__(self) -> str:
        state = "closed" if self.closed else "up" if self.up else "down"
        registered = len(self._session.records())
        return f"<{type(self).__name__} {self.url}: {state}, {registered} registered>"

    def _set_desired(
        self, instance: ServiceInstance, wait: Duration | None
    ) -> tuple[RegistrationRecord, float | None]:
        """Have the instance published. Returns also how many seconds to wait."""
        wait_s = checked_wait(wait)
        if not isinstance(instance, ServiceInstance):
            raise TypeError(f"instance must be a ServiceInstance, not {instance!r}")
        return self._session.set_desired(instance, flush_now=wait is not None), wait_s

    def _remove(
        self, instance: ServiceInstance | RegistrationBase, wait: Duration | None
    ) -> tuple[RegistrationRecord, float | None]:
        """Have the instance withdrawn. Returns also how many seconds to wait."""
        wait_s = checked_wait(wait)
        target: ServiceInstance | RegistrationRecord
        if isinstance(instance, RegistrationBase):
            if instance._owner._session is not self._session:
                raise ConfigurationError(
                    f"{instance!r} belongs to another registry, {instance._owner!r}"
                )
            target = instance._record
        elif isinstance(instance, ServiceInstance):
            target = instance
        else:
            raise TypeError(f"give a ServiceInstance or a Registration, not {instance!r}")
        return self._session.remove(target, flush_now=wait is not None), wait_s

    def _check_service(self, service: str, listener: object = None) -> None:
        """Check arguments, and that the registry is open."""
        ServiceInstance(service=service, host="checked", port=1)
        if listener is not None and not callable(listener):
            raise TypeError(f"a listener must be callable as listener(snapshot), not {listener!r}")
        self._session.check_open()

    def _watched_snapshot(
        self, service: str, wait: Duration | None
    ) -> tuple[Snapshot | None, float]:
        """Return the snapshot of a watched service, and the time to wait for one."""
        wait_s = checked_wait(wait)
        self._check_service(service)
        snapshot = self._session.watches.snapshot_of(service)
        return snapshot, self._timeout_s if wait_s is None else wait_s

    @property
    def _timeout_s(self) -> float:
        return to_seconds(self._session.rules.timeout_ns)

    def _no_answer(self, wait_s: float) -> RegistryUnavailable:
        return RegistryUnavailable(f"{self.url} has not answered within {wait_s:g} s")


class Registry(RegistryBase, Closing):
    """A registry that keeps instances published while its backend fails.

    What is registered stays published through failures, restarts, wipes and expired leases of the
    registry, until it is unregistered. Failed requests are repeated without limit.

    Args and errors are those of `open_registry`; `backend` may also be a `RegistryUrl`. The lease
    of a `RegistryBackend` must be that of the policy.

    Thread-safe; a context manager that closes. One that is dropped unclosed warns
    (`ResourceWarning`) and goes on. At the interpreter's exit it does nothing, and its lease runs
    out. In a forked child it is closed, and makes no requests: open another there.
    """

    _blocking = property(lambda self: self)

    def __init__(
        self,
        backend: RegistryBackend | RegistryUrl | str,
        *,
        registry_policy: RegistryPolicy | None = None,
        timer: Timer | None = None,
    ) -> None:
        checked_timer(timer)
        check_policy(registry_policy)
        opened, policy = _open_backend(backend, registry_policy, timer)
        timer = opened.settings.timer if timer is None else timer
        snapshots = open_snapshot_files(opened.url, policy, timer=timer)
        self.policy = policy
        """The settings."""
        self._session = RegistrySession(opened, policy, timer=timer, snapshots=snapshots)

    @property
    def registrations(self) -> tuple[Registration, ...]:
        """The registrations, also unregistered ones until the registry has removed them."""
        return tuple(Registration(self, record) for record in self._session.records())

    def register(self, instance: ServiceInstance, *, wait: Duration | None = None) -> Registration:
        """Keep an instance published. With a known `service` and `id`, changes that instance.

        Args:
            instance: Of several by one key the last one counts.
            wait: Seconds to wait until it is published. None: not at all; that the registry can't
                be reached is no error then.

        Raises:
            NotPublished: Not within `wait`; its cause is the last error. Attempts go on.
            RegistryClosed: After `close()`.
            RuntimeError: The system can't start the timer's thread; nothing is published.
            TypeError: It is no `ServiceInstance`.
        """
        record, wait_s = self._set_desired(instance, wait)
        registration = Registration(self, record)
        if wait_s is not None and not registration.wait_published(wait_s):
            raise registration._not_published(wait_s)
        return registration

    def unregister(
        self, instance: ServiceInstance | Registration, *, wait: Duration | None = None
    ) -> None:
        """Withdraw an instance. Idempotent.

        Args:
            instance: The result of `register`, or the instance itself. Or any instance that was
                looked up: it is withdrawn if its `epoch` is still the same.
            wait: Seconds to wait until the registry has withdrawn it. None: not at all.

        Raises:
            RegistryUnavailable: Not within `wait`; its cause is the last error. Attempts go on.
            RegistryClosed: After `close()`.
            TypeError, ConfigurationError: It is neither; it belongs to another registry.
            RuntimeError: The system can't start the timer's thread; nothing is withdrawn.
        """
        record, wait_s = self._remove(instance, wait)
        registration = Registration(self, record)
        if wait_s is not None and not registration._reaches(RegistrationState.GONE, wait_s):
            raise registration._not_withdrawn(wait_s)

    def subscribe(
        self, service: str, listener: Callable[[Snapshot], object] | None = None
    ) -> Subscription:
        """Follow the instances of a service.

        Args:
            service: Its name.
            listener: Called as `listener(snapshot)` on a worker thread, first with what is known,
                then at each change; one call at a time, each with the latest. What it raises is an
                event (`CallbackFailed`), and has no other effect.

        Raises:
            RegistryClosed: After `close()`.
            RuntimeError: The system can't start the timer's thread.
            TypeError, ConfigurationError: The name is not valid; the listener can't be called, or
                is a coroutine function.
        """
        self._check_service(service, listener)
        if is_coroutine_function(listener):
            raise TypeError(
                "the listener is a coroutine function, but it would be called on a thread without "
                "an event loop; give a plain function, or use rpcwheel.aio"
            )
        return Subscription(self, service, listener)

    def lookup(self, service: str, *, wait: Duration | None = None) -> Snapshot:
        """Return the present instances of a service.

        If the service is subscribed to, these are the known ones. Otherwise the registry is asked,
        for at most `wait` seconds (None: the policy's `timeout`). If that fails, this is its last
        answer, in this run or an earlier one (`source="cache"`).

        Raises:
            RegistryUnavailable: The registry can't be asked, and nothing is known. There is never
                an empty list instead.
            RegistryRefused: The registry refuses to answer, and nothing is known.
            RegistryClosed: After `close()`.
        """
        watched, wait_s = self._watched_snapshot(service, wait)
        if watched is not None:
            return watched
        try:
            snapshot: Snapshot = self._answer(service, wait_s)
        except (RegistryUnavailable, RegistryRefused):
            last = self._session.lookups.last(service)
            if last is None:
                raise
            return last
        return snapshot

    def services(self) -> list[str]:
        """Request the names of all services in the registry, in order.

        Raises:
            RegistryUnavailable, RegistryRefused: It can't be asked, or refuses to answer.
            RegistryClosed: After `close()`.
        """
        names: list[str] = self._answer(None, self._timeout_s)
        return names.copy()  # the answer may be shared

    def close(self, timeout: Duration = 2.0) -> None:
        """Withdraw everything, and end: no thread, watch, timeout or connection remains.

        A registry that replaces this one in the process must register after this: both have the
        same epoch, so a late withdrawal would remove the other's instances until its next renewal.

        Args:
            timeout: Seconds to wait at most. If the registry answers later or never, a daemon
                thread finishes; what can't be withdrawn ends with the lease.

        Idempotent; a later call waits for the first.
        """
        wait_s = checked_close(timeout)
        try:
            self._session.close().result(wait_s)
        except TimeoutError:
            self._session.abandon()

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

    def _answer(self, service: str | None, wait_s: float) -> Any:
        try:  # without a variable for the future: the traceback of its error has this frame
            return self._session.look_up(service).result(wait_s)
        except TimeoutError:
            raise self._no_answer(wait_s) from None


def open_registry(
    url: str | RegistryBackend,
    *,
    registry_policy: RegistryPolicy | None = None,
    timer: Timer | None = None,
) -> Registry:
    """Open the registry of a URL; contacts nothing yet.

    Args:
        url: `memory://name`, `sqlite:///path`, `etcd://host:port`, `zookeeper://...`,
            `redis://...`, `headless://host:port` (for reading), or that of a backend of yours; see
            `rpcwheel.registry.url`. Or a backend, such as a `FlakyBackend` in tests.
        registry_policy: Lease, timeout, retries. None: the defaults of `RegistryPolicy`.
        timer: Any rpcwheel timer; None takes `shared_timer()` when one is first needed.

    Raises:
        ConfigurationError: The URL is not valid; the message says what is.
        ExtraMissing: A package that the engine needs is not installed; it says which.
        TypeError: An argument is of a wrong type.
    """
    return Registry(url, registry_policy=registry_policy, timer=timer)


def check_policy(policy: object) -> None:
    """Raise `TypeError` if the policy is neither a `RegistryPolicy` nor None."""
    if policy is not None and not isinstance(policy, RegistryPolicy):
        raise TypeError(f"registry_policy must be a RegistryPolicy or None, not {policy!r}")


def _open_backend(
    backend: object, policy: RegistryPolicy | None, timer: Timer | None
) -> tuple[RegistryBackend, RegistryPolicy]:
    """Return the backend, and the policy that it keeps."""
    if isinstance(backend, RegistryBackend):
        lease_s = backend.settings.lease_s
        if policy is None:
            return backend, RegistryPolicy(lease_ttl=lease_s, timeout=backend.settings.timeout_s)
        if to_ns(lease_s) != to_ns(policy.lease_ttl):
            raise ConfigurationError(
                f"the backend was made for a lease of {lease_s:g} s, the policy has "
                f"{to_seconds(to_ns(policy.lease_ttl)):g} s; give both the same"
            )
        return backend, policy
    if not isinstance(backend, (str, RegistryUrl)):
        raise TypeError(
            f"give a URL such as 'etcd://127.0.0.1:2379', or a RegistryBackend; not "
            f"{short_repr(backend)}"
        )
    url = parse_url(backend) if isinstance(backend, str) else backend
    policy = RegistryPolicy() if policy is None else policy
    lease_s, timeout_s = (to_seconds(to_ns(time)) for time in (policy.lease_ttl, policy.timeout))
    return open_backend(url, Settings(lease_s, timeout_s, timer)), policy


def checked_wait(wait: Duration | None, argument: str = "wait") -> float | None:
    """Convert a wait to seconds; None stays None.

    Raises:
        TypeError: Neither seconds nor a timedelta nor None.
        ConfigurationError: NaN or negative.
    """
    if wait is None:
        return None
    wait_ns = to_ns(wait, subject=argument)
    if wait_ns < 0:
        raise ConfigurationError(f"{argument} must be 0 or more seconds, or None; not {wait!r}")
    return min(to_seconds(wait_ns), threading.TIMEOUT_MAX)


def _with_cause(
    kind: type[RegistryError],
    done: str,
    session: RegistrySession,
    record: RegistrationRecord,
    wait_s: float,
) -> RegistryError:
    name = "/".join(record.instance.key)
    cause = record.error or session.health.error
    why = "" if cause is None else f": {cause}"
    if session.closed:
        error: RegistryError = RegistryClosed(
            f"{session.name} was closed before {name} was {done} it{why}"
        )
    else:
        error = kind(
            f"{name} was not {done} {session.name} within {wait_s:g} s; attempts go on{why}"
        )
    error.__cause__ = cause
    return error


def checked_close(timeout: Duration) -> float:
    """Convert the timeout of `close` to seconds."""
    return min(to_seconds(positive_ns(timeout, subject="timeout")), threading.TIMEOUT_MAX)
