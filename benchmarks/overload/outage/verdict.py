"""The targets of clients with a throttle or a circuit breaker, and whether outcomes meet them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from benchmarks._page import EMPTY
from benchmarks.overload.cases import BOTH, BREAKER, BROKEN, DOWN, THROTTLE
from benchmarks.overload.outage.figures import SETTLED_S, OutageOutcome

CLIENTS = (THROTTLE, BREAKER, BOTH)


@dataclass(frozen=True, slots=True)
class Target:
    """What a figure must be in some scenarios."""

    name: str
    scenarios: Sequence[str]
    figure: Callable[[OutageOutcome], float]
    limit: float
    is_least: bool = False
    form: str = "{:.1%}"

    @property
    def shown(self) -> str:
        """The limit, with its sign."""
        return f"{'≥' if self.is_least else '≤'} {self.form.format(self.limit)}"

    def cell(self, outcomes: Sequence[OutageOutcome]) -> str:
        """The worst figure; bold if it does not meet the target."""
        if not outcomes:
            return EMPTY
        worst = (min if self.is_least else max)(map(self.figure, outcomes))
        shown = self.form.format(worst)
        is_met = worst >= self.limit if self.is_least else worst <= self.limit
        return shown if is_met else f"**{shown}**"


TARGETS = (
    Target("sent", DOWN, lambda outcome: outcome.sent, 0.05),
    Target(
        f"answered later than {SETTLED_S:g} s",
        DOWN,
        lambda outcome: outcome.settled,
        0.98,
        is_least=True,
    ),
    Target("peak", DOWN, lambda outcome: outcome.peak, 1.2, form="{:.2f}"),
    Target("other methods answered", BROKEN, lambda outcome: outcome.others, 1.0, is_least=True),
)


def lines(outcomes: Sequence[OutageOutcome]) -> Iterator[tuple[str, ...]]:
    """Of each target and scenario: the target, and the worst figure of each client's worlds."""
    for target in TARGETS:
        for scenario in target.scenarios:
            of_scenario = [each for each in outcomes if each.case.scenario == scenario]
            by_client = [
                target.cell([each for each in of_scenario if each.case.client == client])
                for client in CLIENTS
            ]
            if set(by_client) != {EMPTY}:
                yield f"{scenario}: {target.name}", target.shown, *by_client
