"""`with_failback`: failback as a decorator of functions, methods and coroutine functions.

Failback: a failed call is queued, its caller gets a default response, and the call is retried in
the background. A `FailbackInvoker` makes the calls of a function and owns their queue. A coroutine
function gets the invoker of `aio.py`, any other function that of `sync.py`. A plain function that
returns an awaitable (a grpc.aio call) is treated as a coroutine function from its first awaitable
result on.
"""

from __future__ import annotations

import functools
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
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

from rpcwheel._concurrency.loop import running_loop
from rpcwheel.call.failback_policy import FailbackPolicy
from rpcwheel.errors import is_coroutine_function, is_generator_function
from rpcwheel.timer.manual import checked_timer

from . import aio, sync
from .queued_call import SavedCall, label_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Generator
    from concurrent.futures import Future

    from tenacity.stop import StopBaseT
    from tenacity.wait import WaitBaseT

    from rpcwheel.call.failback_policy import FailedCall
    from rpcwheel.durations import Duration
    from rpcwheel.timer.api import Timer

P = ParamSpec("P")
Q = ParamSpec("Q")
R = TypeVar("R")
DefaultT = TypeVar("DefaultT")
R_co = TypeVar("R_co", covariant=True)
InvokerT_co = TypeVar("InvokerT_co", covariant=True)


class FailbackFunction(Protocol[P, R_co, InvokerT_co]):
    """A decorated function: called as before, with its invoker as `failback`."""

    @property
    def failback(self) -> InvokerT_co:
        """The invoker, which owns the queue: `pending`, `entries`, `stats`, `flush`, `close`."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co:
        """Call the function; see `with_failback`."""

    @overload
    def __get__(self, instance: None, owner: type) -> FailbackFunction[P, R_co, InvokerT_co]: ...
    @overload
    def __get__(
        self: FailbackFunction[Concatenate[Any, Q], R_co, InvokerT_co],
        instance: object,
        owner: type | None = None,
    ) -> FailbackFunction[Q, R_co, InvokerT_co]: ...


class _Settings(TypedDict, total=False):
    """The settings of `FailbackPolicy` that functions have, besides `retry_on` and `default`."""

    max_attempts: int | None
    backoff: Duration | WaitBaseT
    stop: StopBaseT | None
    max_pending: int
    overflow: Literal["raise", "drop"]
    rate: float | None
    max_in_flight: int | None
    name: str | None
    journal: str | None
    max_age: Duration
    order_key: str | Callable[..., str | None] | None
    dead_letter: Callable[[FailedCall], object] | None


@overload
def with_failback(
    *,
    retry_on: object,
    default: None = None,
    timer: Timer | None = None,
    **settings: Unpack[_Settings],
) -> _Decorator[None]: ...
@overload
def with_failback(
    *,
    retry_on: object,
    default: DefaultT,
    timer: Timer | None = None,
    **settings: Unpack[_Settings],
) -> _Decorator[DefaultT]: ...
def with_failback(
    bare: object = None,  # the function, if the decorator is used without parentheses: an error
    /,
    *,
    timer: Timer | None = None,
    **settings: Any,
) -> object:
    """Decorate a function so that failed calls of it are retried in the background.

    The first attempt is made at once. If it fails with an error that `retry_on` names, the call is
    queued, the caller gets `default`, and the call is attempted again in the background. Any other
    error is raised. Each function has a queue of its own; a method has one for all instances. The
    attribute `failback` is the `FailbackInvoker` that owns the queue::

        @with_failback(retry_on=grpc.StatusCode.UNAVAILABLE, max_attempts=9)
        def audit(event): return stub.Push(event, timeout=2.0)

        audit(event)              # the response, or None if the call was queued
        audit.failback.pending    # how many calls are queued
        audit.failback.entries()  # which ones, and when each is attempted again
        audit.failback.close()    # retries for 5 s, and returns the calls that have not succeeded

    Protobuf messages among the arguments are copied when the function has returned or raised. Do
    not change other arguments while the call is queued.

    Args:
        bare: Not for users; only settings by name are allowed.
        timer: Any rpcwheel timer; None takes `shared_timer()` when the first call is queued.
        **settings: Those of `FailbackPolicy` but `metadata` and `target`, with its defaults:
        retry_on: Exception types, gRPC status codes or their names, predicates, tenacity
            `retry_if_*` objects, or a set, tuple or list of these. It has no default: only you
            know what may be executed twice.
        max_attempts: How many attempts a call gets, the first one included; 4 by default. None: no
            limit. If `stop` is given and this is not, `stop` alone decides.
        backoff: The wait before each further attempt: seconds or a `timedelta`, of which half is
            random, or a tenacity `wait_*` object, such as `wait_fixed(5)` for an exact wait; 5.0 by
            default.
        stop: A tenacity `stop_*` object.
        default: What the caller of a queued call gets; None by default.
        max_pending: How many calls may be queued at once; 100 by default, 1,000,000 with a journal.
        overflow: What happens if a call fails while `max_pending` calls are queued. "raise", the
            default: `FailbackFull` is raised, chained to the call's error. "drop": the caller gets
            `default`, and the call is discarded, with an event and an error log.
        rate: The largest number of attempts of queued calls a second; None: no limit.
        max_in_flight: The largest number of such attempts at a time; None: it follows the latency.
        name: For events and logs; None takes the function's.
        journal: The URL of a journal, in which failed calls survive the process:
            `"sqlite:///var/lib/shop/failback.db"`. Then `max_attempts` has no default, pydantic
            must be able to write the arguments as JSON, and calls that an earlier process has left
            are delivered from the first call of the function on, or from `failback.start()`. None:
            the queue is in memory.
        max_age: With a journal: seconds after which a call is given up; a day by default.
        order_key: With a journal: the name of the argument, or a function of the arguments, whose
            value calls have in common that are delivered in order.
        dead_letter: Called as `dead_letter(failed_call)` with each call that is given up.

    Returns:
        A decorator. The decorated function is called like the function. If the function returns a
        future (grpc's or `concurrent.futures`'), the caller gets a `concurrent.futures.Future`; if
        it returns an awaitable, a task. Both have the function's result, `default`, or the error.

    Raises:
        ConfigurationError: `retry_on` is missing, a setting is unknown, a value is out of range, or
            with a journal an argument of the function cannot be stored.
        TypeError: A value is of a wrong type. Or the decorated object can't be called a second
            time with the same effect: it is not callable, or a generator function, or a
            classmethod or staticmethod object.
    """
    if bare is not None:
        raise TypeError("with_failback needs its settings first: @with_failback(retry_on=...)")
    for other in ("metadata", "target"):
        if other in settings:
            raise TypeError(
                f"with_failback has no setting {other}, because functions have no channel"
            )
    return _Decorator(FailbackPolicy(**settings), timer)


class _Decorator(Generic[DefaultT]):
    """The decorator that `with_failback` returns. Each decorated function gets its own queue."""

    def __init__(self, policy: FailbackPolicy, timer: Timer | None) -> None:
        self._policy = policy
        self._timer = checked_timer(timer)

    # The order matters: type checkers take the first overload that fits.
    @overload
    def __call__(  # type: ignore[overload-overlap]
        self, function: Callable[P, Coroutine[Any, Any, R]], /
    ) -> FailbackFunction[P, Coroutine[Any, Any, R | DefaultT], aio.FailbackInvoker]: ...
    @overload
    def __call__(  # type: ignore[overload-overlap]
        self, function: Callable[P, Awaitable[R]], /
    ) -> FailbackFunction[P, Awaitable[R | DefaultT], aio.FailbackInvoker]: ...
    @overload
    def __call__(
        self, function: Callable[P, Future[R]], /
    ) -> FailbackFunction[P, Future[R | DefaultT], sync.FailbackInvoker]: ...
    @overload
    def __call__(
        self, function: Callable[P, R], /
    ) -> FailbackFunction[P, R | DefaultT, sync.FailbackInvoker]: ...
    def __call__(self, function: Callable[..., Any], /) -> Any:
        """Return the decorated function, with an invoker of its own."""
        _require_repeatable(function)
        policy = self._policy
        if policy.name is None:
            policy = policy.model_copy(update={"name": label_of(function)})
        invoker: Any
        if is_coroutine_function(function):
            invoker = aio.FailbackInvoker(policy, timer=self._timer)

            async def invoke_aio(*args: Any, **kwargs: Any) -> Any:
                return await invoker.invoke(function, *args, **kwargs)

            decorated: Any = functools.wraps(function)(invoke_aio)
        else:
            invoker = _DetectingInvoker(policy, timer=self._timer)

            def invoke(*args: Any, **kwargs: Any) -> Any:
                return invoker.invoke(function, *args, **kwargs)

            decorated = functools.wraps(function)(invoke)
        if policy.journal is not None:
            invoker.register(function)
        decorated.failback = invoker
        return decorated


class _DetectingInvoker(sync.FailbackInvoker):
    """A sync invoker until its function first returns an awaitable, and then an aio invoker.

    Before that, `flush` and `close` return results that may also be awaited, if they are called on
    an event loop.
    """

    _is_async = False

    def invoke(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        if not self._is_async:
            return super().invoke(function, *args, **kwargs)
        started_ns = self._queue.now_ns()
        try:
            result = function(*args, **kwargs)
        except Exception as error:  # noqa: BLE001 - raised where the result is awaited
            result = _awaitable_error(error)
        saved = SavedCall.save(function, args, kwargs)
        return self._follow_awaitable(result, saved, started_ns)

    def _follow_awaitable(self, result: Any, call: SavedCall, started_ns: int) -> Any:
        if self._queue.durable:  # after a restart it would not be known that a loop is needed
            return super()._follow_awaitable(result, call, started_ns)
        self._is_async = True
        return aio.follow(self._queue, result, call, started_ns)

    def flush(self, timeout: Duration | None = None) -> Any:
        if self._is_async:
            return aio.flush(self._queue, timeout)
        is_empty = super().flush(timeout)
        return is_empty if running_loop() is None else _AwaitableBool(is_empty)

    def close(self, drain_timeout: Duration = 5.0) -> Any:
        if self._is_async:
            return aio.close_all([self], drain_timeout)
        failed = super().close(drain_timeout)
        return failed if running_loop() is None else _AwaitableList(failed)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await aio.close_all([self], 5.0)


class _AwaitableBool(int):
    """The result of `flush` while it is not known whether `flush` must be awaited."""

    def __await__(self) -> Generator[None, None, bool]:
        yield from ()
        return bool(self)

    def __repr__(self) -> str:
        return repr(bool(self))


class _AwaitableList(list[Any]):
    """The result of `close` while it is not known whether `close` must be awaited."""

    def __await__(self) -> Generator[None, None, list[Any]]:
        yield from ()
        return self


async def _awaitable_error(error: Exception) -> None:
    raise error


def _require_repeatable(function: object) -> None:
    """Raise TypeError for an object that can't be called a second time with the same effect."""
    if isinstance(function, (classmethod, staticmethod)):
        kind = type(function).__name__
        raise TypeError(f"write @{kind} above @with_failback(...), not below it")
    if not callable(function):
        raise TypeError(f"with_failback decorates functions, not {function!r}")
    if is_generator_function(function):
        raise TypeError(
            f"{label_of(function)} is a generator function: what it has yielded cannot be taken "
            "back, so it cannot be retried; collect the items in a function that returns them"
        )
