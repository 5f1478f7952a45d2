"""What a user may set for calls: one policy for all of them, and others for some methods."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Annotated, Any, Final, NoReturn, Self

from pydantic import (
    AfterValidator,
    Field,
    StrictBool,
    field_validator,
    model_validator,
)

from rpcwheel.deadline.policy import DeadlinePolicy, RetryPolicy, beyond
from rpcwheel.errors import ConfigurationError
from rpcwheel.failback.matching import WANTED, Matcher
from rpcwheel.failback.policy import FailbackPolicy
from rpcwheel.methods import MethodPattern, matches, overlap, specificity
from rpcwheel.policy import Policy, checked, or_short

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = ["CallPolicy", "FailsafePolicy", "MethodPolicy", "checked_calls"]


ANY_METHOD: Final = frozenset({"UNAVAILABLE"})
"""A retry after these codes is often set for all calls at once, in a file or in the environment, so
it is accepted before a method is marked idempotent. It has no effect until then."""


class FailsafePolicy(Policy):
    """Which failures are logged and answered with a default (Dubbo's failsafe)."""

    on: Any = Field(description=WANTED)
    """As for failback: exception types, status codes, predicates, or a set, tuple or list."""

    default: Any = None
    """What the caller gets: this very object. For a response stream, its messages in a sequence;
    None is an empty stream."""

    @field_validator("on")
    @classmethod
    def _check_on(cls, on: object) -> object:
        checked(Matcher, on)
        return on


class MethodPolicy(Policy):
    """What holds for the calls of some methods. What is not given comes from a more general one.

    None switches off what a more general policy has switched on.
    """

    timeout: Annotated[DeadlinePolicy | None, or_short(DeadlinePolicy)] = None
    """A number of seconds, a `timedelta`, or a `DeadlinePolicy`. What a `DeadlinePolicy` does not
    set comes from the more general one, as far as the call lasts long enough for it."""

    retry: RetryPolicy | None = None
    """Retry a call that failed, within its deadline, if its method is `idempotent`. Replaces the
    more general one as a whole, as `failsafe` and `failback` do."""

    failsafe: FailsafePolicy | None = None
    """Answer a call that has failed for good with a default, and log it."""

    failback: FailbackPolicy | None = None
    """Answer a call that has failed for good with a default, and deliver it in the background.
    Replaces a more general `failsafe` too, and `failsafe` a more general `failback`. It also
    switches off a more general `retry`, so that the caller is answered after the first attempt."""

    idempotent: StrictBool = False
    """Whether a server may execute a call twice without harm. Only methods marked `idempotent` are
    retried. Failback does not look at it: it delivers at least once."""

    if TYPE_CHECKING:  # what may be given is more than what is kept

        def __init__(
            self,
            *,
            timeout: float | timedelta | DeadlinePolicy | None = None,
            retry: RetryPolicy | None = None,
            failsafe: FailsafePolicy | None = None,
            failback: FailbackPolicy | None = None,
            idempotent: bool = False,
        ) -> None: ...

    @model_validator(mode="after")
    def _one_answer(self) -> Self:
        if self.failsafe is not None and self.failback is not None:
            raise ConfigurationError(
                "failsafe and failback both answer a call that failed: failsafe forgets it, "
                "failback delivers it later; choose one"
            )
        return self

    def over(self, general: MethodPolicy) -> MethodPolicy:
        """This policy, with all that it does not set taken from `general`. Never raises."""
        given, base = self._given(), general._given()
        if given.get("timeout") is not None:
            given["timeout"] = given["timeout"].over(base.get("timeout"))
        for one, other in (("failsafe", "failback"), ("failback", "failsafe")):
            if given.get(one) is not None:
                base.pop(other, None)
        if given.get("failback") is not None:
            base.pop("retry", None)  # failback answers at once
        return MethodPolicy(**base | given)

    def _given(self) -> dict[str, Any]:
        """What was set, of that which may be set for a method."""
        names = self.model_fields_set & set(MethodPolicy.model_fields)
        return {name: getattr(self, name) for name in names}


class FixedDict(dict[str, MethodPolicy]):
    """A dict that stays as it was made."""

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise TypeError("a policy does not change; make another one")

    __setitem__ = __delitem__ = __ior__ = _refuse
    clear = pop = popitem = setdefault = update = _refuse

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (dict(self),)


class CallPolicy(MethodPolicy):
    """What holds for all calls, and for those of some methods.

    Example::

        CallPolicy(
            timeout=2.0,
            retry=RetryPolicy(on={"UNAVAILABLE"}),  # of the methods marked idempotent
            methods={
                "/shop.Orders/Get*": MethodPolicy(idempotent=True),
                "/shop.Audit/*": MethodPolicy(failback=FailbackPolicy(on="UNAVAILABLE")),
            },
        )
    """

    methods: Annotated[dict[MethodPattern, MethodPolicy], AfterValidator(FixedDict)] = Field(
        default_factory=FixedDict
    )
    """By pattern: `"/shop.Orders/Get"`, `"/shop.Orders/*"`, `"*"`. Where several match, each
    setting is taken from the most specific that has it: a name in full before all patterns, then
    the one with most characters beside `*`, then the later one."""

    if TYPE_CHECKING:  # as above

        def __init__(
            self,
            *,
            timeout: float | timedelta | DeadlinePolicy | None = None,
            retry: RetryPolicy | None = None,
            failsafe: FailsafePolicy | None = None,
            failback: FailbackPolicy | None = None,
            idempotent: bool = False,
            methods: Mapping[str, MethodPolicy] = ...,
        ) -> None: ...

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        wrong = list(dict.fromkeys(self._contradictions()))
        if wrong:
            raise ConfigurationError("; ".join(wrong))
        return self

    def of(self, method: str) -> MethodPolicy:
        """What holds for one method, or for all that a pattern names: `"/shop.Orders/Get"`."""
        found = MethodPolicy().over(self)
        for pattern in self._by_rank():
            if matches(pattern, method):
                found = self.methods[pattern].over(found)
        return found

    def _by_rank(self) -> list[str]:
        """The patterns, those that give way first."""
        return sorted(self.methods, key=specificity)  # stable: of equals, the later one wins

    def _contradictions(self) -> Iterator[str]:
        """What can't be meant so. Only what was written in one place is held against it."""
        for said in _disagreements(self, self):
            yield said
        if self._in_vain("*", self, self):
            yield f"retry: {_unsafe(self)}"
        for pattern, own in self.methods.items():
            effective = self.of(pattern)
            where = f'methods["{pattern}"]'
            for said in _disagreements(own, effective):
                yield f"{where}.{said}"
            if self._in_vain(pattern, own, effective):
                yield f"{where}.retry: {_unsafe(own)}"

    def _in_vain(self, pattern: str, own: MethodPolicy, effective: MethodPolicy) -> bool:
        """Whether a retry is set here, and none of the methods that it is for is idempotent."""
        retry = own.retry
        if retry is None or effective.idempotent or retry.on & ANY_METHOD:
            return False
        ranks = {name: rank for rank, name in enumerate(self._by_rank())}
        here = -1 if own is self else ranks[pattern]
        for other, policy in self.methods.items():
            above = ranks[other] > here
            wins = above or "idempotent" not in own.model_fields_set
            keeps = not above or (
                "retry" not in policy.model_fields_set and policy.failback is None
            )
            if policy.idempotent and wins and keeps and overlap(pattern, other):
                return False
        return True


def _disagreements(own: MethodPolicy, effective: MethodPolicy) -> Iterator[str]:
    """What in `own` can't be, as the calls end after the effective timeout."""
    whole = None if effective.timeout is None else effective.timeout.timeout
    if own.timeout is not None:
        for said in own.timeout.never_reached(whole):
            yield f"timeout: {said}"
    if own.retry is None or own.retry.attempts == 1:
        return
    for name in ("attempt_timeout", "wait"):
        part = getattr(own.retry, name)
        if isinstance(part, (int, float, timedelta)) and beyond(part, whole):
            yield (
                f"retry: {name} ({part}) leaves no time for another attempt, as timeout ({whole}) "
                "holds for all attempts together; give less, or leave it out"
            )


def _unsafe(policy: MethodPolicy) -> str:
    codes = ", ".join(sorted(policy.retry.on)) if policy.retry else ""
    return (
        f"calls that failed with {codes} may have been carried out, so only idempotent methods are "
        "tried again after them, and none that this is for is marked so; say which are: "
        'methods={"/shop.Orders/Get*": MethodPolicy(idempotent=True)}'
    )


def checked_calls(policy: CallPolicy) -> CallPolicy:
    """Give it back.

    Raises:
        TypeError: It is none.
    """
    given: object = policy
    if not isinstance(given, CallPolicy):
        raise TypeError(
            f"policy must be a CallPolicy, such as CallPolicy(timeout=2.0), not {given!r}"
        )
    return given
