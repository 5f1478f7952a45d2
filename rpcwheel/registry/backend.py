"""What a registry engine has to do for us: the contract of backends, and how one is found.

A backend is written once, blocking, for both worlds. Its methods are called by one worker at a
time (`session.py`), never on the timer's thread or a loop. It makes no decisions: what is published
when, and which instances count, is decided above it (`reconciler.py`, `cache.py`).

Yours is found by the scheme of its URL, by an entry point of the group `rpcwheel.registry`, and is
tested by `rpcwheel.testing.check_backend`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from rpcwheel.instance import ServiceInstance
    from rpcwheel.timer.api import Timer

    from .url import RegistryUrl

__all__ = ["Lost", "RegistryBackend", "Settings", "View", "Watch", "Watcher"]

Lost = Literal["missing", "taken", "lease", "session", "wiped"]
"""Why something that was published is not there any more: a key alone is gone or is another's; it
is known to be another process's; the lease ran out; the session ended; the engine has lost its
memory. The last three come to everybody at once, so that publishing again is spread.

A backend need not tell the second from the first: what is missing is looked up."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What a backend is told beside its URL."""

    lease_s: float
    """After which the engine is to forget what is not renewed."""
    timeout_s: float
    """For one request; none may block longer."""
    timer: Timer | None = None
    """For what must be done now and then; None for `shared_timer()`."""


@dataclass(frozen=True, slots=True)
class View:
    """All records of one service in the engine. Immutable."""

    records: Mapping[str, bytes]
    """`ServiceInstance.encoded()` by id, and other records that were found there, unchanged."""
    revision: int = 0
    """Of the engine, if it has one; it only decreases if the engine lost its data."""
    changed: frozenset[str] | None = None
    """Ids whose records differ from those of the previous view given to the same watcher, including
    removed ones. None: not known, so the two views are compared. With it the cost of an update is
    proportional to what changed."""


class Watcher(Protocol):
    """Who is told of a service. Thread-safe; never blocks and never raises."""

    def saw(self, view: View) -> None:
        """Take what the engine has now: at first, at each change, and after a `suspect`."""

    def suspect(self, reason: str) -> None:
        """Learn that contact, or the engine's memory, was lost.

        What was seen may be out of date, and what is seen next may miss what is about to be
        published again. `saw` follows as soon as it is known, even if nothing has changed.
        """


class Watch(Protocol):
    """A watch that runs."""

    def close(self) -> None:
        """End it: nothing is told from now on, but for a call that runs on another thread already.

        Idempotent; never raises; any thread, the watcher's own calls too; also after the
        backend's `close`.
        """


class RegistryBackend(ABC):
    """One engine, for one process.

    Errors: `RegistryUnavailable` if the engine can't be reached, does not answer in time or can't
    do it now; `RegistryRefused` if it will not (credentials, rights). Either is tried again.
    `RegistryClosed` after `close`. Nothing else is raised by any method but the constructor.

    Methods come from any thread, one call at a time; `watch`, `Watch.close` and `close` may come
    beside them.
    """

    schemes: ClassVar[tuple[str, ...]]
    """Of URLs: `("etcd", "etcds")`."""

    path_is_own: ClassVar[bool] = False
    """Whether the path of a URL is the engine's, as `url.path` (a file, a database), so that the
    service is named by `?service=`. Else the path is the service."""

    read_only: ClassVar[bool] = False
    """Whether nothing can be published here. `register`, `unregister` and publishers then raise
    ConfigurationError."""

    keeps_alive: bool = False
    """Whether the lease is renewed without `renew`, as long as the process lives (ZooKeeper's
    sessions)."""

    url: RegistryUrl
    settings: Settings

    def __init__(self, url: RegistryUrl, settings: Settings) -> None:
        """Take note, and contact nobody. Yours calls this one first.

        Raises:
            ConfigurationError: The URL makes no sense for this engine; it says what does.
            ExtraMissing: A package is not installed; it says which.
        """
        self.url = url
        self.settings = settings

    @abstractmethod
    def publish(self, instances: Sequence[ServiceInstance]) -> None:
        """Have the engine hold these under this backend's lease.

        They take the place of what is there by the same keys, whoever's it is. Idempotent. If it
        raises, any of them may be published.
        """

    @abstractmethod
    def withdraw(self, instances: Sequence[ServiceInstance]) -> None:
        """Have the engine hold these no more.

        What is there by another `epoch` stays; what is not there is no error.
        """

    @abstractmethod
    def renew(self, instances: Collection[ServiceInstance]) -> Mapping[tuple[str, str], Lost]:
        """Renew the lease of all that is published, and look whether these are there.

        There is what has the same `epoch`, and is under this backend's lease.

        Returns:
            Which of them are not, by key, and why.
        """

    @abstractmethod
    def lookup(self, service: str) -> View:
        """Ask the engine for all records of a service."""

    @abstractmethod
    def services(self) -> Sequence[str]:
        """Ask the engine for the names of all services that have records, in order."""

    @abstractmethod
    def watch(self, service: str, watcher: Watcher) -> Watch:
        """Tell the watcher of the service until the watch is closed.

        Returns at once. The watch goes on by itself whatever happens to the engine: it looks again
        as soon as it can, and now and then even if all seems well. `watcher` is called on the
        backend's own threads, one call at a time.
        """

    def refresh(self, service: str) -> None:  # noqa: B027 - optional
        """Look again soon at a service that is watched: a channel can't reach one of its servers.

        Called again and again while that lasts, on any thread. Never blocks, never raises. Only
        for engines that do not tell changes themselves.
        """

    @abstractmethod
    def close(self) -> None:
        """Give up the lease, if the engine can be reached, and end all connections and threads.

        Watches are closed. At most `timeout_s`; never raises; idempotent.
        """
