"""What a kit is in both worlds: one policy, one timer, the queues of the calls that it parked."""

from __future__ import annotations

import inspect
from functools import wraps
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, Protocol, Self, TypeVar

from rpcwheel.interceptors.policy import CallPolicy

from .config import PREFIX, policy_from_env, policy_from_file

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator, Mapping
    from datetime import timedelta

    from rpcwheel.deadline.policy import DeadlinePolicy, RetryPolicy
    from rpcwheel.failback.core import FailbackStats
    from rpcwheel.failback.policy import FailbackPolicy
    from rpcwheel.interceptors.policy import FailsafePolicy, MethodPolicy
    from rpcwheel.timer.api import Timer

__all__ = ["KitBase"]


class Queues(Protocol):
    """What the queues of both worlds have."""

    @property
    def pending(self) -> int:
        """How many calls wait."""

    def stats(self) -> dict[str, FailbackStats]:
        """Count by queue."""


Q = TypeVar("Q", bound=Queues)
P = ParamSpec("P")


def _in_our_words(init: Callable[P, None]) -> Callable[P, None]:
    """A constructor that says what a setting is that it does not know."""
    known = inspect.signature(init).parameters

    @wraps(init)
    def checking(*args: P.args, **settings: P.kwargs) -> None:
        if len(args) > 1:
            raise TypeError(f"settings are given by name: timeout=2.0, for one; not {args[1]!r}")
        if not settings.keys() <= known.keys():
            rest: dict[str, Any] = {name: settings[name] for name in settings if name != "timer"}
            CallPolicy(**rest)  # raises, with the nearest that there is
        init(*args, **settings)

    return checking


class KitBase(Generic[Q]):
    """All but what makes and what waits."""

    @_in_our_words
    def __init__(
        self,
        *,
        timeout: float | timedelta | DeadlinePolicy | None = None,
        retry: RetryPolicy | None = None,
        failsafe: FailsafePolicy | None = None,
        failback: FailbackPolicy | None = None,
        idempotent: bool = False,
        methods: Mapping[str, MethodPolicy] | None = None,
        timer: Timer | None = None,
    ) -> None:
        """Check the settings; nothing runs before the first call.

        Args:
            timeout: Seconds for each call, all attempts included, or a `DeadlinePolicy`.
            retry: Which failed calls are made again within their deadline.
            failsafe: Which failed calls are logged and answered with a default.
            failback: Which failed calls are answered with a default and delivered later.
            idempotent: Whether every method may be carried out twice; better said for some.
            methods: What holds for some methods instead, by pattern: `"/shop.Orders/Get*"`.
            timer: Any rpcwheel timer; None takes `shared_timer()` when one is needed.

        Raises:
            ConfigurationError: A setting is unknown or out of range, or contradicts another or this
                world.
            TypeError: A setting is of a wrong type.
        """
        policy = CallPolicy(
            timeout=timeout,
            retry=retry,
            failsafe=failsafe,
            failback=failback,
            idempotent=idempotent,
            methods={} if methods is None else methods,
        )
        self._begin(policy, timer)

    @classmethod
    def of(cls, policy: CallPolicy, *, timer: Timer | None = None) -> Self:
        """Make a kit of a policy that was made elsewhere.

        Raises:
            TypeError: `policy` is no `CallPolicy`.
        """
        if not isinstance(policy, CallPolicy):
            raise TypeError(
                f"policy must be a CallPolicy, not {policy!r}; {cls.__name__}(...) takes its "
                "settings by name"
            )
        kit = cls.__new__(cls)
        kit._begin(policy, timer)  # noqa: SLF001 - its own
        return kit

    @classmethod
    def from_file(cls, path: str | os.PathLike[str], *, timer: Timer | None = None) -> Self:
        """Make a kit of the settings in a TOML or YAML file (YAML needs `rpcwheel[config]`).

        Raises:
            ConfigurationError: The file can't be read, or settings in it are wrong; the message
                names the file and each place.
        """
        return cls.of(policy_from_file(path), timer=timer)

    @classmethod
    def from_env(cls, prefix: str = PREFIX, *, timer: Timer | None = None) -> Self:
        """Make a kit of the environment's settings, over those of the file that CONFIG names.

        Args:
            prefix: How the names of the variables begin: `RPCWHEEL_CONFIG=shop.toml`,
                `RPCWHEEL_TIMEOUT=2.0`, `RPCWHEEL_RETRY__ON=["UNAVAILABLE"]`.
            timer: As in the constructor.

        Raises:
            ConfigurationError: A variable that begins so is no setting, or is wrong.
        """
        return cls.of(policy_from_env(prefix), timer=timer)

    def _begin(self, policy: CallPolicy, timer: Timer | None) -> None:
        self._policy = policy
        self._timer = timer
        self._queues = self._make_queues()

    def _make_queues(self) -> Q:
        raise NotImplementedError

    @property
    def policy(self) -> CallPolicy:
        """All settings. Immutable."""
        return self._policy

    @property
    def pending(self) -> int:
        """How many parked calls wait to be delivered."""
        return self._queues.pending

    def stats(self) -> dict[str, FailbackStats]:
        """Count what has become of every parked call, by queue."""
        return self._queues.stats()

    def __repr__(self) -> str:
        settings = ", ".join(self._switched_on()) or "nothing switched on"
        return f"<{type(self).__module__}.{type(self).__name__}: {settings}>"

    def _switched_on(self) -> Iterator[str]:
        """The names of the settings, not what is in them: a default may be anything."""
        for name in ("timeout", "retry", "failsafe", "failback", "idempotent"):
            if getattr(self._policy, name):
                yield name
        if self._policy.methods:
            yield f"methods {', '.join(self._policy.methods)}"
