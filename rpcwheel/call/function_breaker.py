"""`with_breaker`: a circuit breaker as a decorator of functions, methods and coroutine functions.

A call that the breaker allows is a `_RunningCall`, which reports its end once. If a function
returns something that ends later (a coroutine, a future, a call of gRPC), that end counts.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import weakref
from functools import partial
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Final,
    ParamSpec,
    Protocol,
    Self,
    TypedDict,
    TypeVar,
    Unpack,
    overload,
)

import grpc
import grpc.aio

from rpcwheel._concurrency.callbacks import callable_name
from rpcwheel._concurrency.executor import EXECUTOR, reset_after_fork
from rpcwheel._grpc import aio_relay, calls
from rpcwheel._grpc.aio_counted import count_end
from rpcwheel._grpc.finished import FinishedError
from rpcwheel.admission.circuit import FUNCTION, CircuitBreaker
from rpcwheel.admission.method import MethodAdmissionStatus
from rpcwheel.admission.policy import BreakerPolicy
from rpcwheel.durations import to_seconds
from rpcwheel.errors import (
    BreakerOpen,
    ConfigurationError,
    is_coroutine_function,
    is_generator_function,
    short_repr,
)
from rpcwheel.events import CallbackFailed, emit
from rpcwheel.telemetry import components
from rpcwheel.timer.manual import checked_timer, clock_of

from .matching import Matcher

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from datetime import timedelta

    from rpcwheel.timer.api import Timer

P = ParamSpec("P")
Q = ParamSpec("Q")
R_co = TypeVar("R_co", covariant=True)

FAILED: Final = "UNKNOWN"
"""The status code under which the breaker of a function counts a failure."""


class BreakerFunction(Protocol[P, R_co]):
    """A decorated function: called as before, with its circuit breaker as `breaker`."""

    @property
    def breaker(self) -> CircuitBreaker:
        """Its circuit breaker: `state`, `force_open`, `disable`, `reset`."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co:
        """Call the function, or raise `BreakerOpen`."""

    @overload
    def __get__(self, instance: None, owner: type) -> BreakerFunction[P, R_co]: ...
    @overload
    def __get__(
        self: BreakerFunction[Concatenate[Any, Q], R_co],
        instance: object,
        owner: type | None = None,
    ) -> BreakerFunction[Q, R_co]: ...


class _BreakerSettings(TypedDict, total=False):
    """The settings of `BreakerPolicy` that functions have."""

    failure_rate: float
    slow_call_rate: float
    slow_call: float | timedelta | None
    window_calls: int | None
    window: float | timedelta | None
    minimum_calls: int
    half_open_calls: int
    half_open_timeout: float | timedelta | None
    open_duration: float | timedelta
    open_growth: float
    max_open_duration: float | timedelta | None


def with_breaker(
    bare: object = None,  # the function, if the decorator is used without parentheses: an error
    /,
    *,
    failures: object = Exception,
    name: str | None = None,
    timer: Timer | None = None,
    **settings: Unpack[_BreakerSettings],
) -> _BreakerDecorator:
    """Decorate a function so that it is not called for some time after too many failures.

    While the breaker of the function is open, a call raises `BreakerOpen` at once. Each function
    has a breaker of its own, its attribute `breaker`; a method has one for all instances::

        @with_breaker(failures=(ConnectionError, "UNAVAILABLE"), open_duration=5.0)
        def price(item): return stub.Price(item, timeout=2.0)

        price(item)           # the response, or the error; BreakerOpen after too many errors
        price.breaker.state   # CLOSED, OPEN, HALF_OPEN, FORCED_OPEN or DISABLED
        price.breaker.reset()

    If the function is a coroutine function, or returns a coroutine, a future (of asyncio or
    `concurrent.futures`) or a call of gRPC, the call ends when that ends; a response stream ends
    with its last response. A call that is canceled or dropped before its end counts neither as a
    success nor as a failure.

    Args:
        bare: Not for users; only settings by name are allowed.
        failures: The errors that count as failures: exception types, gRPC status codes or their
            names, predicates, tenacity `retry_if_*` objects, or a set, tuple or list of these.
            Other errors count as successes: the function has worked. A predicate that raises
            counts as one that matches, and the event `CallbackFailed` is emitted.
        name: For events and logs, not empty; None takes the function's.
        timer: Any rpcwheel timer; None takes `shared_timer()` when the breaker opens.
        **settings: Those of `BreakerPolicy` but `failures`, `health_check` and `per`.

    Returns:
        A decorator. The decorated function is called like the function.

    Raises:
        ConfigurationError: A value is out of range, or contradicts another.
        TypeError: A value is of a wrong type, or the decorated object is no function whose end can
            be observed: it is not callable, a generator function, a classmethod or staticmethod.
            Raised by the decorated function, if it returns an awaitable whose end can't be
            observed.
    """
    if bare is not None:
        raise TypeError("with_breaker needs parentheses: @with_breaker()")
    for other in ("health_check", "per"):
        if other in settings:
            problem = "because functions have no server"
            raise TypeError(f"with_breaker has no setting {other}, {problem}")
    if name is not None and not isinstance(name, str):
        raise TypeError(f"name must be a string, such as 'orders', not {short_repr(name)}")
    if name == "":
        raise ConfigurationError("name must not be empty; leave it out for that of the function")
    policy = BreakerPolicy(**settings, failures=FAILED, health_check=False)
    try:
        matcher = Matcher(failures, setting="failures")
    except (TypeError, ConfigurationError) as error:
        raise type(error)(f"failures: {error}") from None
    return _BreakerDecorator(policy, matcher, name, checked_timer(timer))


class _BreakerDecorator:
    """The decorator that `with_breaker` returns. Each decorated function gets its own breaker."""

    def __init__(
        self, policy: BreakerPolicy, matcher: Matcher, name: str | None, timer: Timer | None
    ) -> None:
        self._policy = policy
        self._matcher = matcher
        self._name = name
        self._timer = timer

    def __call__(self, function: Callable[P, R_co], /) -> BreakerFunction[P, R_co]:
        """Return the decorated function, with a breaker of its own."""
        _require_observable(function)
        name = self._name or callable_name(function)
        breaker = CircuitBreaker(self._policy, target=FUNCTION, method=name, timer=self._timer)
        guard = _Guard(breaker, self._matcher, clock_of(self._timer))
        decorated: Any
        if is_coroutine_function(function):
            call: Any = function

            async def invoke_aio(*args: Any, **kwargs: Any) -> Any:
                with guard.begin():
                    return await call(*args, **kwargs)

            decorated = functools.wraps(function)(invoke_aio)
        else:

            def invoke(*args: Any, **kwargs: Any) -> Any:
                running = guard.begin()
                try:
                    result = function(*args, **kwargs)
                except BaseException as error:
                    running.ended(error)
                    raise
                return running.follow(result)

            decorated = functools.wraps(function)(invoke)
        decorated.breaker = breaker
        return decorated  # type: ignore[no-any-return]


class _Guard:
    """Asks the breaker of a function, and decides which errors are failures."""

    def __init__(
        self, breaker: CircuitBreaker, matcher: Matcher, now_ns: Callable[[], int]
    ) -> None:
        self.breaker = breaker
        self.now_ns = now_ns
        self._matcher = matcher
        self._is_reported = False
        reset_after_fork(self)

    def status(self) -> tuple[MethodAdmissionStatus]:
        """Return the state, for metrics and the live view."""
        breaker = self.breaker
        return (MethodAdmissionStatus(breaker.target, breaker.method, breaker.state.value),)

    def reset(self) -> None:
        """Go on in a forked child."""
        self.breaker.reset_after_fork()

    def begin(self) -> _RunningCall:
        """Begin a call.

        Raises:
            BreakerOpen: The breaker allows none.
        """
        if not self._is_reported:  # not when a module is imported, as this may start the metrics
            self._is_reported = True
            components.add("admission", self)
        now_ns = self.now_ns()
        token = self.breaker.enter(now_ns)
        if token is None:
            left_ns = self.breaker.left_ns(now_ns)
            error = BreakerOpen(
                self.breaker.method, None if left_ns is None else to_seconds(left_ns)
            )
            calls.set_not_sent(error)
            raise error
        return _RunningCall(self, token, now_ns)

    def code_of(self, error: BaseException | None, elapsed_ns: int) -> str:
        """Return the status code of an end for the breaker. Runs the user's predicates."""
        if error is None:
            return "OK"
        if calls.code_of(error) == "CANCELLED":  # or such as KeyboardInterrupt
            return "CANCELLED"
        try:
            failed = self._matcher(error, attempt=1, elapsed_ns=elapsed_ns)
        except Exception as raised:  # noqa: BLE001 - a user's predicate
            emit(CallbackFailed(self.breaker.method, "failures", raised))
            failed = True
        return FAILED if failed else "OK"


class _RunningCall:
    """A call that runs. Its end is reported to the breaker once.

    If the function has returned something that ends later, that holds the only reference to this
    object. If it is dropped before its end, the call counts as canceled.
    """

    kind: Final = ""
    """Of any kind; for `count_end`."""

    ignores_invalid_requests: Final = False

    def __init__(self, guard: _Guard, token: int, began_ns: int) -> None:
        self._guard = guard
        self._token: int | None = token  # None after the end
        self._began_ns = began_ns
        self._coroutine: Coroutine[Any, Any, Any] | None = None

    def follow(self, result: Any) -> Any:
        """Return the result of the function for its caller, and report when it ends.

        Raises:
            TypeError: Its end can't be observed.
        """
        if inspect.iscoroutine(result):
            self._coroutine = result
            awaited: Any = self._await(result)
            awaited.__qualname__ = self._guard.breaker.method  # for warnings and tasks
            return awaited
        if isinstance(result, grpc.aio.Call):
            count_end(self, weakref.ref(result), result)
        elif isinstance(result, grpc.Call):  # its `add_done_callback` would keep it alive
            end = partial(self._call_ended, weakref.ref(result), calls.weak_status(result))
            calls.run_at_end(result, end)
        elif _is_future(result):
            result.add_done_callback(self._future_ended)
        elif inspect.isawaitable(result):
            self._canceled()
            raise TypeError(
                f"{self._guard.breaker.method} has returned a {type(result).__name__}, which is "
                "awaitable, but its end cannot be observed; await it in a coroutine function, and "
                "decorate that"
            )
        else:
            self.ended(None)
        return result

    def ended(self, error: BaseException | None, now_ns: int | None = None) -> None:
        """End with an error, or None for success, now or at `now_ns`.

        Runs the user's predicates.
        """
        guard = self._guard
        now_ns = guard.now_ns() if now_ns is None else now_ns
        self._report(guard.code_of(error, now_ns - self._began_ns), now_ns)

    def end(self, call: weakref.ref[Any], code: str, /) -> None:
        """End a call of `grpc.aio`, on its event loop; for `count_end`. Never raises."""
        ended = call()
        if code == "OK":
            self.ended(None)
        elif ended is None:  # it was dropped, so it is canceled
            self._canceled()
        else:
            try:
                error = aio_relay.failure_of(ended)
            except Exception as raised:  # noqa: BLE001 - of an interceptor
                error = raised
            self.ended(error)

    def _call_ended(self, call: weakref.ref[Any], status: Callable[[], Any]) -> None:
        """End a call of `grpc`, perhaps on its thread. Its caller may have dropped it meanwhile."""
        state = status()
        ended = call() or getattr(state, "final", None)  # of a `RetryingCall`
        code = "CANCELLED" if state is None else calls.code_of(state)
        if code == "CANCELLED":
            self._canceled()
        elif code == "OK":
            self.ended(None)
        elif ended is not None:
            self._ended_on_worker(calls.failure_of(ended))
        else:
            details = getattr(state, "details", "")  # of gRPC's own call
            self._ended_on_worker(FinishedError(grpc.StatusCode[code], details))

    def _future_ended(self, future: Any) -> None:
        """End a future: of asyncio on its event loop, any other on any thread."""
        if future.cancelled():
            self._canceled()
        elif asyncio.isfuture(future):
            self.ended(future.exception())
        else:
            self._ended_on_worker(future.exception())

    def _ended_on_worker(self, error: BaseException | None) -> None:
        """End with an error, or None for success. Runs predicates on a worker thread."""
        if error is None:
            self.ended(None)
        else:
            EXECUTOR.submit(self._guard, partial(self.ended, error, self._guard.now_ns()))

    async def _await(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        with self:
            return await coroutine

    def _canceled(self) -> None:
        self._report("CANCELLED", self._guard.now_ns())

    def _report(self, code: str, now_ns: int) -> None:
        token, self._token = self._token, None
        if token is not None:
            self._guard.breaker.ended(token, code, now_ns - self._began_ns, now_ns)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        self.ended(error)

    def __del__(self) -> None:
        """End a call that was dropped, such as a coroutine that is not awaited."""
        if self._token is not None:
            self._canceled()
            if self._coroutine is not None:
                self._coroutine.close()  # it gives no warning then; that of `_await` is enough


def _is_future(result: object) -> bool:
    """Whether it is a future of any library, judged by its class's methods."""
    kind = type(result)
    return hasattr(kind, "add_done_callback") and hasattr(kind, "exception")


def _require_observable(function: object) -> None:
    """Raise TypeError for an object whose calls have no end that can be observed."""
    if isinstance(function, (classmethod, staticmethod)):
        kind = type(function).__name__
        raise TypeError(f"write @{kind} above @with_breaker(...), not below it")
    if not callable(function):
        raise TypeError(f"with_breaker decorates functions, not {function!r}")
    if is_generator_function(function):
        raise TypeError(
            "with_breaker decorates no generator functions: a call of one ends before its items "
            "are made; collect the items in a function that returns them"
        )
