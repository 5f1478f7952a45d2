"""What a user may set for the time of a call, and for its retries."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Self

from pydantic import Field, StrictBool, StrictInt, field_validator, model_validator
from tenacity import wait_random_exponential

from rpcwheel.backoff import Backoff
from rpcwheel.call import checked_code
from rpcwheel.durations import to_ns
from rpcwheel.errors import ConfigurationError
from rpcwheel.policy import Number, Policy, Seconds, Wait, checked

if TYPE_CHECKING:
    from collections.abc import Iterator
    from datetime import timedelta

__all__ = ["DeadlinePolicy", "RetryPolicy", "beyond"]

WANTED: Final = (
    'name the status codes to retry after, such as on={"UNAVAILABLE"}; only calls of methods that '
    "are marked idempotent are retried"
)

PARTS: Final = ("message_timeout", "slow_after")
"""What makes sense only if it is less than the whole call may take."""


class DeadlinePolicy(Policy):
    """How long a call may take.

    A call's deadline is the earliest of three: what its caller gave as `timeout=`, `timeout` here,
    and, with `propagate`, the deadline of the call that is being served. All its attempts share it.
    """

    short: ClassVar[str | None] = "timeout"

    timeout: Seconds | None = None
    """The whole call at most, with all its attempts, in seconds. None: no limit of its own."""

    message_timeout: Seconds | None = None
    """A response stream without a message for so long, while someone waits for one, is cancelled
    and ends with DEADLINE_EXCEEDED. gRPC has nothing for it. None: it may be silent for ever."""

    slow_after: Seconds | None = None
    """A call that still runs after so long is told as the event `CallSlow`. None: never."""

    propagate: StrictBool = True
    """Whether calls made while serving one share that one's deadline."""

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        for said in self.never_reached(self.timeout):
            raise ConfigurationError(said)
        return self

    def never_reached(self, whole: float | timedelta | None) -> Iterator[str]:
        """Say what of this can't happen because a call ends after `whole` seconds."""
        for name in PARTS:
            if beyond(getattr(self, name), whole):
                yield (
                    f"{name} ({getattr(self, name)}) would never be reached, the whole call ends "
                    f"after timeout ({whole}); give less, or leave it out"
                )

    def over(self, general: DeadlinePolicy | None) -> DeadlinePolicy:
        """This policy, with what it does not set taken from `general`.

        Never raises: limits that met by coming together and could not be reached are left out.
        """
        settings = {name: getattr(self, name) for name in self.model_fields_set}
        if general is not None:
            base = {name: getattr(general, name) for name in general.model_fields_set}
            settings = base | settings
        for name in PARTS:
            if beyond(settings.get(name), settings.get("timeout")):
                settings[name] = None
        return DeadlinePolicy(**settings)


def beyond(part: float | timedelta | None, whole: float | timedelta | None) -> bool:
    """Whether a part of a call, if both are limited, may take as long as the whole."""
    return part is not None and whole is not None and to_ns(part) >= to_ns(whole)


class RetryPolicy(Policy):
    """Which failed calls are retried (Dubbo's failover), and how long to wait before each retry.

    Only methods marked `idempotent` are retried: a server may have executed a call that failed,
    whatever its status says. A call is retried only before its deadline, and only as long as no
    response message was handed to the caller.

    To outlast the restart of a server, give `attempts=6`, and have gRPC reconnect sooner than it
    does by default (`grpc.initial_reconnect_backoff_ms`): until it has, tries send nothing.
    """

    on: Any = Field(description=WANTED)
    """Status codes or their names: one, or a set, tuple or list."""

    attempts: Annotated[StrictInt, Field(ge=1)] = 3
    """How many tries there are at most, the first one included. 1: no retry."""

    wait: Wait = wait_random_exponential(multiplier=0.1, max=2.0)
    """Before each retry: seconds, a `timedelta`, a tenacity `wait_*` object, or a table such as
    `{initial = 0.1, max = 2.0}`, which is the default: at random up to 0.1 s, then up to 0.2, 0.4
    and so on, to at most 2 s ("full jitter": calls that failed together do not come back
    together). If the server says how long to wait
    (`grpc-retry-pushback-ms`, gRFC A6), that is the wait instead, up to `max_pushback`."""

    max_pushback: Seconds | None = 300.0
    """The longest wait that a server may ask for, in seconds. If it asks for more, the call is not
    retried and fails at once (`CallNotRetried`). None: no limit but the call's deadline."""

    attempt_timeout: Seconds | None = None
    """One try at most. A try that it ends counts as failed with a code of `on`. None: each may use
    up what is left of the call's deadline. It does not apply to methods that are not idempotent,
    because these are not retried."""

    budget: Annotated[Number, Field(ge=0.0, le=1.0)] | None = 0.2
    """How many of a target's calls of the last 10 s may be retries, as a share, so that retries
    don't bury a server that is down already (Finagle's figure). `reserve` of them are always
    allowed. None: no limit."""

    reserve: Annotated[StrictInt, Field(ge=0)] = 10
    """How many retries in 10 s a target gets, however few its calls are."""

    replay_bytes: Annotated[StrictInt, Field(ge=0)] = 1 << 20
    """How much of a request stream is kept to send it again. A stream that grows beyond is sent on
    and no longer tried again."""

    @field_validator("on", mode="after")
    @classmethod
    def _named(cls, on: object) -> frozenset[str]:
        given = on if isinstance(on, (set, frozenset, tuple, list)) else (on,)
        codes = frozenset(checked(partial(checked_code, what="`on`"), one) for one in given)
        if not codes:
            raise ConfigurationError(f"`on` is empty; {WANTED}")
        return codes

    @field_validator("wait")
    @classmethod
    def _waits(cls, wait: object) -> object:
        checked(Backoff, wait)
        return wait
