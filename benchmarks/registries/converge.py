"""How long it takes until a thousand subscribers see a thousand instances, and each change.

All are in this process, and share its interpreter: a publisher with a session of its own, and
subscribers in as many sessions as the scale says, each of which has a connection of its own to the
engine. A rival has as many connections, and fans out to as many listeners.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median

from benchmarks.calls.scale import Row
from benchmarks.registries import rivals
from benchmarks.registries.engines import running
from benchmarks.registries.scale import Scale
from benchmarks.registries.subjects import CONVERGE, OURS, RIVALS
from rpcwheel.instance import ServiceInstance, Snapshot
from rpcwheel.registry import Registration, Registry, RegistryPolicy, open_registry

SERVICE = "bench.Shop"
POLICY = RegistryPolicy(lease_ttl=30, timeout=10, snapshot=False)
TASKS = Path("/proc/self/task")
CONNECT_S = 30.0

Listener = Callable[[rivals.Seen], None]


class Tally:
    """Counts the subscribers that have seen the awaited change."""

    def __init__(self, subscribers: int) -> None:
        self._subscribers = subscribers
        self._changed = threading.Condition()
        self._wanted: Callable[[rivals.Seen], bool] = lambda _: False
        self._left: set[int] = set()

    def listener(self, number: int) -> Listener:
        """That of one subscriber."""

        def saw(seen: rivals.Seen) -> None:
            if self._wanted(seen) and number in self._left:
                with self._changed:
                    self._left.discard(number)
                    if not self._left:
                        self._changed.notify_all()

        return saw

    def seconds(
        self, act: Callable[[], object], wanted: Callable[[rivals.Seen], bool], timeout_s: float
    ) -> float | None:
        """How long it takes from the act until all have seen it; None: longer than that."""
        with self._changed:
            self._left, self._wanted = set(range(self._subscribers)), wanted
        began = time.monotonic()
        act()
        with self._changed:
            seen = self._changed.wait_for(lambda: not self._left, timeout_s)
        return time.monotonic() - began if seen else None


def measure(engine: str, subject: str, scale: Scale) -> list[Row]:
    """A row: of one engine, with subscribers of one kind."""
    tally = Tally(scale.subscribers)
    listeners = [tally.listener(number) for number in range(scale.subscribers)]
    groups = [listeners[at :: scale.sessions] for at in range(scale.sessions)]
    with running(engine) as place, ExitStack() as stack:
        publisher = stack.enter_context(open_registry(place.url, registry_policy=POLICY))
        watch = _subscribe if subject == OURS else rivals.WATCH[engine]
        for group in groups:
            stack.enter_context(watch(place.url, SERVICE, group))
        values = _values(publisher, tally, scale, by_value=subject in (OURS, RIVALS["etcd"]))
    return [Row("client", "sync", CONVERGE, f"{engine}: {subject}", values)]


def _values(publisher: Registry, tally: Tally, scale: Scale, *, by_value: bool) -> dict[str, float]:
    values: dict[str, float] = {"sessions": scale.sessions, "subscribers": scale.subscribers}
    instances = [instance_of(number) for number in range(scale.instances)]
    registrations: list[Registration] = []
    cpu_ns = time.process_time_ns()

    def publish() -> None:
        registrations.extend(map(publisher.register, instances))

    all_s = tally.seconds(publish, lambda seen: len(seen) == scale.instances, scale.timeout_s)
    values["waited_s"] = scale.timeout_s
    if all_s is None:
        return values
    values |= {"all_s": all_s, "cpu_s": (time.process_time_ns() - cpu_ns) / 1e9}
    values["threads"] = len(list(TASKS.iterdir())) if TASKS.exists() else threading.active_count()
    if by_value:
        values |= _medians("change", _changes(registrations[-1], tally, scale))
    return values | _medians("gone", _withdrawals(publisher, instances, tally, scale))


def _changes(last: Registration, tally: Tally, scale: Scale) -> list[float | None]:
    """Of its weight."""
    name, taken = last.instance.id, []
    for weight in range(1, scale.changes + 1):
        act, wanted = _change(last, weight), _shows(name, weight)
        taken.append(tally.seconds(act, wanted, scale.timeout_s))
    return taken


def _change(registration: Registration, weight: int) -> Callable[[], object]:
    return lambda: registration.update(weight=weight)


def _shows(name: str, weight: int) -> Callable[[rivals.Seen], bool]:
    return lambda seen: seen.weight_of(name) == weight


def _withdrawals(
    publisher: Registry,
    instances: Sequence[ServiceInstance],
    tally: Tally,
    scale: Scale,
) -> list[float | None]:
    """Of the first, the second, and so on; each is gone for good."""
    taken = []
    for number, instance in enumerate(instances[: min(scale.changes, len(instances) // 3)], 1):
        left = scale.instances - number
        act, wanted = _withdraw(publisher, instance), _counts(left)
        taken.append(tally.seconds(act, wanted, scale.timeout_s))
    return taken


def _withdraw(publisher: Registry, instance: ServiceInstance) -> Callable[[], object]:
    return lambda: publisher.unregister(instance)


def _counts(left: int) -> Callable[[rivals.Seen], bool]:
    return lambda seen: len(seen) == left


def _medians(name: str, taken: Sequence[float | None]) -> dict[str, float]:
    known = [seconds for seconds in taken if seconds is not None]
    if not known or len(known) < len(taken):
        return {}
    return {f"{name}_ms": 1e3 * median(known), f"{name}_most_ms": 1e3 * max(known)}


def instance_of(number: int) -> ServiceInstance:
    """One of a thousand, whose ids are in the order of their numbers."""
    host = f"10.0.{number // 250}.{number % 250 + 1}"
    return ServiceInstance(service=SERVICE, host=host, port=50051, id=f"i{number:05}")


class _Ours:
    """What is seen in a snapshot."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.instance_ofs = snapshot.instances

    def __len__(self) -> int:
        return len(self.instance_ofs)

    def weight_of(self, name: str) -> int:
        """In the order of their ids it is the last one that changes."""
        last = self.instance_ofs[-1] if self.instance_ofs else None
        return last.weight if last is not None and last.id == name else -1


def _subscribe(url: str, service: str, listeners: Sequence[Listener]) -> ExitStack:
    """A session, with a subscription for each listener."""
    stack = ExitStack()
    registry = stack.enter_context(open_registry(url, registry_policy=POLICY))
    for listener in listeners:
        subscription = registry.subscribe(service, _seen_by(listener))
        stack.enter_context(subscription).wait(CONNECT_S)  # for the empty list
    return stack


def _seen_by(listener: Listener) -> Callable[[Snapshot], None]:
    return lambda snapshot: listener(_Ours(snapshot))
