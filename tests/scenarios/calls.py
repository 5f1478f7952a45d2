"""A table of calls: what the server does, which policies are set, and what the caller gets.

The tests of `grpc` and `grpc.aio` run each scenario with each kind and style of call, on a plain
channel and on a channel with the policies, and compare the results.
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
"""The messages of a request stream; a unary request has all of them."""

DEFAULT = b"later"
"""The default of failback; a response stream has one message for each byte."""

SOON = 0.05
"""The timeout of calls that the server does not answer."""


def _nothing() -> tuple:
    return ()


@dataclass(frozen=True)
class Scenario:
    """One scenario."""

    name: str
    code: str
    """The code that the caller gets."""
    deeds: Callable[[], tuple] = _nothing
    """What the server does with the attempts of the call, in order; further ones are echoed."""
    bare: Callable[[], tuple] | None = None
    """The same for the plain channel, if it differs."""
    policy: dict = field(default_factory=dict)
    """Settings in addition to `COMMON`."""
    timeout: float | None = None
    """The arguments of the caller."""
    bare_timeout: float | None = None
    """The same for the plain channel, if they replace a policy."""
    cancel: bool = False
    """Whether the caller cancels once the call has reached the server."""
    attempts: int = 1
    """The number of attempts that the server gets while the caller waits."""
    default: bool = False
    """Whether the response is `DEFAULT`."""

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
"""The settings of all scenarios: once so few that calls are gRPC's own, once all."""

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
    """The request for a multicallable of the kind; a new iterator for a request stream."""
    return iter(MESSAGES) if kind.startswith("stream") else b"".join(MESSAGES)


def answer_of(kind: str, *, default: bool = False):
    """The response: bytes, or the list of a stream's messages."""
    if default:
        return [DEFAULT] if kind.endswith("stream") else DEFAULT
    return list(MESSAGES) if kind.endswith("stream") else b"".join(MESSAGES)
