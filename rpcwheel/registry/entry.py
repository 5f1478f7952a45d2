"""The words of what is published: the states of a registration, what is known of it, a request."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from rpcwheel.durations import NEVER

from .contested import Contest

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rpcwheel.instance import ServiceInstance

__all__ = ["TRANSITIONS", "Entry", "State", "Step"]


class State(enum.StrEnum):
    """Of a registration; see `Registration.state`."""

    PENDING = "PENDING"
    PUBLISHED = "PUBLISHED"
    LOST = "LOST"
    WITHDRAWING = "WITHDRAWING"
    GONE = "GONE"


TRANSITIONS: Final[Mapping[State, frozenset[State]]] = {
    State.PENDING: frozenset({State.PUBLISHED, State.WITHDRAWING, State.GONE}),
    State.PUBLISHED: frozenset({State.PENDING, State.LOST, State.WITHDRAWING}),
    State.LOST: frozenset({State.PUBLISHED, State.WITHDRAWING}),
    State.WITHDRAWING: frozenset({State.PENDING, State.GONE}),
    State.GONE: frozenset(),
}
"""From each state the ones that may follow it."""


class Entry:
    """One registration: what is wanted, what is known. Changed by its `Reconciler` only."""

    __slots__ = (
        "__weakref__",
        "again",
        "attempts",
        "contest",
        "doubt_ns",
        "due_ns",
        "error",
        "generation",
        "instance",
        "seen_ns",
        "sent",
        "state",
        "wanted",
    )

    def __init__(self, instance: ServiceInstance) -> None:
        self.instance = instance
        """What is wanted, or was last."""
        self.wanted = True
        self.generation = 1
        self.state = State.PENDING
        self.due_ns = NEVER
        """When its next request is to be made."""
        self.sent: dict[str, ServiceInstance] = {}
        """What the engine may hold of it, by epoch."""
        self.doubt_ns = 0
        """Until then a request that failed may take effect, after those that followed it."""
        self.again: str = ""
        """Why it was lost, until it is published again."""
        self.seen_ns: int | None = None
        """When the engine was last asked, and had it, in whatever form."""
        self.contest = Contest()
        self.attempts = 0
        """Refusals in a row, of it alone."""
        self.error: BaseException | None = None

    def may_be(self, instance: ServiceInstance) -> bool:
        """Whether it is, or was, of this run; and not of another one by the same name."""
        return instance.epoch == self.instance.epoch or instance.epoch in self.sent

    @property
    def is_there(self) -> bool:
        """Whether the engine has it, as far as is known; perhaps in an older form."""
        return self.wanted and self.seen_ns is not None and self.state is not State.LOST


class Step(NamedTuple):
    """A request to make."""

    request: Literal["publish", "withdraw", "renew"]
    batch: tuple[tuple[Entry, int], ...]
    """With their generations."""
    instances: tuple[ServiceInstance, ...]
    started_ns: int
