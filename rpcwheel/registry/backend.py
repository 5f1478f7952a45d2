"""The contract of registry backends.

A backend connects one engine. It is blocking, and serves `grpc` and `grpc.aio`. Its methods are
called by one worker at a time (`session.py`), never on the timer's thread or an event loop. It
makes no decisions: `reconciler.py` decides what is published when, and `cache.py` which instances
count.

Backends of other packages are found by the scheme of the URL, through an entry point of the group
`rpcwheel.registry`. `rpcwheel.testing.check_backend` tests whether they keep the contract.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol

from rpcwheel.errors import ConfigurationError, RegistryClosed

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from rpcwheel.instance import ServiceInstance
    from rpcwheel.timer.api import Timer

    from .url import RegistryUrl

__all__ = [
    "Consumer",
    "Lost",
    "RegistryBackend",
    "Settings",
    "View",
    "Watch",
    "Watcher",
    "check_writable",
]

Lost = Literal["missing", "taken", "changed", "lease", "session", "wiped"]
"""Why the engine does not have a published instance any more. "missing": its record is gone, or is
another process's. "taken": it is known to be another process's. "changed": it has the same epoch,
but is not under this backend's lease: another registry of this process has it, or somebody wrote it
by hand. "lease": the lease has ended. "session": the session has ended. "wiped": the engine has
lost its data. After the last three the instances are published again with `jitter`, because all
processes do so.

A backend may return "missing" in place of "taken" and "changed": missing records are looked up."""


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of a backend, in addition to its URL."""

    lease_s: float
    """Seconds after which the engine must remove instances that are not renewed."""
    timeout_s: float
    """Limit for one request in seconds. No method may block longer."""
    timer: Timer | None = None
    """The timer for periodic work. None: `shared_timer()`."""


@dataclass(frozen=True, slots=True)
class View:
    """All records of one service in the engine. Immutable."""

    records: Mapping[str, bytes]
    """The stored bytes by id: `ServiceInstance.encoded()`, or bytes that another program stored."""
    revision: int = 0
    """The revision of the engine, if it has one. It decreases only if the engine lost its data."""
    changed: frozenset[str] | None = None
    """Ids whose records differ from those of the previous view given to the same watcher, including
    removed ones. None: not known, so the two views are compared. With it the cost of an update is
    proportional to what changed."""


@dataclass(frozen=True, slots=True, order=True)
class Consumer:
    """A client that has registered itself as one of a service. It serves nothing."""

    service: str
    application: str
    """The name of the client's application; "" if it gave none."""
    host: str
    version: str = ""
    """The version of the service that it calls."""
    group: str = ""
    release: str = ""
    """The library that registered it, and its version."""
    started_at: float = 0.0
    """Seconds since 1970. 0: unknown."""


class Watcher(Protocol):
    """Receives the views of a service. Thread-safe; its methods never block and never raise."""

    def on_view(self, view: View) -> None:
        """Take the present view: at first, after each change, and after `on_contact_lost`."""

    def on_contact_lost(self, reason: str) -> None:
        """Learn that contact, or the engine's data, was lost.

        The last view may be out of date, and the next one may lack instances that are about to be
        published again. The backend calls `on_view` as soon as it has a view, even an equal one.
        """


class Watch(Protocol):
    """A running watch."""

    def close(self) -> None:
        """End the watch. No call of the watcher begins afterwards; one may be running.

        Idempotent; never raises. May be called on any thread, from within a call of the watcher,
        and after the backend's `close`.
        """


def check_writable(backend: object, url: object) -> None:
    """Check that instances can be published by a backend, or a class of backends.

    Raises:
        ConfigurationError: It is for reading only.
    """
    if getattr(backend, "read_only", False):
        raise ConfigurationError(
            f"{url} is for reading only: its instances are published by other means, such as pods "
            "by Kubernetes, or providers of Dubbo (level=application); to publish, give another URL"
        )


class RegistryBackend(ABC):
    """The connection of one process to one engine.

    Errors: `RegistryUnavailable` if the engine cannot be reached, does not answer in time or cannot
    do it now; `RegistryRefused` if it refuses (credentials, rights). Both are retried.
    `RegistryClosed` after `close`. Only the constructor may raise anything else.

    Methods are called on any thread, one call at a time. `watch`, `Watch.close` and `close` may be
    called concurrently with them.
    """

    path_is_own: ClassVar[bool] = False
    """Whether the path of a URL belongs to the backend (`url.path`, such as a file). The service is
    then given by `?service=`. Otherwise the path is the service."""

    read_only: bool = False
    """Whether nothing can be published. `register`, `unregister` and publishers then raise
    ConfigurationError."""

    keeps_alive: bool = False
    """Whether the lease is renewed without `renew`, as long as the process lives (ZooKeeper's
    sessions)."""

    url: RegistryUrl
    settings: Settings
    _closed: bool = False

    def __init__(self, url: RegistryUrl, settings: Settings) -> None:
        """Keep the arguments. A subclass calls this first, and does not connect yet.

        Raises:
            ConfigurationError: The URL is not valid for this engine; the message says what is.
            ExtraMissing: A package is not installed; the message says which.
        """
        self.url = url
        self.settings = settings

    def _check_open(self) -> None:
        """Raise `RegistryClosed` if a subclass has set `_closed`."""
        if self._closed:
            raise RegistryClosed(f"{self.url} was closed; open another")

    @abstractmethod
    def publish(self, instances: Sequence[ServiceInstance]) -> None:
        """Store instances in the engine under this backend's lease.

        They replace all records with the same keys, also those of other processes. Idempotent. If
        it raises, any of them may be published.
        """

    @abstractmethod
    def withdraw(self, instances: Sequence[ServiceInstance]) -> None:
        """Remove instances from the engine.

        A record with another `epoch` stays. A missing record is no error.
        """

    @abstractmethod
    def renew(self, instances: Collection[ServiceInstance]) -> Mapping[tuple[str, str], Lost]:
        """Renew the lease of all published instances, and check that these are in the engine.

        An instance is there if its record has the same `epoch` and is under this backend's lease.

        Returns:
            The instances that are not there, by key, and why.
        """

    @abstractmethod
    def lookup(self, service: str) -> View:
        """Read all records of a service."""

    @abstractmethod
    def services(self) -> Sequence[str]:
        """Read the names of all services that have records, sorted."""

    @abstractmethod
    def watch(self, service: str, watcher: Watcher) -> Watch:
        """Report the views of a service to a watcher until the watch is closed.

        Returns at once. The watch continues whatever happens to the engine: it reads the service
        again as soon as it can, and from time to time even without a change. `watcher` is called on
        the backend's own threads, one call at a time.
        """

    def consumers(self, services: Collection[str] | None = None) -> Sequence[Consumer]:
        """Read the clients that have registered themselves, sorted.

        Optional: only Dubbo's clients do so. Other engines have none.

        Args:
            services: The services whose clients to read; None: all.
        """
        return ()

    def refresh(self, service: str) -> None:  # noqa: B027 - optional
        """Read a watched service again soon, because a channel cannot reach one of its servers.

        Called repeatedly while that lasts, on any thread. Never blocks and never raises. Only
        useful for engines that do not report changes.
        """

    @abstractmethod
    def close(self) -> None:
        """Give up the lease if the engine can be reached, and end all connections and threads.

        Closes the watches. Takes at most `timeout_s`; never raises; idempotent.
        """
