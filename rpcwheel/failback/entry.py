"""One parked call: what is kept of it, so that it can be made again.

A protobuf message among the arguments is kept as bytes and parsed anew for every try: the caller
may use it again at once, and no try sees what an earlier one did to it. All other arguments are
kept as they are; they are the caller's to leave unchanged.
"""

from __future__ import annotations

import enum
from contextvars import Context, copy_context
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, Self

if TYPE_CHECKING:
    from collections.abc import Callable

    from rpcwheel.exiting import BackgroundCall
    from rpcwheel.timer import Timeout

__all__ = ["Call", "Entry", "FailedCall", "State", "label_of"]


@dataclass(frozen=True, slots=True)
class FailedCall:
    """A call that was not delivered, with all that is needed to make it by other means."""

    function: str
    """Its label, such as `shop.orders.push` or `/shop.Orders/Push`."""
    args: tuple[Any, ...]
    """As the caller gave them; messages are copies, in the state they had when it was queued."""
    kwargs: dict[str, Any]
    attempts: int
    """How often it was tried, the first try included."""
    waited_s: float
    """Seconds since its first try."""
    error: BaseException
    """How its last finished try ended."""
    reason: str
    """Why it is not tried again."""


class _MessageType(Protocol):
    """What a protobuf message's class has."""

    def FromString(self, data: bytes, /) -> object: ...  # noqa: N802 - protobuf's name


@dataclass(frozen=True, slots=True)
class _Message:
    """A protobuf message at rest."""

    kind: _MessageType
    data: bytes


@dataclass(frozen=True, slots=True)
class Call:
    """A function, its arguments and its caller's context, at rest."""

    function: Callable[..., Any]
    _args: tuple[object, ...]
    _kwargs: dict[str, object]
    _context: Context
    flaw: str | None
    """Why the call cannot be made a second time; None if it can."""

    @classmethod
    def at_rest(
        cls, function: Callable[..., Any], args: tuple[object, ...], kwargs: dict[str, object]
    ) -> Self:
        """Keep a call for later, with the context variables as they are now. Never raises."""
        flaws = [_flaw(place, arg) for place, arg in (*enumerate(args), *kwargs.items())]
        flaw = next(filter(None, flaws), None)
        if flaw is None:
            try:
                args = tuple(map(_at_rest, args))
                kwargs = {name: _at_rest(arg) for name, arg in kwargs.items()}
            except Exception as error:  # noqa: BLE001 - told to the caller, with the call's error
                flaw = f"an argument does not serialize: {error}"
        return cls(function, args, kwargs, copy_context(), flaw)

    @property
    def args(self) -> tuple[Any, ...]:
        """The positional arguments, messages parsed anew."""
        return tuple(map(_awake, self._args))

    @property
    def kwargs(self) -> dict[str, Any]:
        """The keyword arguments, messages parsed anew."""
        return {name: _awake(arg) for name, arg in self._kwargs.items()}

    def fresh_context(self) -> Context:
        """A copy of the caller's context: what one try sets there, the next does not see."""
        return self._context.copy()

    def __call__(self) -> Any:
        """Make the call."""
        return self.function(*self.args, **self.kwargs)


class State(enum.Enum):
    """Where a parked call stands; `core` has the transitions."""

    WAITING = enum.auto()
    """For the timer."""
    RUNNING = enum.auto()
    """A try has begun and has not ended."""
    ENDING = enum.auto()
    """Given up, and with the dead-letter hook."""
    GONE = enum.auto()


@dataclass(slots=True, eq=False)
class Entry:
    """A parked call and its story. Owned by one ledger; changed under that ledger's lock only."""

    call: Call
    error: BaseException
    started_ns: int
    """When its first try began."""
    waiting_since_ns: int
    launch: Callable[[Entry], None]
    """Starts the next try where it belongs, from any thread, without running it there."""
    attempts: int = 1
    idle_ns: int = 0
    state: State = State.WAITING
    timeout: Timeout | None = None
    """The handle of the wake-up that is armed, None while none is."""
    background: BackgroundCall | None = None
    """The try that is under way."""

    @property
    def label(self) -> str:
        """The function's name for people."""
        return label_of(self.call.function)

    def given_up(self, now_ns: int, reason: str) -> FailedCall:
        """What to tell of it when it will not be tried again."""
        call = self.call
        waited_s = (now_ns - self.started_ns) / 1e9
        return FailedCall(
            self.label, call.args, call.kwargs, self.attempts, waited_s, self.error, reason
        )


def label_of(function: Callable[..., Any]) -> str:
    """Name a callable for people: `module.qualname`, or the gRPC method that a stub's member calls.

    One that has a `label` names itself.

    The member's `_method` is private to grpcio (1.85); `test_entry.py` will tell when it goes.
    """
    while isinstance(function, partial):
        function = function.func
    label = getattr(function, "label", None)
    if isinstance(label, str):
        return label
    member = getattr(function, "__self__", function)  # of `stub.Push.future`: `stub.Push`
    method = getattr(member, "_method", None)
    if type(member).__module__.startswith("grpc.") and method is not None:
        return method.decode(errors="replace") if isinstance(method, bytes) else str(method)
    kind = type(function)
    name = getattr(function, "__qualname__", None) or kind.__qualname__
    return f"{getattr(function, '__module__', None) or kind.__module__}.{name}"


def _flaw(place: object, arg: object) -> str | None:
    kind = type(arg)
    if not hasattr(kind, "__next__") and not hasattr(kind, "__anext__"):
        return None
    return (
        f"argument {place!r} is an iterator ({kind.__name__}), which the first try has used up; "
        "give a list, or make the iterator inside the function"
    )


def _at_rest(arg: object) -> object:
    kind = type(arg)
    if hasattr(kind, "SerializeToString") and hasattr(kind, "FromString"):
        return _Message(kind, arg.SerializeToString())  # type: ignore[attr-defined]
    return arg


def _awake(arg: object) -> object:
    return arg.kind.FromString(arg.data) if isinstance(arg, _Message) else arg
