"""One queued call: the data to make it again, its state, and its description for users.

A protobuf message among the arguments is kept as bytes, and parsed again for every further attempt.
So the caller may reuse it, and no further attempt sees what another one did to it. The bytes are
made when the function has returned a future or an awaitable, or has raised: a blocking call that
succeeds needs none. All other arguments are kept as they are; the caller must leave them unchanged.

No `repr` here contains arguments: they may hold secrets.
"""

from __future__ import annotations

import enum
import inspect
import math
import os
from contextvars import Context, copy_context
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from rpcwheel.call.failback_policy import FailedCall
from rpcwheel.call.keeper import KeptDelivery
from rpcwheel.durations import NEVER, to_ns

if TYPE_CHECKING:
    from collections.abc import Callable

    from rpcwheel.journal.backend import StoredCall
    from rpcwheel.timer import Timeout


@dataclass(frozen=True, slots=True)
class QueueEntry:
    """A queued call at the time when it was listed; see `FailbackInvoker.entries`."""

    function: str
    """The method path, such as `/shop.Orders/Push`, or the function's name, such as
    `shop.orders.push`."""
    age_s: float
    """Seconds since the first attempt began."""
    attempts: int
    """Attempts begun, the first one included."""
    next_attempt_s: float | None
    """Seconds until the next attempt, infinite if the backoff has no end; None while an attempt or
    the `dead_letter` hook runs."""
    error: BaseException
    """How the last finished attempt failed."""


@dataclass(frozen=True, slots=True)
class _SavedMessage:
    """A protobuf message as bytes."""

    message_class: Any
    data: bytes


@dataclass(frozen=True, slots=True)
class SavedCall:
    """A function, its arguments and its caller's context, kept to be called later."""

    function: Callable[..., Any]
    _args: tuple[object, ...] = field(repr=False)
    _kwargs: dict[str, object] = field(repr=False)
    _context: Context = field(repr=False)
    obstacle: str | None
    """Why the call cannot be made a second time; None if it can."""

    @classmethod
    def save(
        cls, function: Callable[..., Any], args: tuple[object, ...], kwargs: dict[str, object]
    ) -> Self:
        """Keep a call for later, with the context variables as they are now. Never raises."""
        places = (*enumerate(args), *kwargs.items())
        obstacle = next(filter(None, (_obstacle(place, arg) for place, arg in places)), None)
        if obstacle is None:
            try:
                args = tuple(map(_save_argument, args))
                kwargs = {name: _save_argument(arg) for name, arg in kwargs.items()}
            except Exception as error:  # noqa: BLE001 - it is reported with the call's own error
                obstacle = f"an argument cannot be serialized: {error}"
        return cls(function, args, kwargs, copy_context(), obstacle)

    def with_current_context(self) -> Self:
        """Return this call with the context variables as they are now."""
        return replace(self, _context=copy_context())

    @property
    def args(self) -> tuple[Any, ...]:
        """The positional arguments; messages are parsed again."""
        return tuple(map(_restore_argument, self._args))

    @property
    def kwargs(self) -> dict[str, Any]:
        """The keyword arguments; messages are parsed again."""
        return {name: _restore_argument(arg) for name, arg in self._kwargs.items()}

    def copy_context(self) -> Context:
        """A copy of the caller's context: no attempt sees what another one sets there."""
        return self._context.copy()

    def __call__(self) -> Any:
        """Make the call."""
        return self.function(*self.args, **self.kwargs)


class QueuedCallState(enum.Enum):
    """The state of a queued call; `queue.py` describes the transitions."""

    WAITING = enum.auto()
    RUNNING = enum.auto()
    ENDING = enum.auto()
    DONE = enum.auto()


class EncodedCall(NamedTuple):
    """A call as it is to be stored in a journal; `NewCall` describes the fields."""

    target: str
    key: str
    body: bytes
    order_key: str | None


@dataclass(slots=True, eq=False)
class QueuedCall:
    """A call in a `FailbackQueue`, which changes it under its lock only. Times are nanoseconds."""

    saved: SavedCall
    error: BaseException
    """How the last finished attempt failed."""
    started_ns: int
    """When the first attempt began."""
    start: Callable[[Any], None] = field(repr=False)
    """Starts an `Attempt` on a worker or loop, from any thread, and returns at once. If the call
    has a `reason`, the attempt is only reported as failed there, where the hook can run."""
    attempts: int = 1
    """Attempts begun, the first one included, without those that do not count."""
    deliveries: int = 0
    """Attempts begun by this queue, also those that do not count."""
    idle_ns: int = 0
    """How long the call has waited between attempts, in total."""
    waiting_since_ns: int = 0
    next_attempt_ns: int = 0
    """When the next attempt is due, while WAITING."""
    state: QueuedCallState = QueuedCallState.WAITING
    reason: str = ""
    """Why there is no further attempt, once that is decided; perhaps when it was taken."""
    timeout: Timeout | None = None
    """Starts the next attempt; None if no timeout is pending."""
    is_ready: bool = False
    """Whether its next attempt is due, and begins as soon as the pacing allows."""
    attempt: Any = None
    """The `Attempt` that runs."""
    encoded: EncodedCall | None = field(default=None, repr=False)
    """What a journal is to store, before it has."""
    stored: StoredCall | None = None
    """The call in the journal from which it was taken."""
    worker: str = ""
    """The name under which it was taken."""
    expires_ns: int = NEVER
    """When the journal's `max_age` ends."""
    is_open: Callable[[], bool] = field(default=lambda: True, repr=False)
    """Whether the channel through which it is delivered is still open."""
    retry_on: frozenset[str] | None = None
    """The status codes after which the program that has stored it attempts it again, if they count
    in place of the policy's `retry_on`."""
    label: str = field(init=False)
    """The name in events and logs."""

    def __post_init__(self) -> None:
        self.label = label_of(self.saved.function)

    @property
    def pacing_key(self) -> object:
        """What it is paced with: the calls of the same target, channel or function.

        Functions have their names as keys: a program may make a new function for each call.
        """
        if self.stored is not None:
            return self.stored.target
        function = self.saved.function
        if isinstance(function, KeptDelivery) and function.channel is not None:
            return function.channel
        return self.label

    @property
    def last_attempt_was_delivery(self) -> bool:
        """Whether its last attempt was made by a queue, in this process or an earlier one."""
        return self.stored is not None or self.deliveries > 0

    @property
    def is_at_pacer(self) -> bool:
        """Whether its attempt is due, and waits until the pacing allows it."""
        return self.state is QueuedCallState.WAITING and self.is_ready

    @property
    def timeout_ns(self) -> int:
        """The timeout of each attempt, if it is known."""
        function = self.saved.function
        timeout_s = function.timeout_s if isinstance(function, KeptDelivery) else None
        return NEVER if timeout_s is None else to_ns(timeout_s)

    def uncount_attempt(self) -> None:
        """Note that its last attempt does not count."""
        self.attempts -= 1
        if isinstance(self.saved.function, KeptDelivery):
            self.saved.function.attempts -= 1

    def leave(self) -> None:
        """Note that the call has left its queue. Does not block."""
        self.state = QueuedCallState.DONE
        if isinstance(self.saved.function, KeptDelivery):
            self.saved.function.release_channel()

    def entry(self, now_ns: int) -> QueueEntry:
        """Describe the call for users."""
        left_ns = max(0, self.next_attempt_ns - now_ns)
        left_s = math.inf if self.next_attempt_ns >= NEVER else left_ns / 1e9
        return QueueEntry(
            self.label,
            age_s=(now_ns - self.started_ns) / 1e9,
            attempts=self.attempts,
            next_attempt_s=left_s if self.state is QueuedCallState.WAITING else None,
            error=self.error,
        )

    def failed_call(self, now_ns: int, reason: str) -> FailedCall:
        """Describe the call for users when there is no further attempt."""
        saved, waited_s = self.saved, (now_ns - self.started_ns) / 1e9
        return FailedCall(
            self.label, saved.args, saved.kwargs, self.attempts, waited_s, self.error, reason
        )


def label_of(function: Callable[..., Any]) -> str:
    """Name a callable in events and logs.

    It is the path of the gRPC method if `function` is a member of a stub, the `label` of an object
    that has one, otherwise `module.qualname`.

    A stub member's `_method` is private to grpcio (1.85); `test_queued_call.py` checks it.
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


def definition_of(function: Callable[..., Any]) -> tuple[str, object]:
    """Return the file and the qualified name of a function; of another callable, its identity."""
    while isinstance(function, partial):
        function = function.func
    function = inspect.unwrap(function)
    code = getattr(function, "__code__", None)
    if code is None:
        return "", id(function)
    return os.path.realpath(code.co_filename), function.__qualname__  # `python ./shop.py`


def _obstacle(place: object, arg: object) -> str | None:
    kind = type(arg)
    if not hasattr(kind, "__next__") and not hasattr(kind, "__anext__"):
        return None
    return (
        f"argument {place!r} is an iterator ({kind.__name__}), which the first attempt has used "
        "up; give a list, or make the iterator inside the function"
    )


def _save_argument(arg: object) -> object:
    kind = type(arg)
    if hasattr(kind, "SerializeToString") and hasattr(kind, "FromString"):
        return _SavedMessage(kind, arg.SerializeToString())  # type: ignore[attr-defined]
    return arg


def _restore_argument(arg: object) -> object:
    return arg.message_class.FromString(arg.data) if isinstance(arg, _SavedMessage) else arg
