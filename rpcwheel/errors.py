"""Every exception of rpcwheel.

The classes, with the cause of the error: "caller" for wrong use, "load" for a limit::

    RpcWheelError
    ├── ConfigurationError    caller: an invalid argument or setting      (a ValueError too)
    ├── TimerError
    │   ├── TimerStopped      caller: the timer was stopped                (a RuntimeError too)
    │   └── TooManyTimeouts   load: the timer has `max_pending` timeouts
    ├── FailbackError
    │   ├── FailbackFull      load: the queue has `max_pending` calls
    │   ├── FailbackClosed    caller: the call failed after `close()`, or the timer was stopped
    │   └── JournalError
    │       ├── JournalFull         load: the disk or the memory is full   (a FailbackFull too)
    │       ├── JournalUnavailable  the journal does not answer            (a ConnectionError too)
    │       │   └── JournalOutcomeUnknown  the call may have been stored, or not
    │       └── JournalRefused      the journal refuses: rights, format    (a PermissionError too)
    ├── CallError
    │   ├── DuplicateKey      caller: a call with this key is pending      (a ValueError too)
    │   ├── CallTimeout       no response in time; `side` says where       (a TimeoutError too)
    │   ├── TooManyCalls      load: the table has `max_pending` calls
    │   └── CallsClosed       caller: the table of pending calls was closed
    ├── BreakerOpen           load: the circuit breaker of the function is open
    └── RegistryError
        ├── RegistryUnavailable  the engine does not answer                (a ConnectionError too)
        ├── RegistryRefused      the engine refuses: credentials, rights   (a PermissionError too)
        ├── InstanceIdConflict   caller: another process publishes the same id
        ├── NotPublished         not published, or not known, in time      (a TimeoutError too)
        ├── RegistryClosed       caller: the registry was closed           (a RuntimeError too)
        └── ExtraMissing         caller: a package is not installed        (an ImportError too)

An argument of the wrong type raises the built-in `TypeError`, because that is a bug in the calling
code.
"""

import inspect
import re
from collections.abc import Callable, Hashable
from functools import partial, wraps
from types import FunctionType
from typing import Any, Final, Literal, TypeVar

__all__ = [
    "BreakerOpen",
    "CallError",
    "CallTimeout",
    "CallsClosed",
    "ConfigurationError",
    "DuplicateKey",
    "ExtraMissing",
    "FailbackClosed",
    "FailbackError",
    "FailbackFull",
    "InstanceIdConflict",
    "JournalError",
    "JournalFull",
    "JournalOutcomeUnknown",
    "JournalRefused",
    "JournalUnavailable",
    "NotPublished",
    "RegistryClosed",
    "RegistryError",
    "RegistryRefused",
    "RegistryUnavailable",
    "RpcWheelError",
    "TimerError",
    "TimerStopped",
    "TooManyCalls",
    "TooManyTimeouts",
]


class RpcWheelError(Exception):
    """The base class of all exceptions of rpcwheel."""


class ConfigurationError(RpcWheelError, ValueError):
    """An argument or a setting is invalid; the message says what is allowed."""

    problems: tuple[str, ...] = ()
    """Each problem of settings, if there may be several; the message has a line for each."""


class TimerError(RpcWheelError):
    """A timer did not accept a timeout. Nothing was started or counted."""


class TimerStopped(TimerError, RuntimeError):
    """The timer was stopped. Create a new one, or use `shared_timer()`."""


class TooManyTimeouts(TimerError):
    """The timer has `max_pending` timeouts. Cancel some, wait, or raise the limit."""


class FailbackError(RpcWheelError):
    """A failed call could not be queued. `__cause__` is the error of the call.

    Raised by a call through an interceptor, it is also a `grpc.RpcError` (with `grpc.aio` an
    `AioRpcError`), with the code and the metadata of the failed attempt.
    """


class FailbackFull(FailbackError):
    """The call was not queued, because the queue has `max_pending` calls."""


class FailbackClosed(FailbackError):
    """The call was not queued, because the queue was closed or its timer stopped."""


class JournalError(FailbackError):
    """A request to a journal failed. Unless it is `JournalOutcomeUnknown`, nothing was stored."""


class JournalFull(JournalError, FailbackFull):
    """The disk, or the memory of the engine, is full. Nothing was changed."""


class JournalUnavailable(JournalError, ConnectionError):
    """The journal cannot be reached, does not answer in time, or cannot do it now."""


class JournalOutcomeUnknown(JournalUnavailable):
    """There was no answer in time, or the connection was lost: the call may be stored, or not.

    If it is, it is delivered. Its idempotency key lets servers recognize it if it is made again.
    """


class JournalRefused(JournalError, PermissionError):
    """The journal refuses. Check the rights, the password, and which program made the journal."""


REFUSALS: Final[tuple[type[FailbackError], ...]] = (
    FailbackError,
    FailbackFull,
    FailbackClosed,
    JournalFull,
    JournalUnavailable,
    JournalOutcomeUnknown,
    JournalRefused,
)
"""The errors with which a queue refuses a failed call."""


class CallError(RpcWheelError):
    """A call of a `PendingCalls` table was not started, or ended without a response."""


class DuplicateKey(CallError, ValueError):
    """A call with this key is pending, and stays so. Use a different key for each call."""


class TooManyCalls(CallError):
    """The table has `max_pending` calls. Wait for some to end, or raise the limit."""


class CallsClosed(CallError):
    """The table was closed before the call, or while it waited for its response."""


class CallTimeout(CallError, TimeoutError):
    """There was no response in time. The peer may still execute the call.

    Times are seconds on the clock of the timer: `time.monotonic()`, or that of a `ManualTimer`. Can
    be pickled if the key can.
    """

    def __init__(
        self,
        key: Hashable,
        *,
        side: Literal["client", "server"],
        timeout: float,
        elapsed: float,
        start: float,
        sent: float | None,
        name: str = "calls",
    ) -> None:
        """Describe the call and how its time was spent.

        Args:
            key: The call's key.
            side: `"client"` if the request was not sent within the timeout, `"server"` if it was
                sent and not answered.
            timeout: The limit for the whole call.
            elapsed: The time until this error was created; longer than `timeout` if the timer was
                late.
            start: When the call was opened.
            sent: When its request was sent; None if it was not.
            name: The name of the table.
        """
        super().__init__()  # not the text: it contains the key, whose `__repr__` is user code
        self.key = key
        self.side = side
        self.timeout = timeout
        self.elapsed = elapsed
        self.start = start
        self.sent = sent
        self.name = name

    def __str__(self) -> str:
        summary = f"{self.name}: call {self.key!r} timed out after {self.elapsed:.3f} s"
        sent_after = self.elapsed if self.sent is None else self.sent - self.start
        if self.side == "server":
            silent = self.elapsed - sent_after
            why = f"server slow: sent after {sent_after:.3f} s, unanswered for {silent:.3f} s"
        elif self.sent is None:
            why = "client slow: the request was never sent"
        else:
            why = f"client slow: the request was sent only after {sent_after:.3f} s"
        return f"{summary} (timeout {time_text(self.timeout)}); {why}"

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self)!r})"

    def __reduce__(self) -> tuple[object, ...]:
        arguments = {part: getattr(self, part) for part in _PARTS}
        return partial(type(self), self.key, **arguments), (), vars(self)


_PARTS: Final = ("side", "timeout", "elapsed", "start", "sent", "name")


class BreakerOpen(RpcWheelError):
    """A function was not called, because its circuit breaker is open; see `with_breaker`.

    Calls of gRPC that are not sent for this reason end with UNAVAILABLE instead.
    """

    def __init__(self, name: str, retry_after: float | None = None) -> None:
        """Describe the breaker.

        Args:
            name: The name of the function.
            retry_after: Seconds until calls are tried again; None if that is not known.
        """
        super().__init__(name, retry_after)
        self.name = name
        self.retry_after = retry_after

    def __str__(self) -> str:
        after = self.retry_after
        when = "" if after is None else f"; it is tried again in {time_text(after)}"
        return f"{self.name} was not called, because its circuit breaker is open{when}"


class RegistryError(RpcWheelError):
    """A request to a registry failed. The methods that raise it say whether it is repeated."""


class RegistryUnavailable(RegistryError, ConnectionError):
    """The engine cannot be reached, does not answer in time, or cannot do it now."""


class RegistryRefused(RegistryError, PermissionError):
    """The engine refuses. Check the user, the password, the certificate and the rights."""


class InstanceIdConflict(RegistryError):
    """Others publish the same instance id. Each replaces the instance of the other.

    Another process, or another `Registry` of this process.

    Not raised: it is the `error` of the event `RegistryFailed` and of the registration.
    """


class NotPublished(RegistryError, TimeoutError):
    """An instance was not published, or a service not known, in time. The attempts continue."""


class RegistryClosed(RegistryError, RuntimeError):
    """The registry was closed. Open a new one."""


class ExtraMissing(RegistryError, ImportError):
    """A required package is not installed; the message says which."""


_MAX_REPR: Final = 200
"""Length of a value in a message, in characters."""


def three_digits(value: float) -> str:
    """Return a number with three digits, or with all before the point, and without an exponent."""
    if abs(value) >= 999.5:  # noqa: PLR2004 - rounded to 1,000
        return f"{value:,.0f}"
    text = f"{value:.3g}"
    _, has_exponent, exponent = text.partition("e-")
    return f"{value:.{int(exponent) + 2}f}".rstrip("0") if has_exponent else text


def time_text(seconds: float) -> str:
    """Return a time for a message: `0.25 s`, `86,500 s`."""
    return f"{three_digits(seconds)} s"


def masked_url(url: str) -> str:
    """Remove everything that may be secret from a URL, also a malformed one, for messages."""
    begin = re.match(r"(?:[A-Za-z][A-Za-z0-9+.-]*:)?//", url)
    scheme = begin[0] if begin else ""
    rest = url.removeprefix(scheme)
    user, at, after = rest.rpartition("@")
    if "?" in user:  # of a password, or of options that have the "@"
        after = ""
    return f"{scheme}{'***' + at if at else ''}{after.partition('?')[0]}"


def short_repr(value: object) -> str:
    """Return the `repr` of a value for a message: cut if it is long, its type if it fails.

    A URL in it is masked with all that follows, as the value may be given in the place of another.
    """
    try:
        if isinstance(value, str) and "://" in value:
            value = masked_url(value)
        before, mark, url = repr(value).partition("://")
        masked = masked_url(f"//{url}").removeprefix("//")
        text = f"{before}{mark}{masked}{'...' if '?' in url else ''}"
    except Exception:  # noqa: BLE001 - of the user's; or an integer of more than 4,300 digits
        text = f"<{type(value).__name__}>"
    return text if len(text) <= _MAX_REPR else f"{text[:_MAX_REPR]}..."


# --- How objects and methods are named in messages ---

C = TypeVar("C")


def is_coroutine_function(function: object) -> bool:
    """Whether the result of a function must be awaited, or iterated with `async for`, to run it."""
    return any(
        inspect.iscoroutinefunction(part) or inspect.isasyncgenfunction(part)
        for part in _parts(function)
    )


def is_generator_function(function: object) -> bool:
    """Whether a function returns a generator, or an asynchronous one."""
    return any(
        inspect.isgeneratorfunction(part) or inspect.isasyncgenfunction(part)
        for part in _parts(function)
    )


def _parts(function: object) -> tuple[object, object]:
    """Return what `inspect` knows the kind of: a function without its partials, or `__call__`."""
    while isinstance(function, partial):
        function = function.func
    return function, getattr(type(function), "__call__", None)  # noqa: B004 - not if it is callable


def check_callback(function: object, subject: str, form: str) -> None:
    """Raise `TypeError` if a function of the user cannot be called as `form` says."""
    if not callable(function):
        raise TypeError(f"{subject} must be callable as {form}, not {function!r}")
    if is_coroutine_function(function):
        raise TypeError(
            f"{subject} must be a plain function, called as {form}, not a coroutine function; to "
            "run a coroutine, create a task in it"
        )


def public_name(name: str) -> Callable[[type[C]], type[C]]:
    """Name the methods of a base class as those of its public subclasses, in Python's errors.

    Otherwise a missing argument is one of `KitBase.serve()`, a class that users do not know.
    """

    def rename(base: type[C]) -> type[C]:
        for function in vars(base).values():
            if isinstance(function, FunctionType):
                function.__qualname__ = f"{name}.{function.__name__}"
        return base

    return rename


def safe_repr(describe: Callable[[Any], str]) -> Callable[[Any], str]:
    """Make a `__repr__` that does not raise if the constructor of the object has raised.

    Debuggers and test runners show such objects.
    """

    @wraps(describe)
    def described(self: Any) -> str:
        try:
            return describe(self)
        except AttributeError:
            return f"<{type(self).__name__}, not initialized>"

    return described
