"""The cases, as data: worlds, handlers, variants of the server, clients and scenarios."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Final, Literal

World = Literal["sync", "aio"]

METHOD: Final = "/bench.Overload/Call"
DEADLINE_S: Final = 0.5
PATIENT_DEADLINE_S: Final = 5.0
"""The deadline of each call. A call is answered if it got its response in this time."""

SLOTS: Final = 4
"""How many of the handlers that wait can do so at a time."""

WAIT_S: Final = 0.05
SHORT_WAIT_S: Final = 0.02
"""How long they wait; less where the wait becomes longer, and must stay below the deadline."""

BURN_S: Final = 0.01
"""The CPU time of the handlers that compute."""

RELAY_THREADS: Final = 32
CHAIN_CALLS: Final = 2
"""The first servers of a chain make so many calls, one after the other, for each of theirs."""

WORLDS: Final[tuple[World, ...]] = ("sync", "aio")
BARE, FIXED, ADAPTIVE = LIMITS = ("bare", "fixed", "adaptive")
SEVERED: Final = "severed"
"""`ADAPTIVE`, with handlers whose own calls inherit neither criticality nor deadline."""
SWITCHING: Final = "switching"
"""`ADAPTIVE`, with `sys.setswitchinterval(SWITCH_S)`."""
SWITCH_S: Final = 0.0005
VARIANTS: Final = (*LIMITS, SEVERED, SWITCHING)
PLAIN, NAIVE, KIT = CLIENTS = ("plain", "naive", "kit")
WAIT, WAIT32, BURN, WAIT_VARIED, BURN_VARIED = (
    "wait", "wait32", "burn", "wait-varied", "burn-varied",
)  # fmt: skip
CRITICAL, SHEDDABLE = ("CRITICAL", "SHEDDABLE")


@dataclass(frozen=True, slots=True)
class Handler:
    """What a handler does, and the best server for it that can be set up by hand."""

    about: str
    worlds: tuple[World, ...]
    threads: int  # of the pool of a server of `grpc`
    best_limit: int  # `maximum_concurrent_rpcs` of the variant `fixed`
    callers: tuple[int, ...]  # numbers of callers with which the capacity is measured
    burns: bool = False  # CPU time, in place of waiting
    varies: bool = False  # in how long it takes; otherwise every call takes the same time


HANDLERS: Final = {
    WAIT: Handler("wait, 4 at a time", WORLDS, SLOTS, 8, (4, 8)),
    WAIT32: Handler("wait, 4 at a time, on 32 threads", ("sync",), 32, 8, (4, 8)),
    BURN: Handler("burn 10 ms of CPU", WORLDS, 32, 2, (2, 4), burns=True),
    WAIT_VARIED: Handler(
        "wait, each a different time, 4 at a time", WORLDS, SLOTS, 8, (4, 8), varies=True
    ),
    BURN_VARIED: Handler(
        "burn CPU, each a different time", WORLDS, 32, 2, (2, 4), burns=True, varies=True
    ),
}


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of a scenario with constant loads. Loads are shares of the undiminished capacity."""

    name: str
    load: float
    sheddable: float = 0.0
    slowness: float = 1.0  # the work of each call takes so many times longer
    length: float = 1.0  # of the seconds of a phase

    @property
    def loads(self) -> float:
        """The load, and that of sheddable calls."""
        return self.load + self.sheddable


@dataclass(frozen=True, slots=True)
class Scenario:
    """Phases, one after the other, with the same server and client."""

    about: str
    phases: tuple[Phase, ...]
    handlers: tuple[str, ...] = (WAIT, WAIT32, BURN)
    variants: tuple[str, ...] = LIMITS
    clients: tuple[str, ...] = (PLAIN,)
    criticality: str | None = None  # of the calls that are not sheddable
    wait_s: float = WAIT_S
    worlds: tuple[World, ...] = WORLDS
    is_chain: bool = False


PHASES, INTERVAL, VARIED, HALVED, DOWNSTREAM, SPIKE, CHAIN, SWEEP = (
    "phases", "interval", "varied", "halved", "downstream", "spike", "chain", "sweep",
)  # fmt: skip
AFTER: Final = "0.7x after"

_OVERLOADED: Final = (Phase("0.7x", 0.7), Phase("2x", 2.0), Phase("10x", 10.0), Phase(AFTER, 0.7))

SCENARIOS: Final = {
    PHASES: Scenario(
        "Twice and ten times the capacity",
        _OVERLOADED,
        clients=CLIENTS,
    ),
    INTERVAL: Scenario(
        "Handlers that compute, and a shorter switch interval",
        _OVERLOADED,
        handlers=(BURN,),
        variants=(ADAPTIVE, SWITCHING),
        worlds=("sync",),
    ),
    VARIED: Scenario(
        "Handlers of different durations",
        (
            Phase("0.7x", 0.7),
            Phase("1.2x", 1.2),
            Phase("2x", 2.0),
            Phase("10x", 10.0),
            Phase(AFTER, 0.7),
        ),
        handlers=(WAIT_VARIED, BURN_VARIED),
    ),
    HALVED: Scenario(
        "A capacity that is halved",
        (Phase("1.2x", 1.2), Phase("halved", 1.2, slowness=2.0)),
    ),
    DOWNSTREAM: Scenario(
        "A downstream that becomes ten times slower",
        (
            Phase("fast", 0.7),
            Phase("10 times slower", 0.7, slowness=10.0),
            Phase("fast again", 0.7),
        ),
        handlers=(WAIT, WAIT32),
        wait_s=SHORT_WAIT_S,
    ),
    SPIKE: Scenario(
        "A spike of sheddable calls",
        (Phase("before", 0.5), Phase("spike", 0.5, sheddable=12.0), Phase("after", 0.5)),
        clients=(PLAIN, KIT),
        criticality=CRITICAL,
    ),
    CHAIN: Scenario(
        "A chain of servers whose last one becomes slow",
        (
            Phase("fast", 0.18, sheddable=0.6),
            Phase("5 times slower", 0.18, sheddable=0.6, slowness=5.0),
        ),
        handlers=(WAIT,),
        variants=(SEVERED, ADAPTIVE),
        criticality=CRITICAL,
        wait_s=SHORT_WAIT_S,
        is_chain=True,
    ),
    SWEEP: Scenario(
        "Goodput by offered load",
        tuple(
            Phase(f"{load:g}x", load, length=0.5) for load in (0.5, 0.75, 1, 1.25, 1.5, 2, 3, 5, 10)
        ),
    ),
}


@dataclass(frozen=True, slots=True)
class Case:
    """A run of a scenario."""

    scenario: str
    world: World
    handler: str
    variant: str
    client: str

    def __str__(self) -> str:
        return f"{self.scenario}, {self.world}, {self.handler}, {self.variant}, {self.client}"


DOWN = REFUSES, PATIENT, HANGS, KILLED, FROZEN = (
    "refuses",
    "patient",
    "hangs",
    "killed",
    "frozen",
)
"""Scenarios for clients: a server that is down, because it answers each call with UNAVAILABLE (also
for callers that wait for `PATIENT_DEADLINE_S`), its handlers take until the deadline, its process
was killed, or its process is stopped."""

BROKEN = FAILING, SLOW = ("failing", "slow")
"""Scenarios for clients: one of ten methods fails with INTERNAL, or takes until the deadline."""

OUTAGES: Final = (*DOWN, *BROKEN)
RETRY, THROTTLE, BREAKER, BOTH = ("retry", "throttle", "breaker", "both")
OUTAGE_CLIENTS: Final = (PLAIN, NAIVE, RETRY, THROTTLE, BREAKER, BOTH)


@dataclass(frozen=True, slots=True)
class OutageCase:
    """A client of a bare server that is down for a time, or one of whose methods is broken."""

    scenario: str
    world: World
    client: str

    def __str__(self) -> str:
        return f"{self.scenario}, {self.world}, {self.client}"

    @property
    def deadline_s(self) -> float:
        """The timeout of each call."""
        return PATIENT_DEADLINE_S if self.scenario == PATIENT else DEADLINE_S


_DIMENSIONS: Final = (
    (*SCENARIOS, *OUTAGES),
    WORLDS,
    tuple(HANDLERS),
    VARIANTS,
    tuple(dict.fromkeys((*CLIENTS, *OUTAGE_CLIENTS))),
)
NAMES: Final = tuple(name for names in _DIMENSIONS for name in names)


def cases(only: frozenset[str]) -> Iterator[Case]:
    """The cases with these names. A dimension of which no name is given is not restricted."""
    for name, scenario in SCENARIOS.items():
        for handler in scenario.handlers:
            worlds = [each for each in HANDLERS[handler].worlds if each in scenario.worlds]
            for world, variant, client in product(worlds, scenario.variants, scenario.clients):
                case = Case(name, world, handler, variant, client)
                if _is_wanted(only, name, world, handler, variant, client):
                    yield case


def outage_cases(only: frozenset[str]) -> Iterator[OutageCase]:
    """The cases of clients with these names; the rule is that of `cases`."""
    for scenario, world, client in product(OUTAGES, WORLDS, OUTAGE_CLIENTS):
        if _is_wanted(only, scenario, world, WAIT, BARE, client):
            yield OutageCase(scenario, world, client)


def _is_wanted(only: frozenset[str], *names: str) -> bool:
    return all(
        name in only or only.isdisjoint(others)
        for name, others in zip(names, _DIMENSIONS, strict=True)
    )
