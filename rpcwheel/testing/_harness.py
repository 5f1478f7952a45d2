"""What a check of a backend stands on: backends that are closed, patience, and a witness."""

from __future__ import annotations

import secrets
import threading
import time
from typing import TYPE_CHECKING, Final, Self

from rpcwheel.instance import ServiceInstance
from rpcwheel.registry.backend import RegistryBackend, View
from rpcwheel.timer import ManualTimer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["ConformanceHarness", "RecordingWatcher", "claim", "on_threads"]

PATIENCE_S: Final = 15.0
"""Seconds until a check gives up. What works takes a small part of it."""

STEP_S: Final = 0.05
"""By which a `ManualTimer` is moved while a check waits."""


def claim(holds: object, otherwise: str) -> None:
    """Raise AssertionError, which says so, unless it holds."""
    if not holds:
        raise AssertionError(otherwise)


def on_threads(*jobs: Callable[[], object]) -> None:
    """Run each on a thread of its own, all at once; raise the first error of any."""
    errors: list[BaseException] = []
    gate = threading.Barrier(len(jobs))  # else the first may be over before the last has begun

    def run(job: Callable[[], object]) -> None:
        try:
            gate.wait()
            job()
        except BaseException as error:  # noqa: BLE001 - raised again below
            errors.append(error)

    threads = [
        threading.Thread(target=run, args=(job,), name="rpcwheel-check", daemon=True)
        for job in jobs
    ]
    try:
        for thread in threads:
            thread.start()
    except BaseException:
        gate.abort()  # those that have begun
        raise
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


class ConformanceHarness:
    """The backends of one check, all on one engine; leaving it closes them.

    What is published through it is renewed while the check waits, so that a slow machine ends no
    lease. If the backends have a `ManualTimer`, waiting moves it.
    """

    def __init__(self, make: Callable[[], RegistryBackend]) -> None:
        self._make = make
        self._held: dict[RegistryBackend, list[ServiceInstance]] = {}
        self._renewed = 0.0
        self.service = f"check.{secrets.token_hex(6)}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        for backend in self._held:
            backend.close()

    def new(self) -> RegistryBackend:
        """One more backend."""
        backend = self._make()
        claim(
            isinstance(backend, RegistryBackend),
            f"make() must give a rpcwheel.registry.RegistryBackend, not {backend!r}",
        )
        self._held[backend] = []
        for name in ("url", "settings"):
            claim(
                hasattr(backend, name),
                f"it has no `{name}`: its __init__ must call super().__init__(url, settings)",
            )
        return backend

    def instance(self, number: int = 1, service: str = "", **more: object) -> ServiceInstance:
        """An instance of the service of this check, or of another."""
        given = {"service": service or self.service, "host": "127.0.0.1", "port": 50000 + number}
        return ServiceInstance(**given | more)  # type: ignore[arg-type]

    def publish(self, backend: RegistryBackend, *instances: ServiceInstance) -> None:
        """Publish, and renew from now on."""
        backend.publish(instances)
        keys = {one.key for one in instances}
        for held in self._held.values():
            held[:] = [one for one in held if one.key not in keys]
        self._held[backend].extend(instances)

    def withdraw(self, backend: RegistryBackend, *instances: ServiceInstance) -> None:
        """Withdraw, and renew no more."""
        backend.withdraw(instances)
        for held in self._held.values():
            held[:] = [one for one in held if one not in instances]

    def neglect(self, backend: RegistryBackend) -> None:
        """Renew nothing of it any more."""
        self._held[backend].clear()

    def leave(self, backend: RegistryBackend) -> None:
        """Close it before the others."""
        del self._held[backend]
        backend.close()

    def found(self, backend: RegistryBackend, service: str = "") -> list[ServiceInstance]:
        """What a lookup finds, by id."""
        view = backend.lookup(service or self.service)
        claim(isinstance(view, View), f"lookup must give a View, not {view!r}")
        return decoded(view)

    def finds(self, backend: RegistryBackend, *wanted: ServiceInstance, service: str = "") -> None:
        """See that a lookup finds these soon, and no others."""
        told: list[ServiceInstance] = []

        def look() -> bool:
            told[:] = self.found(backend, service)
            return told == by_id(wanted)

        self.eventually(
            look, lambda: f"lookup must find {shown(by_id(wanted))}, but found {shown(told)}"
        )

    def eventually(self, look: Callable[[], object], otherwise: Callable[[], str]) -> None:
        """Wait until it holds; AssertionError if that takes too long."""
        end = time.monotonic() + PATIENCE_S
        rounds = 0
        while not look():
            claim(time.monotonic() < end, f"{otherwise()} (after {PATIENCE_S:g} s)")
            time.sleep(0.002)
            rounds += 1
            if rounds % 10 == 0:
                self.advance(STEP_S)
            self._renew()

    def let_pass(self, seconds: float) -> float:
        """Let time pass, in which leases are renewed; return the longest pause between two looks.

        What is held is renewed at most that much later than after a third of the lease.
        """
        end = self.now + seconds
        longest = 0.0
        while (left := end - (began := self.now)) > 0:
            step = min(STEP_S, max(left, 1e-6))  # a timer counts no smaller parts
            time.sleep(0.001 if self._timers else step)  # what was handed over needs a moment too
            self.advance(step)
            self._renew()
            longest = max(longest, self.now - began)
        return longest

    @property
    def lease_s(self) -> float:
        """Of the backends."""
        return next(iter(self._held)).settings.lease_s

    @property
    def now(self) -> float:
        """Seconds on the backends' clock."""
        return self._timers[0].now if self._timers else time.monotonic()

    def advance(self, seconds: float) -> None:
        """Move the time, if it is moved by hand."""
        for timer in self._timers:
            timer.advance(seconds)

    @property
    def _timers(self) -> list[ManualTimer]:
        found = {id(one.settings.timer): one.settings.timer for one in self._held}
        return [timer for timer in found.values() if isinstance(timer, ManualTimer)]

    def _renew(self) -> None:
        """Renew what is held, each third of the lease."""
        if not self._held or self.now - self._renewed < self.lease_s / 3:
            return
        self._renewed = self.now
        for backend, held in self._held.items():
            if held:
                backend.renew(held)


class RecordingWatcher:
    """A watcher that remembers what it was told, and whether two calls came at once."""

    def __init__(self) -> None:
        self.views: list[list[ServiceInstance]] = []
        self.doubts: list[str] = []
        self.at_once = False
        self.went_back = False
        self._inside = threading.Lock()
        self._revision = 0

    def saw(self, view: View) -> None:
        """As `Watcher.saw`."""
        if not self._inside.acquire(blocking=False):
            self.at_once = True
            return
        self.went_back |= not self.doubts and view.revision < self._revision
        self._revision = view.revision
        self.views.append(decoded(view))
        time.sleep(0.0005)  # another call at once would come now
        self._inside.release()

    def suspect(self, reason: str) -> None:
        """As `Watcher.suspect`."""
        self.doubts.append(reason)

    def has_seen(self, *wanted: ServiceInstance) -> bool:
        """Whether the last view has these, and no others."""
        return bool(self.views) and self.views[-1] == by_id(wanted)

    @property
    def last_words(self) -> str:
        """What it was told last, for messages."""
        if not self.views:
            return "was told nothing"
        return f"was last told of {shown(self.views[-1])}"

    def sees(self, stand: ConformanceHarness, *wanted: ServiceInstance) -> None:
        """See that the last view has these soon, and no others."""
        stand.eventually(
            lambda: self.has_seen(*wanted),
            lambda: f"a watcher must be told of {shown(by_id(wanted))}, but {self.last_words}",
        )
        claim(not self.at_once, "a watcher was called while an earlier call had not returned")
        claim(not self.went_back, "a watcher was shown an older revision after a newer one")


def decoded(view: View) -> list[ServiceInstance]:
    """The instances of a view, by id."""
    found = []
    for key, record in view.records.items():
        try:
            one = ServiceInstance.decoded(record)
        except ValueError as error:
            raise AssertionError(f"the record of {key!r} has become unreadable: {error}") from None
        claim(one.id == key, f"the record of {one.id!r} is found under {key!r}")
        found.append(one)
    return by_id(found)


def by_id(instances: Sequence[ServiceInstance]) -> list[ServiceInstance]:
    """In the order of their ids."""
    return sorted(instances, key=lambda one: one.id)


def shown(instances: Sequence[ServiceInstance]) -> str:
    """For messages."""
    if not instances:
        return "nothing"
    few = ", ".join(f"{one.service}/{one.id} (weight {one.weight})" for one in instances[:4])
    return few if len(instances) <= 4 else f"{few} and {len(instances) - 4} more"  # noqa: PLR2004
