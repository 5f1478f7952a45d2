"""`with_failback`: failback as a decorator of functions, methods and coroutine functions.

A coroutine function gets the invoker of `aio.py`, any other function that of `sync.py`. A plain
function that returns an awaitable (a grpc.aio call) is treated as a coroutine function from then
on.
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
    TypedDict,
    TypeVar,
    Unpack,
    overload,
)

from rpcwheel.errors import ConfigurationError
from rpcwheel.timer.clock import checked_timer

from . import aio, sync
from .policy import FailbackPolicy
from .queued_call import SavedCall, label_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Generator
    from concurrent.futures import Future

    from tenacity.stop import StopBaseT
    from tenacity.wait import WaitBaseT

    from rpcwheel.durations import Duration
    from rpcwheel.timer.api import Timer

    from .queued_call import FailedCall

__all__ = ["with_failback"]

P = ParamSpec("P")
Q = ParamSpec("Q")
R = TypeVar("R")
D = TypeVar("D")
R_co = TypeVar("R_co", covariant=True)
H_co = TypeVar("H_co", covariant=True)


class FailbackFunction(Protocol[P, R_co, H_co]):
    """A decorated function: called as before, with its queue as `failback`."""

    @property
    def failback(self) -> H_co:
        """The invoker of this function: `pending`, `entries`, `stats`, `flush`, `close`."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co: ...

    @overload
    def __get__(self, instance: None, owner: type) -> FailbackFunction[P, R_co, H_co]: ...
    @overload
    def __get__(
        self: FailbackFunction[Concatenate[Any, Q], R_co, H_co],
        instance: object,
        owner: type | None = None,
    ) -> FailbackFunction[Q, R_co, H_co]: ...


class _Settings(TypedDict, total=False):
    """What `with_failback` takes besides `retry_on` and `default`."""

    max_attempts: int | None
    backoff: Duration | WaitBaseT
    stop: StopBaseT | None
    max_pending: int
    timer: Timer | None
    journal: None
    name: str | None
    overflow: Literal["raise", "drop"]
    dead_letter: Callable[[FailedCall], object] | None


class _DefaultMaxAttempts(int):
    """The default of `max_attempts`, to be distinguished from a 4 that the user gave."""


_MAX_ATTEMPTS: Final = _DefaultMaxAttempts(4)
_MISSING: Final = object()


@overload
def with_failback(
    *, retry_on: object, default: None = None, **settings: Unpack[_Settings]
) -> _Decorator[None]: ...
@overload
def with_failback(
    *, retry_on: object, default: D, **settings: Unpack[_Settings]
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
    """Decorate a function so that failed calls of it are retried in the background.

    The first attempt is made at once. If it fails with an error that `retry_on` names, the call is
    queued, the caller gets `default`, and the call is attempted again in the background. Any other
    error is raised. Each function has a queue of its own (shared by the methods of all instances),
    as its attribute `failback`::

        @with_failback(retry_on=grpc.StatusCode.UNAVAILABLE, max_attempts=9)
        def audit(event): return stub.Push(event, timeout=2.0)

        audit(event)              # the response, or None if the call was queued
        audit.failback.pending    # how many calls are queued
        audit.failback.entries()  # which ones, and when each is attempted again
        audit.failback.close()    # retries for 5 s, and returns the calls not delivered by then

    Args:
        bare: Nothing: the decorator is always written with settings.
        retry_on: Exception types, gRPC status codes or their names, predicates, tenacity
            `retry_if_*` objects, or a set of these. It has no default: only you know what may be
            executed twice.
        max_attempts: How many attempts a call gets, the first one included. None: no limit. If
            `stop` is given and this is not, `stop` alone decides.
        backoff: The wait before each further attempt: seconds, a `timedelta`, or a tenacity
            `wait_*` object.
        stop: A tenacity `stop_*` object.
        default: What the caller of a queued call gets.
        max_pending: How many calls may be queued at once.
        timer: Any rpcwheel timer; None takes `shared_timer()` when the first call is queued.
        journal: Must be None: this release has no durable journal.
        name: For events and logs; None takes the function's.
        overflow: If `max_pending` calls are queued: "raise" `FailbackFull`, or "drop" the call,
            with an event and an error log.
        dead_letter: Called as `dead_letter(failed_call)` with each call that is given up.

    Returns:
        A decorator. The decorated function is called like the function. If the function returns a
        future (grpc's or `concurrent.futures`'), the caller gets a `concurrent.futures.Future`; if
        it returns an awaitable, a task. Both have the function's result, `default`, or the error.

    Raises:
        ConfigurationError: `retry_on` is missing, a value out of range, or `journal` given.
        TypeError: A value is of a wrong type. Or what is decorated cannot be called again to the
            same effect: no callable, a generator function, a classmethod or staticmethod object.
    """
    if bare is not None:
        raise TypeError("with_failback needs its settings first: @with_failback(retry_on=...)")
    if journal is not None:
        raise ConfigurationError(
            "journal must be None: durable journals are not in this release, queued calls are kept "
            "in memory; close() returns, and dead_letter gets, the calls that were not delivered"
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
    """What `with_failback` returns. Each decorated function gets a queue of its own."""

    def __init__(self, policy: FailbackPolicy, timer: Timer | None) -> None:
        self._policy = policy
        self._timer = checked_timer(timer)

    @overload  # a coroutine function is also a function: the first that fits counts
    def __call__(  # type: ignore[overload-overlap]
        self, function: Callable[P, Coroutine[Any, Any, R]], /
    ) -> FailbackFunction[P, Coroutine[Any, Any, R | D], aio.FailbackInvoker]: ...
    @overload
    def __call__(  # type: ignore[overload-overlap]
        self, function: Callable[P, Awaitable[R]], /
    ) -> FailbackFunction[P, Awaitable[R | D], aio.FailbackInvoker]: ...
    @overload
    def __call__(
        self, function: Callable[P, Future[R]], /
    ) -> FailbackFunction[P, Future[R | D], sync.FailbackInvoker]: ...
    @overload
    def __call__(
        self, function: Callable[P, R], /
    ) -> FailbackFunction[P, R | D, sync.FailbackInvoker]: ...
    def __call__(self, function: Callable[..., Any], /) -> Any:
        """Give `function` a queue of its own."""
        _check(function)
        policy = self._policy
        if policy.name is None:
            policy = policy.model_copy(update={"name": label_of(function)})
        invoker: Any
        if _is_coroutine_function(function):
            invoker = aio.FailbackInvoker(policy, timer=self._timer)

            async def invoke_aio(*args: Any, **kwargs: Any) -> Any:
                return await invoker.invoke(function, *args, **kwargs)

            decorated: Any = functools.wraps(function)(invoke_aio)
        else:
            invoker = _EitherInvoker(policy, timer=self._timer)

            def invoke(*args: Any, **kwargs: Any) -> Any:
                return invoker.invoke(function, *args, **kwargs)

            decorated = functools.wraps(function)(invoke)
        decorated.failback = invoker
        return decorated


class _EitherInvoker(sync.FailbackInvoker):
    """A sync invoker that becomes one for coroutines when its function returns an awaitable."""

    _awaits = False

    def invoke(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        if not self._awaits:
            return super().invoke(function, *args, **kwargs)
        started_ns = self._queue.now_ns()
        try:
            result = function(*args, **kwargs)
        except Exception as error:  # noqa: BLE001 - raised where the result is awaited
            result = _raise(error)
        return self._await(result, SavedCall.save(function, args, kwargs), started_ns)

    def _await(self, result: Any, call: SavedCall, started_ns: int) -> Any:
        self._awaits = True
        return aio.follow(self._queue, result, call, started_ns)

    def flush(self, timeout: Duration | None = None) -> Any:
        return aio.flush(self._queue, timeout) if self._awaits else super().flush(timeout)

    def close(self, drain_timeout: Duration = 5.0) -> Any:
        if self._awaits:
            return aio.close(self._queue, drain_timeout)
        return _AwaitableList(super().close(drain_timeout))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await aio.close(self._queue, 5.0)


class _AwaitableList(list[Any]):
    """The result of a `close` before the first call has shown whether `close` must be awaited."""

    def __await__(self) -> Generator[None, None, list[Any]]:
        yield from ()
        return self


async def _raise(error: Exception) -> None:
    raise error


def _is_coroutine_function(function: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004 - an object with `async def __call__`
    )


def _check(function: object) -> None:
    """Raise TypeError for what cannot be called a second time to the same effect."""
    if isinstance(function, (classmethod, staticmethod)):
        kind = type(function).__name__
        raise TypeError(f"write @{kind} above @with_failback(...), not below it")
    if not callable(function):
        raise TypeError(f"with_failback decorates functions, not {function!r}")
    parts = [function, getattr(function, "__call__", None)]  # noqa: B004 - see above
    if any(map(inspect.isgeneratorfunction, parts)) or any(map(inspect.isasyncgenfunction, parts)):
        raise TypeError(
            f"{label_of(function)} is a generator function: what it has yielded cannot be taken "
            "back, so it cannot be retried; collect the items in a function that returns them"
        )
