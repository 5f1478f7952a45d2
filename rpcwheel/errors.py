"""Every exception of rpcwheel.

Each class says whose fault it is and what to do next::

    RpcWheelError
    ├── ConfigurationError    yours: an argument or policy makes no sense  (a ValueError too)
    ├── TimerError
    │   ├── TimerStopped      yours: the timer was stopped; make another   (a RuntimeError too)
    │   └── TooManyTimeouts   load: `max_pending` timeouts wait already
    ├── FailbackError
    │   ├── FailbackFull      load: `max_pending` failed calls wait already
    │   └── FailbackClosed    yours: the call failed after `close()`, or its timer was stopped
    ├── CallError
    │   ├── DuplicateKey        yours: a call with this key waits already     (a ValueError too)
    │   ├── CallTimeout       no answer in time; `side` says who was slow  (a TimeoutError too)
    │   ├── TooManyCalls      load: `max_pending` calls wait for an answer already
    │   └── CallsClosed       yours: the table of pending calls was closed
    └── RegistryError
        ├── RegistryUnavailable   the engine can't be reached, or is silent  (ConnectionError too)
        ├── RegistryRefused       the engine refuses: credentials, rights    (PermissionError too)
        ├── InstanceIdConflict     yours: another process publishes under the same id
        ├── NotPublished          not published, or not known, in time       (a TimeoutError too)
        ├── RegistryClosed        yours: the registry was closed             (a RuntimeError too)
        └── ExtraMissing          yours: a package is missing; says which    (an ImportError too)

An argument of the wrong type raises the built-in `TypeError`: that is a bug in the calling code,
not a state to handle.
"""

from collections.abc import Hashable
from functools import partial
from typing import Final, Literal

__all__ = [
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
    """The root of every exception that rpcwheel defines."""


class ConfigurationError(RpcWheelError, ValueError):
    """A value that can't work was given; the message says which are allowed."""


class TimerError(RpcWheelError):
    """A timer did not take the timeout; nothing was started and nothing counted."""


class TimerStopped(TimerError, RuntimeError):
    """The timer was stopped before; make a new one, or use `shared_timer()`."""


class TooManyTimeouts(TimerError):
    """The timer holds `max_pending` timeouts already; cancel some, wait, or raise the limit."""


class FailbackError(RpcWheelError):
    """A failed call could not be queued; it is chained to the error of the call itself.

    From a call through an interceptor it is a `grpc.RpcError` too (in `grpc.aio` an `AioRpcError`),
    with the code and the metadata of the failed try, so `except grpc.RpcError` finds it.
    """


class FailbackFull(FailbackError):
    """`max_pending` failed calls wait for a retry already; this one was not queued."""


class FailbackClosed(FailbackError):
    """The call was not queued: the queue was closed before, or its timer stopped."""


class CallError(RpcWheelError):
    """A call of a `PendingCalls` table was not begun, or ended without an answer."""


class DuplicateKey(CallError, ValueError):
    """A call with this key waits already, and goes on; give each call a key of its own."""


class TooManyCalls(CallError):
    """The table holds `max_pending` calls already; wait for some, or raise the limit."""


class CallsClosed(CallError):
    """The table was closed, before the call or while it waited for its answer."""


class CallTimeout(CallError, TimeoutError):
    """No answer came in time. The peer may still carry the call out.

    Times are seconds on the clock of the timer in use: `time.monotonic()`, or a `ManualTimer`'s
    own. Can be pickled if the key can.
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
        """Say which call it was, and where the time went.

        Args:
            key: The call's key.
            side: Who was slow: `"client"` if the request was not sent within the timeout,
                `"server"` if it was, and not answered.
            timeout: How long the call might take, all in all.
            elapsed: How long it took until this error was made; above `timeout` by as much as the
                timer was late.
            start: When it was opened.
            sent: When its request was sent; None if it never was.
            name: Of the table.
        """
        super().__init__()  # not the text: it shows the key, and a `__repr__` is the user's code
        self.key = key
        self.side = side
        self.timeout = timeout
        self.elapsed = elapsed
        self.start = start
        self.sent = sent
        self.name = name

    def __str__(self) -> str:
        what = f"{self.name}: call {self.key!r} timed out after {self.elapsed:.3f} s"
        sent_after = self.elapsed if self.sent is None else self.sent - self.start
        if self.side == "server":
            silent = self.elapsed - sent_after
            why = f"server slow: sent after {sent_after:.3f} s, unanswered for {silent:.3f} s"
        elif self.sent is None:
            why = "client slow: the request was never sent"
        else:
            why = f"client slow: the request was sent only after {sent_after:.3f} s"
        return f"{what} (timeout {self.timeout:.4g} s); {why}"

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self)!r})"

    def __reduce__(self) -> tuple[object, ...]:
        given = {part: getattr(self, part) for part in _PARTS}
        return partial(type(self), self.key, **given), (), vars(self)


_PARTS: Final = ("side", "timeout", "elapsed", "start", "sent", "name")


class RegistryError(RpcWheelError):
    """A registry did not do what was asked; what it goes on trying is said where it is raised."""


class RegistryUnavailable(RegistryError, ConnectionError):
    """The engine can't be reached, does not answer in time, or can't do it now."""


class RegistryRefused(RegistryError, PermissionError):
    """The engine answers, and will not: look at the user, password, certificate and rights."""


class InstanceIdConflict(RegistryError):
    """Another process publishes under the same id, each in the place of the other: give it its own.

    Not raised: it is the `error` of the event `RegistryFailed`, and of the registration meanwhile.
    """


class NotPublished(RegistryError, TimeoutError):
    """An instance was not published, or a service not known, in the time given; it is tried on."""


class RegistryClosed(RegistryError, RuntimeError):
    """The registry was closed before; open another."""


class ExtraMissing(RegistryError, ImportError):
    """A package that this needs is not installed; the message says what to install."""


_MAX_REPR: Final = 200
"""Characters of a value that a message shows."""


def short_repr(value: object) -> str:
    """Return the `repr` of a value for a message: cut if it is long, its type if it has none."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an integer of more than 4,300 digits; nested too deep
        text = f"<{type(value).__name__}>"
    return text if len(text) <= _MAX_REPR else f"{text[:_MAX_REPR]}..."
