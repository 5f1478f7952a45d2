"""Which connection of a channel serves the next call: one is active, older ones drain.

A `Transport` is a channel of gRPC with its own connection. `Transports` are all of one
`ReconnectingChannel`; the newest one is active and serves new calls. Nothing here does I/O or reads
a clock by itself. Only `ActivityStamps` are thread-safe: the channel calls its `Transports` under a
lock, or on one event loop.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from rpcwheel.backoff import MAX_BACKOFF_ATTEMPTS
from rpcwheel.durations import NEVER

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from rpcwheel.backoff import Backoff
    from rpcwheel.rpc import Kind

    Convert = Callable[[Any], Any]

C = TypeVar("C")
T = TypeVar("T", bound="Transport[Any]")

SERVER_CODES: Final = frozenset(
    {
        "ABORTED",
        "ALREADY_EXISTS",
        "DATA_LOSS",
        "FAILED_PRECONDITION",
        "INVALID_ARGUMENT",
        "NOT_FOUND",
        "OUT_OF_RANGE",
        "PERMISSION_DENIED",
        "UNIMPLEMENTED",
    }
)
"""Status codes that only a server sets, so they show that the connection works.

gRPC also sets the other ones in the client: UNKNOWN if a request iterator raises,
RESOURCE_EXHAUSTED if a message is too large to send, INTERNAL if one can't be serialized,
UNAUTHENTICATED if call credentials fail.
"""


class ActivityStamps:
    """When a connection was last read, written and used, on the timer's clock; None: never.

    Any thread may set a stamp without a lock, as each is one assignment.
    """

    __slots__ = ("last_read_ns", "last_use_ns", "last_write_ns", "now_ns")

    def __init__(self, now_ns: Callable[[], int]) -> None:
        self.now_ns = now_ns
        self.last_read_ns: int | None = None
        """The last message or status from the server, also for a heartbeat."""
        self.last_write_ns: int | None = None
        """The last message to the server, also of a heartbeat."""
        self.last_use_ns: int | None = None
        """The last start of a call, or message of one in either direction; not of heartbeats."""

    def saw_read(self) -> None:
        """Note that a message of a call was read."""
        self.last_read_ns = self.last_use_ns = self.now_ns()

    def saw_write(self) -> None:
        """Note that a call starts, or that a message of one is written."""
        self.last_write_ns = self.last_use_ns = self.now_ns()

    def saw_status(self, code: object) -> None:
        """Note that a call failed: a read, if only a server sets this status."""
        if getattr(code, "name", None) in SERVER_CODES:
            self.saw_read()

    def writing(self, serializer: Convert | None) -> Convert:
        """Wrap a serializer so that it stamps each message after it was serialized."""
        now_ns = self.now_ns

        def write(message: Any) -> Any:
            data = message if serializer is None else serializer(message)
            self.last_write_ns = self.last_use_ns = now_ns()  # as `saw_write`, inlined for speed
            return data

        return write

    def reading(self, deserializer: Convert | None) -> Convert:
        """Wrap a deserializer so that it stamps each message, valid or not."""
        now_ns = self.now_ns

        def read(data: Any) -> Any:
            self.last_read_ns = self.last_use_ns = now_ns()  # as `saw_read`, inlined for speed
            return data if deserializer is None else deserializer(data)

        return read


class MethodSpec:
    """The arguments from which a multicallable is created on each connection."""

    __slots__ = ("_args", "_deserializer", "_options", "kind", "method", "serializer")

    def __init__(
        self,
        kind: Kind,
        method: str,
        request_serializer: Convert | None = None,
        response_deserializer: Convert | None = None,
        *args: Any,
        **options: Any,
    ) -> None:
        self.kind = kind
        self.method = method
        self.serializer = request_serializer
        self._deserializer = response_deserializer
        self._args = args
        self._options: Mapping[str, Any] = MappingProxyType(options)

    def make(
        self, channel: Any, activity: ActivityStamps | None, *, stamps_response: bool = True
    ) -> Any:
        """Create gRPC's multicallable.

        Args:
            channel: Of `grpc` or `grpc.aio`.
            activity: Where messages are stamped; None: nowhere. A unary request is not stamped,
                because the start of its call is.
            stamps_response: Whether a unary response is stamped.
        """
        serializer, deserializer = self.serializer, self._deserializer
        if activity is not None:
            if stamps_response or self.kind.streams_responses:
                deserializer = activity.reading(deserializer)
            if self.kind.streams_requests:
                serializer = activity.writing(serializer)
        make = getattr(channel, self.kind.name.lower())
        return make(self.method, serializer, deserializer, *self._args, **self._options)


class Transport(Generic[C]):
    """A channel of gRPC with its own connection, and the number of calls on it."""

    __slots__ = (
        "__weakref__",
        "activity",
        "calls",
        "channel",
        "connection_wanted",
        "core",
        "drain_until_ns",
        "ended",
        "number",
        "reason",
        "replaced",
        "spans",
    )

    def __init__(self, channel: C, now_ns: Callable[[], int]) -> None:
        self.channel = channel
        self.core: Any = None
        """The channel of gRPC's core, if it is known; only in `grpc`."""
        self.number = 1
        """1 for the first transport of a `ReconnectingChannel`."""
        self.activity = ActivityStamps(now_ns)
        self.calls = 0
        """Number of calls in flight on it, without heartbeats."""
        self.spans: dict[object, Any] = {}
        """The recording spans of these calls; see `rpcwheel.telemetry.tracing.begin_call`."""
        self.drain_until_ns = NEVER
        """When calls in flight are ended; `NEVER` while it is active."""
        self.ended = False
        """Whether it is closed or about to be: no call or multicallable may use it."""
        self.replaced = False
        """Whether another transport is active instead."""
        self.reason = ""
        """Why it was replaced, or why its channel drains."""
        self.connection_wanted = False
        """Whether it was asked to connect, and was not READY since."""

    @property
    def end_details(self) -> str:
        """The status details of the calls that are ended with it."""
        return f"{'connection replaced' if self.replaced else 'channel drained'}: {self.reason}"


class Transports(Generic[T]):
    """The transports of one channel."""

    def __init__(self, first: T, now_ns: Callable[[], int], backoff: Backoff) -> None:
        self._now_ns = now_ns
        self._backoff = backoff
        self._unanswered = 0  # transports in a row that were replaced before anything was read
        self._not_before_ns = -NEVER
        self.active = first
        self.draining_transports: list[T] = []
        """Transports that accept no new calls and are closed when their calls have ended."""
        self.closed = False
        self.draining = False
        """Whether `drain` was called: the channel is closed when all calls have ended."""
        self.accepts_calls = True
        """Whether calls may start, and `reconnect` be called: not `closed`, not `draining`."""
        self.calls = 0
        """Number of calls in flight on all transports, also on those about to be closed."""

    @property
    def drained(self) -> bool:
        """Whether `drain` was called and no transport is open: the channel is to be closed."""
        return self.draining and not self.draining_transports

    @property
    def open_transports(self) -> list[T]:
        """Transports that are not about to be closed."""
        draining = self.draining_transports
        return list(draining) if self.draining else [self.active, *draining]

    def begin_call(self) -> T:
        """Count a call that starts now, and return its transport."""
        transport = self.active
        transport.calls += 1
        self.calls += 1
        return transport

    def end_call(self, transport: T) -> bool:
        """Count a call that has ended; returns whether its transport must be closed now."""
        transport.calls -= 1
        self.calls -= 1
        return not transport.calls and self.expire(transport)

    def backoff_left_ns(self) -> int:
        """How long the backoff still forbids `reconnect`; 0: it allows it now."""
        if self.active.activity.last_read_ns is not None:
            return 0  # this connection has worked, so its failure is a new one
        return max(0, self._not_before_ns - self._now_ns())

    def next_backoff_ns(self) -> int:
        """How long the backoff forbids another `reconnect` after one that is done now.

        Raises:
            Exception: Of a wait object of the user; so call this before anything is changed.
        """
        attempt = min(self._unanswered_with_active() + 1, MAX_BACKOFF_ATTEMPTS)
        backoff_ns = self._backoff.next_delay_ns(attempt, elapsed_ns=0, error=None)
        return NEVER if backoff_ns is None else backoff_ns

    def _unanswered_with_active(self) -> int:
        return 0 if self.active.activity.last_read_ns is not None else self._unanswered + 1

    def reconnect(self, new: T, drain_ns: int, reason: str, backoff_ns: int) -> tuple[T, bool]:
        """Replace the active transport, whose calls may continue for `drain_ns`.

        With `NEVER` they have no limit. `backoff_ns` is the result of `next_backoff_ns()`.

        Returns:
            The old transport, and whether it must be closed now: it has no calls, or `drain_ns` is
            0. If it is `connection_wanted`, the new one must connect at once.
        """
        old, now_ns = self.active, self._now_ns()
        self._unanswered = self._unanswered_with_active()
        self._not_before_ns = NEVER if backoff_ns == NEVER else now_ns + backoff_ns
        wanted = old.connection_wanted and old.activity.last_read_ns is None
        new.connection_wanted = old.connection_wanted = wanted
        new.number = old.number + 1
        self.active = new
        old.reason, old.replaced = reason, True
        if not old.calls or drain_ns <= 0:
            old.ended = True
            return old, True
        old.drain_until_ns = NEVER if drain_ns == NEVER else now_ns + drain_ns
        self.draining_transports.append(old)
        return old, False

    def expire(self, transport: T) -> bool:
        """End the drain of a transport; returns whether it must be closed now."""
        if transport not in self.draining_transports:
            return False
        self.draining_transports.remove(transport)
        transport.ended = True
        return True

    def drain(self, drain_ns: int, reason: str = "") -> tuple[list[T], list[T]]:
        """Accept no more calls; the active transport drains too from now on.

        Calls may continue for `drain_ns` on all transports; with `NEVER` they have no limit. A
        second call can only make that shorter, and does not change the reason.

        Returns:
            The transports that must be closed now, and those whose drain became shorter.
        """
        over: list[T] = []
        shorter: list[T] = []
        if self.closed:
            return over, shorter
        if not self.draining:
            self.draining, self.accepts_calls = True, False
            self.active.reason = reason
            self.draining_transports.append(self.active)
        until_ns = NEVER if drain_ns == NEVER else self._now_ns() + drain_ns
        for transport in tuple(self.draining_transports):
            if not transport.calls or drain_ns <= 0:
                self.expire(transport)
                over.append(transport)
            elif until_ns < transport.drain_until_ns:
                transport.drain_until_ns = until_ns
                shorter.append(transport)
        return over, shorter

    def close(self) -> list[T]:
        """Accept no more calls; returns the transports that must be closed now.

        Idempotent: a second call returns none.
        """
        if self.closed:
            return []
        self.closed, self.accepts_calls = True, False
        transports, self.draining_transports = self.open_transports, []
        for transport in transports:
            transport.ended = True
        return transports
