"""One decorator for functions, methods and coroutine functions.

It guesses the world, which the rest of the room never does: a coroutine function gets the aio
twin's invoker, any other function the sync twin's. A plain function that turns out to return
something to await (a grpc.aio call) is from then on treated as a coroutine function.
"""

from __future__ import annotations

import functools
import inspect
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Final,
    Generic,
    Literal,
    ParamSpec,
    Protocol,
    Self,
    TypeVar,
    overload,
)

from rpcwheel.errors import ConfigurationError
from rpcwheel.timer.clock import checked_timer

from . import aio, sync
from .entry import label_of
from .policy import FailbackPolicy

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Generator
    from concurrent.futures import Future

    from tenacity.stop import StopBaseT
    from tenacity.wait import WaitBaseT

    from rpcwheel.durations import Duration
    from rpcwheel.timer.api import Timer

    from .entry import Call, FailedCall

__all__ = ["with_failback"]

P = ParamSpec("P")
Q = ParamSpec("Q")
R = TypeVar("R")
D = TypeVar("D")
R_co = TypeVar("R_co", covariant=True)
H_co = TypeVar("H_co", covariant=True)


class Guarded(Protocol[P, R_co, H_co]):
    """A decorated function: called as before, with its queue as `failback`."""

    @property
    def failback(self) -> H_co:
        """The queue of this function: `pending`, `flush`, `close`, `stats`."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co: ...

    @overload
    def __get__(self, instance: None, owner: type) -> Guarded[P, R_co, H_co]: ...
    @overload
    def __get__(
        self: Guarded[Concatenate[Any, Q], R_co, H_co], instance: object, owner: type | None = None
    ) -> Guarded[Q, R_co, H_co]: ...


class _Unsaid(int):
    """The default of `max_attempts`, to be distinguished from a 4 that the user gave."""


_MAX_ATTEMPTS: Final = _Unsaid(4)
_MISSING: Final = object()


@overload
def with_failback(
    *,
    retry_on: object,
    max_attempts: int | None = ...,
    backoff: Duration | WaitBaseT = ...,
    stop: StopBaseT | None = ...,
    default: None = None,
    max_pending: int = ...,
    timer: Timer | None = ...,
    journal: None = ...,
    name: str | None = ...,
    overflow: Literal["raise", "drop"] = ...,
    dead_letter: Callable[[FailedCall], object] | None = ...,
) -> _Decorator[None]: ...
@overload
def with_failback(
    *,
    retry_on: object,
    max_attempts: int | None = ...,
    backoff: Duration | WaitBaseT = ...,
    stop: StopBaseT | None = ...,
    default: D,
    max_pending: int = ...,
    timer: Timer | None = ...,
    journal: None = ...,
    name: str | None = ...,
    overflow: Literal["raise", "drop"] = ...,
    dead_letter: Callable[[FailedCall], object] | None = ...,
) -> _Decorator[D]: ...
def with_failback(
    bare: object = None,
    /,
    *,
    retry_on: object = _MISSING,
    max_attempts: int | None = _MAX_ATTEMPTS,
    backoff: Duration | WaitBaseT = 5.0,
    stop: StopBaseT | None = None,
    default: object = None,
    max_pending: int = 100,
    timer: Timer | None = None,
    journal: object = None,
    name: str | None = None,
    overflow: Literal["raise", "drop"] = "raise",
    dead_letter: Callable[[FailedCall], object] | None = None,
) -> object:
    """Decorate a function so that calls of it that fail are made again, until they arrive.

    A call is tried once, at once. If it fails in a way that `retry_on` names, it is queued, the
    caller gets `default`, and the call is tried again in the background. Any other error is raised.
    The queue is the function's own (the methods of all instances share it), at its `failback`::

        @with_failback(retry_on=grpc.StatusCode.UNAVAILABLE, max_attempts=9)
        def audit(event): return stub.Push(event, timeout=2.0)

        audit(event)              # the answer, or None if it was queued
        audit.failback.pending    # how many are queued
        audit.failback.close()    # tries again for 5 s, and returns what was not delivered

    Args:
        bare: Nothing: the decorator is always written with settings.
        retry_on: Which failures: exception types, gRPC status codes or their names, predicates,
            tenacity `retry_if_*` objects, or a set of these. Has no default: what may be made
            twice, only you know.
        max_attempts: How many attempts a call gets, the first one included. None: no limit. If
            `stop` is given and this is not, `stop` alone decides.
        backoff: The wait before each retry: seconds, a `timedelta`, or a tenacity `wait_*` object.
        stop: A tenacity `stop_*` object.
        default: What the caller of a queued call gets.
        max_pending: How many calls may be queued or in retry.
        timer: Any rpcwheel timer; None takes `shared_timer()` when the first call is queued.
        journal: Must be None: journals that outlive the process are not in this release.
        name: For events and logs; None takes the function's.
        overflow: "raise" `FailbackFull`, or "drop" the call, with an event and an error log.
        dead_letter: Called as `dead_letter(failed_call)` after the last retry.

    Returns:
        A decorator. What it returns is called like the function. If the function returns a future
        (grpc's or `concurrent.futures`'), the caller gets a `concurrent.futures.Future`; if it
        returns something to await, a task; both end with the result, `default` or the error.

    Raises:
        ConfigurationError: `retry_on` is missing, a value out of range, or `journal` given.
        TypeError: A value is of a wrong type, or what is decorated cannot be made again: no
            callable, a generator function, a classmethod or staticmethod object.
    """
    if bare is not None:
        raise TypeError("with_failback needs its settings first: @with_failback(retry_on=...)")
    if journal is not None:
        raise ConfigurationError(
            "journal must be None: durable journals are not in this release, queued calls live in "
            "memory; close() and dead_letter hand over what was not delivered"
        )
    settings: dict[str, Any] = {
        "backoff": backoff,
        "stop": stop,
        "default": default,
        "max_pending": max_pending,
        "name": name,
        "overflow": overflow,
        "dead_letter": dead_letter,
    }
    if retry_on is not _MISSING:
        settings["retry_on"] = retry_on
    if max_attempts is not _MAX_ATTEMPTS:
        settings["max_attempts"] = max_attempts
    return _Decorator(FailbackPolicy(**settings), timer)


class _Decorator(Generic[D]):
    """What `with_failback` returns. Each function that it decorates gets a queue of its own."""

    def __init__(self, policy: FailbackPolicy, timer: Timer | None) -> None:
        self._policy = policy
        self._timer = checked_timer(timer)

    @overload  # a coroutine function is also a function: the first that fits counts
    def __call__(  # type: ignore[overload-overlap]
        self, function: Callable[P, Coroutine[Any, Any, R]], /
    ) -> Guarded[P, Coroutine[Any, Any, R | D], aio.FailbackInvoker]: ...
    @overload
    def __call__(  # type: ignore[overload-overlap]
        self, function: Callable[P, Awaitable[R]], /
    ) -> Guarded[P, Awaitable[R | D], aio.FailbackInvoker]: ...
    @overload
    def __call__(
        self, function: Callable[P, Future[R]], /
    ) -> Guarded[P, Future[R | D], sync.FailbackInvoker]: ...
    @overload
    def __call__(self, function: Callable[P, R], /) -> Guarded[P, R | D, sync.FailbackInvoker]: ...
    def __call__(self, function: Callable[..., Any], /) -> Any:
        """Give `function` a queue of its own."""
        _check(function)
        policy = self._policy
        if policy.name is None:
            policy = policy.model_copy(update={"name": label_of(function)})
        if _is_coroutine_function(function):
            return _guard_coroutine_function(
                function, aio.FailbackInvoker(policy, timer=self._timer)
            )
        return _guard_function(function, _EitherInvoker(policy, timer=self._timer))


def _guard_coroutine_function(
    function: Callable[..., Any], failback: aio.FailbackInvoker
) -> Callable[..., Any]:
    @functools.wraps(function)
    async def guarded(*args: Any, **kwargs: Any) -> Any:
        return await failback.invoke(function, *args, **kwargs)

    guarded.failback = failback  # type: ignore[attr-defined]
    return guarded


def _guard_function(
    function: Callable[..., Any], failback: sync.FailbackInvoker
) -> Callable[..., Any]:
    @functools.wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        return failback.invoke(function, *args, **kwargs)

    guarded.failback = failback  # type: ignore[attr-defined]
    return guarded


class _Left(list[Any]):
    """What a `close` returns before it is known whether it should have been awaited: both work."""

    def __await__(self) -> Generator[None, None, list[Any]]:
        yield from ()
        return self


class _EitherInvoker(sync.FailbackInvoker):
    """A sync invoker that goes over to awaiting when its function returns something to await."""

    _awaits = False

    def invoke(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        if self._awaits:
            return aio.begin(self._ledger, function, args, kwargs)
        return super().invoke(function, *args, **kwargs)

    def _await(self, result: Any, call: Call, started_ns: int) -> Any:
        self._awaits = True
        return aio.follow(self._ledger, lambda: result, call, started_ns)

    def flush(self, timeout: Duration | None = None) -> Any:
        return aio.flush(self._ledger, timeout) if self._awaits else super().flush(timeout)

    def close(self, drain_timeout: Duration = 5.0) -> Any:
        if self._awaits:
            return aio.close(self._ledger, drain_timeout)
        return _Left(super().close(drain_timeout))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await aio.close(self._ledger, 5.0)


def _is_coroutine_function(function: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004 - an object with `async def __call__`
    )


def _check(function: object) -> None:
    """Refuse what cannot be called a second time to the same effect."""
    if isinstance(function, (classmethod, staticmethod)):
        kind = type(function).__name__
        raise TypeError(f"write @{kind} above @with_failback(...), not below it")
    if not callable(function):
        raise TypeError(f"with_failback decorates functions, not {function!r}")
    parts = [function, getattr(function, "__call__", None)]  # noqa: B004 - see above
    if any(map(inspect.isgeneratorfunction, parts)) or any(map(inspect.isasyncgenfunction, parts)):
        raise TypeError(
            f"{label_of(function)} is a generator function: what it has yielded cannot be taken "
            "back, so it cannot be tried again; collect the items in a function that returns them"
        )
