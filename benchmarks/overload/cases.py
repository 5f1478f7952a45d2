"""The cases, as data: worlds, handlers, variants of the server, clients and scenarios."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal

World = Literal["sync", "aio"]

METHOD: Final = "/bench.Overload/Call"
DEADLINE_S: Final = 0.5
"""The deadline of each call. A call counts as answered if it got its response in this time."""

WAIT_S: Final = 0.05
SLOTS: Final = 4
"""How long the handlers that wait do so, and how many of them can at a time."""

BURN_S: Final = 0.01
"""The CPU time of the handlers that compute."""

WORLDS: Final[tuple[World, ...]] = ("sync", "aio")
BARE, FIXED, ADAPTIVE = VARIANTS = ("bare", "fixed", "adaptive")
PLAIN, NAIVE, KIT = CLIENTS = ("plain", "naive", "kit")


@dataclass(frozen=True, slots=True)
class Handler:
    """What a handler does, and the best server for it that can be set up by hand."""

    name: str
    about: str
    worlds: tuple[World, ...]
    threads: int  # of the pool of a server of `grpc`
    best_limit: int  # `maximum_concurrent_rpcs` of the variant `fixed`
    callers: tuple[int, ...]  # concurrent calls with which the capacity is measured


HANDLERS: Final = {
    handler.name: handler
    for handler in (
        Handler("wait", "4 slots of 50 ms", WORLDS, SLOTS, 8, (4, 8)),
        Handler("wait32", "4 slots of 50 ms, 32 threads", ("sync",), 32, 8, (4, 8)),
        Handler("burn", "10 ms of CPU", WORLDS, 32, 2, (1, 2, 4)),
    )
}


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of a scenario with a constant load."""

    name: str
    load: float  # calls, as a share of the capacity of the first phase
    slowness: float = 1.0  # the work of each call takes so many times longer


@dataclass(frozen=True, slots=True)
class Scenario:
    """Phases, one after the other, with one server and one client."""

    name: str
    phases: tuple[Phase, ...]
    clients: tuple[str, ...] = (PLAIN,)


SCENARIOS: Final = {
    scenario.name: scenario
    for scenario in (
        Scenario(
            "phases",
            (
                Phase("0.7x", 0.7),
                Phase("2x", 2.0),
                Phase("10x", 10.0),
                Phase("0.7x after", 0.7),
            ),
            CLIENTS,
        ),
    )
}


@dataclass(frozen=True, slots=True)
class Case:
    """One run of one scenario."""

    world: World
    handler: str
    variant: str
    client: str
    scenario: str

    def __str__(self) -> str:
        return f"{self.scenario}, {self.world}, {self.handler}, {self.variant}, {self.client}"


DIMENSIONS: Final = (WORLDS, tuple(HANDLERS), VARIANTS, CLIENTS, tuple(SCENARIOS))
NAMES: Final = tuple(name for names in DIMENSIONS for name in names)


def cases(only: frozenset[str]) -> Iterator[Case]:
    """The cases with these names; a dimension of which no name is given is not restricted."""
    worlds, handlers, variants, clients, scenarios = (
        only.intersection(names) or frozenset(names) for names in DIMENSIONS
    )
    for scenario in SCENARIOS.values():
        for handler in HANDLERS.values():
            for world in handler.worlds:
                for variant in VARIANTS:
                    for client in scenario.clients:
                        if (
                            scenario.name in scenarios
                            and handler.name in handlers
                            and world in worlds
                            and variant in variants
                            and client in clients
                        ):
                            yield Case(world, handler.name, variant, client, scenario.name)
