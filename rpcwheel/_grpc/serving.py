"""Private state of a `grpc.Server` and its calls.

A server accepts calls on one thread and submits each to its thread pool. There a call waits for a
free thread, then for its request, and only then the handler is called. An `ObservedPool` reports a
call as soon as it is submitted. gRPC takes it from the attribute `experimental_thread_pool` of a
behavior, which is gRPC's name for the function of a method handler.

Verified on grpcio 1.60 and 1.85; `tests/unit/_grpc/test_serving.py` fails if that changes. For
servers and contexts of other packages nothing is known.
"""

from __future__ import annotations

import weakref
from concurrent.futures import ThreadPoolExecutor
from contextvars import Context
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

import grpc
import grpc._server as grpc_server
from grpc._common import STATUS_CODE_TO_CYGRPC_STATUS_CODE
from grpc._cython import cygrpc

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future
    from contextvars import ContextVar

    from .handlers import Behavior

T = TypeVar("T")

POOL_ATTRIBUTE: Final = "experimental_thread_pool"
"""The attribute of a behavior in which gRPC looks for the pool that runs it."""

CORE_CODES: Final = {code.name: core for code, core in STATUS_CODE_TO_CYGRPC_STATUS_CODE.items()}
"""The codes of gRPC's core, by name."""

RECEIVING: Final = "_RECEIVE_MESSAGE_TOKEN"
"""The name of gRPC's token that is in `due` of the state of a call which waits for a message."""


class ObservedCall(Protocol):
    """A call that was reported by an `ObservedPool`."""

    def note_end(self) -> None:
        """Note that the call has ended. The pool calls this only for a call that it refuses."""


def end_call(
    context: Any,
    details: str,
    code: grpc.StatusCode = grpc.StatusCode.UNAVAILABLE,
) -> None:
    """End a call that is being served with a status. Any thread; does not block.

    For the handler it looks as if the client had canceled. A context that is not gRPC's can only be
    canceled: its client gets CANCELLED.
    """
    call = getattr(getattr(context, "_rpc_event", None), "call", None)
    if call is None:
        context.cancel()
    else:
        call.cancel(code.value[0], details)


def has_receiving_token() -> bool:
    """Whether gRPC has the private token that `is_receiving` needs."""
    return hasattr(grpc_server, RECEIVING)


def is_receiving(context: Any) -> bool:
    """Whether the server waits for a message from the client; False if that can't be known."""
    due = getattr(getattr(context, "_state", None), "due", ())
    return has_receiving_token() and getattr(grpc_server, RECEIVING) in due


def pool_of(server: object) -> weakref.ref[Any] | None:
    """A weak reference to the pool in which a server runs its calls; None if it is not known."""
    pool = getattr(getattr(server, "_state", None), "thread_pool", None)
    return None if pool is None else weakref.ref(pool)


def is_running(server: object) -> bool | None:
    """Whether a server was started and has not stopped; None if that is not known.

    True also in the grace period of `stop`.
    """
    stage = getattr(getattr(server, "_state", None), "stage", None)
    return None if stage is None else stage is not grpc_server._ServerStage.STOPPED  # noqa: SLF001


def has_terminated(server: object) -> bool:
    """Whether a server is known to have stopped; it can't be started again."""
    event = getattr(getattr(server, "_state", None), "termination_event", None)
    return event is not None and event.is_set()


def services_of(server: object) -> tuple[str, ...]:
    """The names of the services that a server has handlers for, as far as they are known."""
    state = getattr(server, "_state", None)
    named = [
        handler.service_name()
        for handler in tuple(getattr(state, "generic_handlers", ()))
        if callable(getattr(handler, "service_name", None))
    ]
    methods = tuple(getattr(state, "registered_method_handlers", ()))
    return tuple(dict.fromkeys([*named, *(method.split("/")[1] for method in methods)]))


def unfinished_calls(server: object) -> int | None:
    """The number of calls that a server has accepted and that have not ended.

    Calls that it is about to refuse count too. None if its lock is taken, as while it accepts a
    call. 0 for a server of another package, because nothing is known about its calls.
    """
    state = getattr(server, "_state", None)
    lock, calls = getattr(state, "lock", None), getattr(state, "rpc_states", ())
    if lock is None:
        return 0
    if not lock.acquire(blocking=False):
        return None
    try:
        return len(calls)
    finally:
        lock.release()


class ObservedPool(ThreadPoolExecutor):
    """Reports the calls of one behavior before it submits them to the server's pool.

    It has no threads of its own. It is a `ThreadPoolExecutor` because gRPC requires one there.
    """

    def __init__(
        self,
        pool: Callable[[], Any],
        on_accepted: Callable[[grpc.ServicerContext], ObservedCall | None],
        accepted: ContextVar[Any],
    ) -> None:
        """Wrap a pool.

        Args:
            pool: Returns the pool, or None if it does not exist any more.
            on_accepted: Called with the context of each call on the thread that accepts calls.
            accepted: Gets the result of `on_accepted`, in the `contextvars` context of the call.
        """
        # The constructor of `ThreadPoolExecutor` is not called: there are no threads.
        self._pool = pool
        self._on_accepted = on_accepted
        self._accepted = accepted

    @classmethod
    def install(
        cls,
        behavior: Behavior,
        pool: weakref.ref[Any],
        on_accepted: Callable[[grpc.ServicerContext], ObservedCall | None],
        accepted: ContextVar[Any],
    ) -> None:
        """Wrap the pool of a behavior: its own, or else the server's."""
        own = getattr(behavior, POOL_ATTRIBUTE, None)
        if isinstance(own, ThreadPoolExecutor):
            setattr(behavior, POOL_ATTRIBUTE, cls(lambda: own, on_accepted, accepted))
        else:
            setattr(behavior, POOL_ATTRIBUTE, cls(pool, on_accepted, accepted))

    def submit(self, run: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """Report the call, and submit it unchanged: a `ServerExecutor` reads the arguments too."""
        pool = self._pool()
        if pool is None:
            raise RuntimeError("the pool of the server is gone")
        call, context = None, getattr(run, "__self__", None)
        submitted = submitted_call(args)
        if submitted is not None and isinstance(context, Context):
            call = self._on_accepted(grpc_server._Context(*submitted, None))  # noqa: SLF001
            context.run(self._accepted.set, call)  # gRPC runs the behavior in it
        try:
            future: Future[T] = pool.submit(run, *args, **kwargs)
        except BaseException:
            if call is not None:
                call.note_end()
            raise
        return future

    def shutdown(self, *_: object, **__: object) -> None:
        """Do nothing, as the pool is the user's."""


def submitted_call(args: tuple[Any, ...]) -> tuple[Any, Any] | None:
    """Return the event and the state of a call, from the arguments that gRPC submits to its pool.

    None if they are not those of a call.
    """
    for event, state in pairwise(args):
        if isinstance(event, cygrpc.RequestCallEvent):
            return event, state
    return None


def on_end(state: Any, callback: Callable[[], object]) -> None:
    """Call a function when a call ends that the server has just submitted to its pool.

    Args:
        state: The state of the call.
        callback: Runs on the thread that accepts calls.
    """
    with state.condition:
        state.callbacks.append(callback)


def end_unserved_call(
    event: Any, state: Any, code: str, details: str, metadata: tuple[tuple[str, str], ...]
) -> None:
    """End a call whose handler does not run. Takes no thread, and does not read the request.

    Args:
        event: The event with which the call arrived.
        state: The state of the call. Both are arguments of what gRPC submits to its thread pool.
        code: The name of the status code.
        details: The details of the status.
        metadata: The trailing metadata.
    """
    with state.condition:
        state.trailing_metadata = metadata
        grpc_server._abort(state, event.call, CORE_CODES[code], details.encode())  # noqa: SLF001
