"""The harness of the conformance checks: backends, waiting with a limit, a recording watcher."""

from __future__ import annotations

import secrets
import threading
import time
from typing import TYPE_CHECKING, Any, Final, Self

from rpcwheel.errors import RpcWheelError
from rpcwheel.instance import ServiceInstance
from rpcwheel.registry.backend import RegistryBackend, View
from rpcwheel.timer import ManualTimer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

TIMEOUT_S: Final = 15.0
"""Seconds until a check fails. A correct backend takes a small part of it."""

STEP_S: Final = 0.05
"""The steps in which a `ManualTimer` is advanced while a check waits."""


def require(holds: object, otherwise: str) -> None:
    """Raise AssertionError with the text `otherwise` unless `holds`."""
    if not holds:
        raise AssertionError(otherwise)


def run_check(
    check: Callable[[Any], None], make_harness: Callable[[], Any], allowed_errors: str
) -> None:
    """Run a check; put its name, and that of the rule, into any failure."""
    harness = make_harness()
    try:
        with harness:
            check(harness)
    except Exception as error:
        match error:
            case AssertionError():
                problem = str(error)
            case RpcWheelError():
                problem = f"a request failed: {type(error).__name__}: {error}"
            case _:
                problem = f"a backend raised {error!r}; only {allowed_errors} are allowed"
        name = f"{check.__name__}: {harness.rule}" if harness.rule else check.__name__
        raise AssertionError(f"{name}: {problem}") from error


def on_threads(*jobs: Callable[[], object]) -> None:
    """Run each job on a thread of its own, concurrently; raise the first error."""
    errors: list[BaseException] = []
    gate = threading.Barrier(len(jobs))  # otherwise the first may end before the last begins

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
        gate.abort()  # release the threads that have begun
        raise
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


class ConformanceHarness:
    """The backends of one check, all on one engine. A context manager that closes them.

    Instances that are published through it are renewed while the check waits, so that no lease ends
    on a slow machine. If the backends have a `ManualTimer`, waiting advances it.
    """

    def __init__(self, make: Callable[[], RegistryBackend]) -> None:
        self._make = make
        self._published: dict[RegistryBackend, list[ServiceInstance]] = {}
        self._renewed = 0.0
        self.service = f"check.{secrets.token_hex(6)}"
        self.rule = ""
        """The rule that is checked now, if the check has several."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        for backend in self._published:
            backend.close()

    def new_backend(self) -> RegistryBackend:
        """Make another backend."""
        backend = self._make()
        require(
            isinstance(backend, RegistryBackend),
            f"make() must return a rpcwheel.registry.RegistryBackend, not {backend!r}",
        )
        self._published[backend] = []
        for name in ("url", "settings"):
            require(
                hasattr(backend, name),
                f"it has no `{name}`: its __init__ must call super().__init__(url, settings)",
            )
        return backend

    def instance(self, number: int = 1, service: str = "", **more: object) -> ServiceInstance:
        """Make an instance of this check's service, or of another."""
        fields = {"service": service or self.service, "host": "127.0.0.1", "port": 50000 + number}
        return ServiceInstance(**fields | more)  # type: ignore[arg-type]

    def publish(self, backend: RegistryBackend, *instances: ServiceInstance) -> None:
        """Publish instances, and renew them from now on."""
        backend.publish(instances)
        keys = {instance.key for instance in instances}
        for published in self._published.values():
            published[:] = [instance for instance in published if instance.key not in keys]
        self._published[backend].extend(instances)

    def withdraw(self, backend: RegistryBackend, *instances: ServiceInstance) -> None:
        """Withdraw instances, and stop renewing them."""
        backend.withdraw(instances)
        for published in self._published.values():
            published[:] = [instance for instance in published if instance not in instances]

    def stop_renewing(self, backend: RegistryBackend) -> None:
        """Stop renewing the instances of a backend."""
        self._published[backend].clear()

    def close(self, backend: RegistryBackend) -> None:
        """Close one backend."""
        del self._published[backend]
        backend.close()

    def lookup(self, backend: RegistryBackend, service: str = "") -> list[ServiceInstance]:
        """Look a service up, and return its instances, sorted by id."""
        view = backend.lookup(service or self.service)
        require(isinstance(view, View), f"lookup must return a View, not {view!r}")
        return decoded(view)

    def expect_found(
        self, backend: RegistryBackend, *wanted: ServiceInstance, service: str = ""
    ) -> None:
        """Wait until a lookup returns exactly these instances."""
        instances: list[ServiceInstance] = []

        def look() -> bool:
            instances[:] = self.lookup(backend, service)
            return instances == by_id(wanted)

        self.wait_until(
            look, lambda: f"lookup must find {shown(by_id(wanted))}, but found {shown(instances)}"
        )

    def wait_until(self, look: Callable[[], object], otherwise: Callable[[], str]) -> None:
        """Wait until `look()` is true; raise AssertionError if that takes too long."""
        end = time.monotonic() + TIMEOUT_S
        rounds = 0
        while not look():
            require(time.monotonic() < end, f"{otherwise()} (after {TIMEOUT_S:g} s)")
            time.sleep(0.002)
            rounds += 1
            if rounds % 4 == 0:
                self.advance(STEP_S)
            self.renew_due()

    def let_time_pass(self, seconds: float) -> float:
        """Let time pass while leases are renewed.

        Returns:
            The longest pause in seconds. No renewal was later than a third of the lease plus that.
        """
        end = self.now + seconds
        longest = 0.0
        while (left := end - (began := self.now)) > 0:
            step = min(STEP_S, max(left, 1e-6))  # the resolution of a timer
            time.sleep(0.001 if self._timers else step)  # for jobs on worker threads
            self.advance(step)
            self.renew_due()
            longest = max(longest, self.now - began)
        return longest

    @property
    def lease_s(self) -> float:
        """The lease of the backends."""
        return next(iter(self._published)).settings.lease_s

    @property
    def now(self) -> float:
        """Seconds on the backends' clock."""
        return self._timers[0].now if self._timers else time.monotonic()

    def advance(self, seconds: float) -> None:
        """Advance the `ManualTimer`s of the backends."""
        for timer in self._timers:
            timer.advance(seconds)

    @property
    def _timers(self) -> list[ManualTimer]:
        timers = {id(backend.settings.timer): backend.settings.timer for backend in self._published}
        return [timer for timer in timers.values() if isinstance(timer, ManualTimer)]

    def renew_due(self) -> None:
        """Renew the published instances, every third of the lease."""
        if not self._published or self.now - self._renewed < self.lease_s / 3:
            return
        self._renewed = self.now
        for backend, published in self._published.items():
            if published:
                backend.renew(published)


class RecordingWatcher:
    """A watcher that records its calls, and whether two were concurrent."""

    def __init__(self) -> None:
        self.views: list[list[ServiceInstance]] = []
        self.suspicions: list[str] = []
        self.was_concurrent = False
        self.went_back = False
        self.problem = ""
        """What is wrong with the records of a view."""
        self._inside = threading.Lock()
        self._revision = 0

    def on_view(self, view: View) -> None:
        """Record a view, and whether another call is running."""
        if not self._inside.acquire(blocking=False):
            self.was_concurrent = True
            return
        self.went_back |= not self.suspicions and view.revision < self._revision
        self._revision = view.revision
        try:
            self.views.append(decoded(view))
        except AssertionError as error:  # raised by `wait_for`, as a watcher must not raise
            self.problem = f"a watcher got a wrong view: {error}"
        time.sleep(0.0005)  # time for a concurrent call
        self._inside.release()

    def on_contact_lost(self, reason: str) -> None:
        """Record why contact was lost."""
        self.suspicions.append(reason)

    def has_seen(self, *wanted: ServiceInstance) -> bool:
        """Whether the last view has exactly these instances."""
        return bool(self.views) and self.views[-1] == by_id(wanted)

    @property
    def last_view(self) -> str:
        """The last view, in words."""
        if not self.views:
            return "was not called"
        return f"last saw {shown(self.views[-1])}"

    def wait_for(self, harness: ConformanceHarness, *wanted: ServiceInstance) -> None:
        """Wait until the last view has exactly these instances."""

        def look() -> bool:
            require(not self.problem, self.problem)
            return self.has_seen(*wanted)

        harness.wait_until(
            look,
            lambda: f"a watcher must see {shown(by_id(wanted))}, but {self.last_view}",
        )
        require(
            not self.was_concurrent, "a watcher was called while an earlier call had not returned"
        )
        require(not self.went_back, "a watcher saw an older revision after a newer one")


def decoded(view: View) -> list[ServiceInstance]:
    """Return the instances of a view, sorted by id."""
    instances = []
    for key, record in view.records.items():
        try:
            instance = ServiceInstance.decoded(record)
        except ValueError as error:
            raise AssertionError(f"the record of {key!r} is not the stored one: {error}") from None
        require(instance.id == key, f"the record of {instance.id!r} is found under {key!r}")
        instances.append(instance)
    return by_id(instances)


def by_id(instances: Sequence[ServiceInstance]) -> list[ServiceInstance]:
    """Sort instances by id."""
    return sorted(instances, key=lambda instance: instance.id)


def shown(instances: Sequence[ServiceInstance]) -> str:
    """Describe instances in a message."""
    if not instances:
        return "nothing"
    first, others = instances[:4], instances[4:]
    text = ", ".join(
        f"{instance.service}/{instance.id} (weight {instance.weight})" for instance in first
    )
    return f"{text} and {len(others)} more" if others else text
