"""How calls end, as a table: what the server does, what is set, and what the caller must see.

Each twin plays every scenario with every kind of call in every style it has, first on a bare
channel and then on one with the policies, and compares the two.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from fixtures.shop import (
    STREAM_STREAM,
    STREAM_UNARY,
    UNARY_STREAM,
    UNARY_UNARY,
    Fail,
    Hang,
)
from fixtures.waiting import WAIT_S
from rpcwheel.call import CallPolicy, DeadlinePolicy, RetryPolicy
from rpcwheel.failback import FailbackPolicy

KINDS = {
    "unary-unary": UNARY_UNARY,
    "unary-stream": UNARY_STREAM,
    "stream-unary": STREAM_UNARY,
    "stream-stream": STREAM_STREAM,
}
"""The multicallable's name (with `_` for `-`) and the method to call."""

MESSAGES = (b"a", b"b")
"""What a request stream sends; a unary request is all of it in one."""

DEFAULT = b"later"
"""What failback answers; the messages of a response stream are its bytes."""

SOON = 0.05
"""Seconds after which a call that hangs is to end."""


def _nothing() -> tuple:
    return ()


@dataclass(frozen=True)
class Scenario:
    """One way for a call to end."""

    name: str
    code: str
    """Of the status that the caller sees in the end."""
    deeds: Callable[[], tuple] = _nothing
    """What the server does with the call's attempts, in order; it echoes those that follow."""
    bare: Callable[[], tuple] | None = None
    """The same for the bare channel, if that is to be compared with something else."""
    policy: dict = field(default_factory=dict)
    """What is set beside `COMMON`."""
    timeout: float | None = None
    """What the caller gives."""
    bare_timeout: float | None = None
    """The same for the bare channel, if it has to do what a policy does otherwise."""
    cancel: bool = False
    """Whether the caller cancels once the call has reached the server."""
    attempts: int = 1
    """How many the server sees while the caller waits."""
    default: bool = False
    """Whether the answer is `DEFAULT`."""

    @property
    def min_attempts(self) -> int:
        """Fewer than `attempts` if a deadline may pass before the first has reached the server."""
        return 0 if self.code == "DEADLINE_EXCEEDED" else self.attempts

    def __str__(self) -> str:
        return self.name


COMMON = {
    "plain": {"timeout": DeadlinePolicy(timeout=WAIT_S, slow_call_threshold=WAIT_S / 2)},
    "all": {
        "timeout": DeadlinePolicy(
            timeout=WAIT_S, slow_call_threshold=WAIT_S / 2, message_timeout=WAIT_S / 3
        ),
        "retry": RetryPolicy(retry_on="UNAVAILABLE", backoff=0.01, retry_budget=None),
        "idempotent": True,
    },
}
"""What is set in every scenario: once so little that calls are handed through, once all."""

BROKEN = Fail("NOT_FOUND", "no such thing", (("why", "sold"), ("raw-bin", b"\x00\x01")))


def _hang() -> tuple:
    return (Hang(),)


def _hang_all() -> tuple:
    """Also for calls before that reach the server only after their deadline."""
    return Hang(), Hang(), Hang()


SCENARIOS = (
    Scenario("success", "OK"),
    Scenario("error", "NOT_FOUND", deeds=lambda: (BROKEN,)),
    Scenario("timeout", "DEADLINE_EXCEEDED", deeds=_hang_all, timeout=SOON, bare_timeout=SOON),
    Scenario("cancel by caller", "CANCELLED", deeds=_hang, cancel=True),
    Scenario("cancel by server", "CANCELLED", deeds=lambda: (Fail("CANCELLED", "not now"),)),
    Scenario(
        "deadline",
        "DEADLINE_EXCEEDED",
        deeds=_hang_all,
        policy={"timeout": SOON},
        bare_timeout=SOON,
    ),
    Scenario(
        "retry then success",
        "OK",
        deeds=lambda: ("UNAVAILABLE",),
        bare=_nothing,
        policy={k: COMMON["all"][k] for k in ("retry", "idempotent")},
        attempts=2,
    ),
    Scenario(
        "failback",
        "OK",
        deeds=lambda: ("UNAVAILABLE",),
        bare=_nothing,
        policy={
            "retry": None,
            "failback": FailbackPolicy(retry_on="UNAVAILABLE", backoff=30.0, default=DEFAULT),
        },
        default=True,
    ),
)


def policy_of(scenario: Scenario, common: str) -> CallPolicy:
    return CallPolicy(**COMMON[common] | scenario.policy)


def request_of(kind: str):
    """What to call a multicallable of the kind with; a fresh iterator if the requests stream."""
    return iter(MESSAGES) if kind.startswith("stream") else b"".join(MESSAGES)


def answer_of(kind: str, *, default: bool = False):
    """What the caller gets: bytes, or the list of a stream's messages."""
    if default:
        return [DEFAULT] if kind.endswith("stream") else DEFAULT
    return list(MESSAGES) if kind.endswith("stream") else b"".join(MESSAGES)
