"""What the server interceptors of `grpc` and `grpc.aio` share.

An interceptor sets the deadline and the criticality of an incoming call, refuses a call whose
deadline has passed, reports slow calls, and counts calls while metrics are on. To do so, it wraps
the "behavior" of each handler: the function that implements a method, as in
`grpc.unary_unary_rpc_method_handler(behavior)`.

* `ServerState` belongs to an interceptor, and keeps the wrapped handlers.
* `ServedMethod` belongs to a method, for deadlines, slow calls and counts. Most calls need no more
  objects.
* `ServedStream` belongs to a call that streams responses, because such a call goes on after its
  behavior has returned.
* `served_code` and `early_code` return the status code that a call is counted with.

Nothing in this module waits or does I/O.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any, Final

from rpcwheel._grpc.calls import code_name
from rpcwheel._grpc.handlers import (
    DEADLINE_TOLERANCE_S,
    behavior_of,
    kind_of,
    late_s,
    time_left,
    with_behavior,
)
from rpcwheel.call.config import MAX_METHODS, MethodConfigs, slow_call_task
from rpcwheel.call.criticality import read_criticality
from rpcwheel.call.policy import CallPolicy, checked_calls
from rpcwheel.durations import NEVER
from rpcwheel.events import DeadlineExceededBeforeStart, emit
from rpcwheel.limit.limiter import CALL
from rpcwheel.limit.server import ServerLimit
from rpcwheel.rpc import CRITICALITY, DEADLINE, STATUS_CODES
from rpcwheel.telemetry import components
from rpcwheel.telemetry.call_counts import CallEnd
from rpcwheel.timer.manual import checked_timer, start_timeout

if TYPE_CHECKING:
    from collections.abc import Callable

    import grpc

    from rpcwheel._grpc.handlers import Behavior
    from rpcwheel.call.config import MethodConfig
    from rpcwheel.rpc import Kind
    from rpcwheel.telemetry.call_counts import MethodCounts
    from rpcwheel.timer import Timeout
    from rpcwheel.timer.api import Timer

MAX_HANDLERS: Final = 8
"""The handlers of one method that are kept: those of servers that share an interceptor. An
interceptor of another package may make a handler for each call, which refers to its metadata."""


def served_code(context: Any, error: BaseException | None = None) -> str:
    """Return the name of the status code of a call whose behavior has just ended. Never raises.

    gRPC serializes the response afterwards. If that fails, the client gets another code.

    Args:
        context: The context of the call.
        error: What the behavior raised; None if it returned.
    """
    try:
        is_active = getattr(context, "is_active", None)
        is_aio = is_active is None  # contexts of `grpc.aio` have no such method
        ended_early = is_active is not None and not is_active()
        # Such as CancelledError: when a call ends, `grpc.aio` cancels its behavior.
        was_interrupted = error is not None and not isinstance(error, Exception)
        if ended_early or was_interrupted:
            return early_code(context)
        code = context.code()
        if is_aio and isinstance(code, int) and 0 <= code < len(STATUS_CODES):
            return STATUS_CODES[code]  # `set_code` of `grpc.aio` takes numbers too
        return code_name(code, "OK" if error is None else "UNKNOWN")
    except Exception:  # noqa: BLE001 - of a context of another library
        return "UNKNOWN"


def early_code(context: Any) -> str:
    """Return the name of the status code of a call that has ended before its behavior.

    Never raises.
    """
    try:
        left_s = time_left(context)
    except Exception:  # noqa: BLE001 - of a context of another library
        left_s = None
    return "CANCELLED" if left_s is None or left_s > DEADLINE_TOLERANCE_S else "DEADLINE_EXCEEDED"


class ServerState:
    """The state of a server interceptor: the policy, the timer and the wrapped handlers."""

    def __init__(self, policy: CallPolicy | None, *, timer: Timer | None) -> None:
        self._policy = CallPolicy() if policy is None else checked_calls(policy)
        self._config = MethodConfigs(self._policy)
        self._timer = checked_timer(timer)
        self._counts = components.call_counts()
        self._wrapped: dict[
            str, dict[int, tuple[grpc.RpcMethodHandler, grpc.RpcMethodHandler]]
        ] = {}
        """By the method, and by the id of the handler, the handler and the wrapped one."""

    def limit(self) -> ServerLimit | None:
        """Make the limit of the server; None if its policy has none."""
        policy = self._policy
        if all(each.limit is None for each in (policy, *policy.methods.values())):
            return None
        return ServerLimit(
            policy.limit,
            lambda method: policy.policy_for(method).limit,
            timer=self._timer,
        )

    def wrap(
        self,
        handler: grpc.RpcMethodHandler,
        method: str,
        wrap_behavior: Callable[[Kind, Behavior, ServedMethod], Behavior],
    ) -> grpc.RpcMethodHandler:
        """Return the handler with a wrapped behavior.

        gRPC calls interceptors for each call, on the one thread that accepts calls and under the
        server's lock. So each handler is wrapped only once.

        Args:
            handler: The handler of a method. Without a behavior it is returned unchanged.
            method: Such as "/shop.Orders/Get".
            wrap_behavior: Wraps a behavior, as `grpc` or as `grpc.aio` needs it.
        """
        # The method does not suffice: servers that share an interceptor have different handlers.
        key = id(handler)  # not reused for another handler while the entry holds this one
        handlers = self._wrapped.get(method)
        entry = None if handlers is None else handlers.get(key)
        if entry is not None:
            return entry[1]
        behavior = behavior_of(handler)
        if behavior is None:
            return handler
        kind, counts = kind_of(handler), self._counts
        served_method = ServedMethod(
            method,
            self._config.config_for(method),
            self._timer,
            None if counts is None else counts.server.method(method, kind.grpc_type),
        )
        wrapped = with_behavior(handler, wrap_behavior(kind, behavior, served_method))
        if handlers is None:
            if len(self._wrapped) >= MAX_METHODS:  # a generic handler may serve any name
                self._wrapped.clear()
            handlers = self._wrapped.setdefault(method, {})
        elif len(handlers) >= MAX_HANDLERS:
            handlers.clear()
        handlers[key] = handler, wrapped
        return wrapped


class ServedMethod:
    """The deadlines, slow calls and counts of one method of a server. Has no state of a call."""

    def __init__(
        self, method: str, config: MethodConfig, timer: Timer | None, counts: MethodCounts | None
    ) -> None:
        self._method = method
        self.counts = counts
        """Where the calls are counted; None if metrics are off."""
        self._timeout_ns = config.timeout_ns
        self._timer = timer
        slow_ns = config.slow_ns
        self._slow = None if slow_ns == NEVER else slow_call_task(method, "server", slow_ns)
        self.observes_streams = not (counts is None and self._slow is None)
        """Whether the end of a stream matters."""

    def set_current(self, context: Any) -> bool:
        """Set `CRITICALITY` and `DEADLINE` in the current `contextvars` context.

        Returns:
            As `set_deadline`.
        """
        CRITICALITY.set(read_criticality(context.invocation_metadata(), self._method))
        return self.set_deadline(context)

    def set_deadline(self, context: object) -> bool:
        """Set `DEADLINE` in the current `contextvars` context, before the behavior of a call runs.

        Without a deadline it is set to None, because the server may have been started inside a
        `deadline_scope`.

        Returns:
            False if the deadline has passed. An event was emitted, and the caller must refuse the
            call.
        """
        left_s = time_left(context)
        if left_s is None:
            limit_ns = self._timeout_ns
            DEADLINE.set(None if limit_ns == NEVER else time.monotonic_ns() + limit_ns)
            return True
        if left_s <= 0:
            call = CALL.get()
            if call is not None:
                call.is_gone = True
            emit(DeadlineExceededBeforeStart(self._method, late_s(context)))
            return False
        DEADLINE.set(time.monotonic_ns() + min(int(left_s * 1e9), self._timeout_ns))
        return True

    def start_slow_call_timeout(self) -> Timeout | None:
        """Start a timeout that emits `CallSlow`; the caller cancels it at the end of the call.

        Returns:
            None if the method has no threshold, or the timer is stopped or full.
        """
        return None if self._slow is None else start_timeout(self._timer, *self._slow)

    def begin(self) -> int:
        """Count the start of a call with one response; returns its time, for `end`."""
        return 0 if self.counts is None else self.counts.begin()

    def end(
        self,
        began_ns: int,
        timeout: Timeout | None,
        context: object,
        error: BaseException | None = None,
        code_of: Callable[[Any, BaseException | None], str] = served_code,
    ) -> None:
        """Count the end of a call with one response, and cancel its `CallSlow` timeout.

        `code_of` returns its status code for the context, and what the behavior raised or None.
        """
        if timeout is not None:
            timeout.cancel()
        if self.counts is not None:
            self.counts.end(began_ns, code_of(context, error))


class ServedStream(CallEnd):
    """A call that streams responses: counts its end once, and cancels its timeout. Thread-safe.

    If the call ends before its behavior, gRPC drops the response stream, which holds this object:
    its finalizer ends it.
    """

    def __init__(
        self,
        method: ServedMethod,
        context: object,
        code_of: Callable[[Any, BaseException | None], str] = served_code,
    ) -> None:
        """Count the start of the call; `code_of` is as in `ServedMethod.end`."""
        super().__init__(method.counts, method.begin())
        self._method = method
        self._context = context
        self._code_of = code_of
        self._lock = threading.Lock()
        self._timeout: Timeout | None = None

    def start_timeout(self) -> None:
        """Start the timeout that emits `CallSlow`."""
        self._timeout = self._method.start_slow_call_timeout()

    def code(self, error: BaseException | None = None) -> str:
        """Return the name of the status code; "" if the call is not counted, or has ended.

        `error` is what the behavior raised; None if it returned.
        """
        return "" if self._counts is None else self._code_of(self._context, error)

    def end(self, code: str) -> None:
        """End with the name of a status code. Idempotent."""
        timeout, self._timeout = self._timeout, None
        if timeout is not None:
            timeout.cancel()
        with self._lock:
            super().end(code)

    def end_early(self, _: object = None) -> None:
        """End before the behavior has ended. Idempotent.

        The argument is not used; it makes this method a callback of an asyncio task.
        """
        self.end(early_code(self._context))

    def __del__(self) -> None:
        if self._counts is not None or self._timeout is not None:
            self.end_early()
