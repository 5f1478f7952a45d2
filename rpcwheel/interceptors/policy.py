"""What a user may set for calls: one policy for all of them, and others for some methods."""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import BeforeValidator, Field, StrictBool, model_validator

from rpcwheel.deadline.core import SURE
from rpcwheel.deadline.policy import DeadlinePolicy, RetryPolicy
from rpcwheel.durations import to_ns
from rpcwheel.errors import ConfigurationError
from rpcwheel.failback.matching import WANTED, Matcher
from rpcwheel.failback.policy import FailbackPolicy
from rpcwheel.policy import Policy, checked

from .selector import MethodPattern, matches, specificity

__all__ = ["CallPolicy", "FailsafePolicy", "MethodPolicy"]


class FailsafePolicy(Policy):
    """Which failures are logged and answered with a default (Dubbo's failsafe)."""

    on: Any = Field(description=WANTED)
    """As for failback: exception types, status codes, predicates, or a set, tuple or list."""

    default: Any = None
    """What the caller gets: this very object. For a response stream, its messages in a sequence;
    None is an empty stream."""

    @model_validator(mode="after")
    def _known(self) -> Self:
        checked(Matcher, self.on)
        return self


def _deadline(value: object) -> object:
    """A plain number, or a `timedelta`, is the timeout."""
    if value is None or isinstance(value, (DeadlinePolicy, dict)):
        return value
    return DeadlinePolicy(timeout=value)  # type: ignore[arg-type]  # pydantic will tell


class MethodPolicy(Policy):
    """What holds for the calls of some methods. What is not given comes from a more general one.

    None switches off what a more general policy has switched on.
    """

    timeout: Annotated[DeadlinePolicy | None, BeforeValidator(_deadline)] = None
    """A number of seconds, a `timedelta`, or a `DeadlinePolicy`."""

    retry: RetryPolicy | None = None

    failsafe: FailsafePolicy | None = None
    """Answer a call that has failed for good with a default, and log it."""

    failback: FailbackPolicy | None = None
    """Answer a call that has failed for good with a default, and deliver it in the background."""

    idempotent: StrictBool = False
    """Whether carrying a call out twice does no harm. Of a method that is not, only what no server
    has seen is sent again (failback apart, which is at-least-once)."""

    def over(self, general: MethodPolicy) -> MethodPolicy:
        """This policy, with all that it does not set taken from `general`."""
        given = {name: getattr(self, name) for name in self.settings & self.model_fields_set}
        base = {name: getattr(general, name) for name in self.settings & general.model_fields_set}
        return MethodPolicy(**base | given)

    @property
    def settings(self) -> set[str]:
        """The names of what may be set for a method."""
        return set(MethodPolicy.model_fields)

    def contradiction(self) -> str | None:
        """What in here cannot be meant so; None if all agrees."""
        retry, deadline = self.retry, self.timeout
        if retry is not None and not self.idempotent and not retry.on & SURE:
            return (
                f"retry: calls that failed with {', '.join(sorted(retry.on))} may have been "
                "carried out, so only idempotent methods are tried again after them; set "
                'idempotent=True for those that are (methods={"/shop.Orders/Get*": ...})'
            )
        whole = None if deadline is None else deadline.timeout
        part = None if retry is None else retry.attempt_timeout
        if whole is not None and part is not None and to_ns(part) > to_ns(whole):
            return (
                f"retry.attempt_timeout ({part}) is longer than timeout ({whole}), which holds for "
                "all attempts together; give less, or leave it out"
            )
        if self.failsafe is not None and self.failback is not None:
            return (
                "failsafe and failback both answer a call that failed: failsafe forgets it, "
                "failback delivers it later; choose one"
            )
        return None


class CallPolicy(MethodPolicy):
    """What holds for all calls, and for those of some methods.

    Example::

        CallPolicy(
            timeout=2.0,
            retry=RetryPolicy(on={"UNAVAILABLE"}),
            methods={
                "/shop.Orders/Get*": MethodPolicy(idempotent=True),
                "/shop.Audit/*": MethodPolicy(failback=FailbackPolicy(on="UNAVAILABLE")),
            },
        )
    """

    methods: dict[MethodPattern, MethodPolicy] = {}
    """By pattern: `"/shop.Orders/Get"`, `"/shop.Orders/*"`, `"*"`. Where several match, each
    setting is taken from the most specific that has it: the one with most characters that are no
    wildcard."""

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        for pattern in ("*", *self.methods):
            wrong = self.of(pattern).contradiction()
            if wrong is not None:
                where = f"methods[{pattern!r}]: " if pattern in self.methods else ""
                raise ConfigurationError(where + wrong)
        return self

    def of(self, method: str) -> MethodPolicy:
        """What holds for one method, or for all that a pattern names: `"/shop.Orders/Get"`."""
        found = MethodPolicy().over(self)
        for pattern in sorted(self.methods, key=specificity):
            if matches(pattern, method):
                found = self.methods[pattern].over(found)
        return found
