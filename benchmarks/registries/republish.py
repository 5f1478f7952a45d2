"""How what an engine has forgotten comes back: when the first, when all, and how many at a time.

The engine is killed, and started again on the same port without its data. From when it answers, a
separate backend reads every few milliseconds how many instances there are.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import pairwise

from benchmarks.calls.scale import Row
from benchmarks.registries.converge import SERVICE, instance_of
from benchmarks.registries.engines import Running, running
from benchmarks.registries.scale import Scale
from benchmarks.registries.subjects import AT_ONCE, REPUBLISH
from rpcwheel.errors import RegistryError
from rpcwheel.registry import Registry, RegistryBackend, RegistryPolicy
from rpcwheel.registry.backend import Settings
from rpcwheel.registry.backends import open_backend
from rpcwheel.testing import FlakyBackend

PAUSE_S = 0.01
BIN_S = 0.1

Arrivals = list[tuple[float, int]]
"""Seconds, and how many there were."""


def measure(engine: str, subject: str, scale: Scale) -> list[Row]:
    """A row: of one engine, spread or not."""
    jitter = 0.001 if subject == AT_ONCE else scale.window_s
    policy = RegistryPolicy(lease_ttl=scale.lease_s, jitter=jitter, snapshot=False)
    settings = Settings(lease_s=scale.lease_s, timeout_s=1.0)
    instances = [instance_of(number) for number in range(scale.instances)]
    with running(engine) as place, ExitStack() as stack:
        backends, wipe = _backends(place, settings, scale.publishers)
        publishers = [
            stack.enter_context(Registry(each, registry_policy=policy)) for each in backends
        ]
        took = [
            publishers[number % len(publishers)].register(instance)
            for number, instance in enumerate(instances)
        ]
        for registration in took:
            if not registration.wait_published(scale.timeout_s):
                raise RuntimeError(f"{registration.instance.id} was not published")
        looker = open_backend(place.url, settings)
        stack.callback(looker.close)
        wipe()
        arrivals = _arrivals(looker, scale)
    values = _values(arrivals, scale)
    return [Row("client", "sync", REPUBLISH, f"{engine}: {subject}", values)]


def _backends(
    place: Running, settings: Settings, count: int
) -> tuple[Sequence[RegistryBackend], Callable[[], object]]:
    """So many, and what wipes their engine; in memory one, as others would not know of that."""
    if place.wipe is None:
        flaky = FlakyBackend(open_backend(place.url, settings))
        return [flaky], flaky.forget
    return [open_backend(place.url, settings) for _ in range(count)], place.wipe


def _arrivals(looker: RegistryBackend, scale: Scale) -> Arrivals:
    """Until all are there."""
    began, found = time.monotonic(), [(0.0, 0)]
    while found[-1][1] < scale.instances:
        at = time.monotonic() - began
        if at > scale.timeout_s:
            break
        try:
            found.append((at, len(looker.lookup(SERVICE).records)))
        except RegistryError:
            time.sleep(PAUSE_S)
        time.sleep(PAUSE_S)
    return found


def _values(arrivals: Arrivals, scale: Scale) -> dict[str, float]:
    bins: dict[int, int] = {}
    for (_, before), (at, now) in pairwise(arrivals):
        bins[int(at / BIN_S)] = bins.get(int(at / BIN_S), 0) + now - before
    came = {place: count for place, count in bins.items() if count > 0}
    values = {
        "back": arrivals[-1][1],
        "window_s": scale.window_s,
        "waited_s": scale.timeout_s,
        "busiest": max(came.values(), default=0),
        "bins": len(came),
    }
    if came:
        values["first_s"] = next(at for at, count in arrivals if count)
    if arrivals[-1][1] == scale.instances:
        values["all_s"] = arrivals[-1][0]
    return values
