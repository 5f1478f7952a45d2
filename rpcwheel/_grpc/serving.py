"""What a threaded server of grpc knows of the calls it serves and does not show.

A server takes calls in on one thread, and hands each to a thread of its pool, where it waits for a
free one, then for its request, and only then is the handler called. A `Door` stands in between, and
tells of a call as soon as it was taken in. It is what grpc asks a behavior for by the name of
`experimental_thread_pool`.

Proved on grpcio 1.60 and 1.85; `tests/legacy/_grpc/test_serving.py` tells if that changes. Where it
is another's context or server, there is a plainer way, or nothing is known.
"""

from __future__ import annotations

import weakref
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

import grpc
import grpc._server as grpc_server
from grpc._cython import cygrpc

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable
    from concurrent.futures import Future

    from .handlers import Behavior

__all__ = [
    "Door",
    "calls_held",
    "end_call",
    "has_ended",
    "has_receiving_token",
    "is_plain",
    "is_receiving",
    "is_running",
    "pool_of",
    "services_of",
]

T = TypeVar("T")

BY_GRPC: Final = "experimental_thread_pool"
"""Of a behavior: the pool in which it is to run."""

RECEIVING: Final = "_RECEIVE_MESSAGE_TOKEN"
"""The token in `due` of a call's state while the server waits for a message of the client."""


class Ends(Protocol):
    """What is told when a call can't be served after all."""

    def ended(self) -> None:
        """It is over."""


def end_call(
    context: Any,
    details: str,
    code: grpc.StatusCode = grpc.StatusCode.UNAVAILABLE,
) -> None:
    """End a call that is being served: the client gets the code and these details.

    Its handler sees what it would see if the client had cancelled. Any thread; waits for nothing. A
    context without grpc's own call is cancelled, which its client takes for CANCELLED.
    """
    call = getattr(getattr(context, "_rpc_event", None), "call", None)
    if call is None:
        context.cancel()
    else:
        call.cancel(code.value[0], details)


def has_receiving_token() -> bool:
    """Whether gRPC has the private token that `is_receiving` looks for."""
    return hasattr(grpc_server, RECEIVING)


def is_receiving(context: Any) -> bool:
    """Whether the server waits for a message from the client; False if that can't be known."""
    due = getattr(getattr(context, "_state", None), "due", ())
    return has_receiving_token() and getattr(grpc_server, RECEIVING) in due


def is_plain(context: grpc.ServicerContext) -> bool:
    """Whether it is sure that the connection of a call is plaintext. Either world, any context."""
    try:
        kinds = context.auth_context().get("transport_security_type", ())
        return list(kinds) == [b"insecure"]
    except Exception:  # noqa: BLE001 - another's context, which does not tell: it is not sure
        return False


def pool_of(server: object) -> weakref.ref[Any] | None:
    """The pool in which a server runs its calls, held weakly; None if that can't be known."""
    pool = getattr(getattr(server, "_state", None), "thread_pool", None)
    return None if pool is None else weakref.ref(pool)


def is_running(server: object) -> bool | None:
    """Whether a server was started and is not over; None if that can't be known."""
    stage = getattr(getattr(server, "_state", None), "stage", None)
    return None if stage is None else stage is not grpc_server._ServerStage.STOPPED  # noqa: SLF001


def has_ended(server: object) -> bool:
    """Whether it is known that a server was stopped, and so can't be started again."""
    ended = getattr(getattr(server, "_state", None), "termination_event", None)
    return ended is not None and ended.is_set()


def services_of(server: object) -> tuple[str, ...]:
    """The names of the services that a server has handlers for; () if none can be known."""
    state = getattr(server, "_state", None)
    named = [
        handler.service_name()
        for handler in tuple(getattr(state, "generic_handlers", ()))
        if callable(getattr(handler, "service_name", None))
    ]
    methods = tuple(getattr(state, "registered_method_handlers", ()))
    return tuple(dict.fromkeys([*named, *(method.split("/")[1] for method in methods)]))


def calls_held(server: object) -> int | None:
    """How many calls a server has taken in that are not over; None while it takes one in.

    0 if that can't be known. Those that it refuses count as long as that takes.
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


class Door(ThreadPoolExecutor):
    """What stands before a server's pool for one behavior. It has no threads of its own.

    It is a `ThreadPoolExecutor` because grpc takes nothing else there.
    """

    def __init__(
        self,
        pool: Callable[[], Any],
        accept: Callable[[grpc.ServicerContext], Ends | None],
        here: threading.local,
    ) -> None:
        """Stand before a pool.

        Args:
            pool: Gives that of the server, or None if it is gone.
            accept: Told of each call that was taken in, on the thread that takes them in.
            here: Has what `accept` gave, as `call`, where the behavior runs.
        """  # not the base's, which would make what threads need
        self._pool = pool
        self._accept = accept
        self._here = here

    @classmethod
    def before(
        cls,
        behavior: Behavior,
        pool: weakref.ref[Any],
        accept: Callable[[grpc.ServicerContext], Ends | None],
        here: threading.local,
    ) -> None:
        """Put one before a behavior, and before the pool of its own if it has one."""
        own = getattr(behavior, BY_GRPC, None)
        if isinstance(own, ThreadPoolExecutor):
            setattr(behavior, BY_GRPC, cls(lambda: own, accept, here))
        else:
            setattr(behavior, BY_GRPC, cls(pool, accept, here))

    def submit(self, run: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """Tell of the call, and hand it on."""
        pool = self._pool()
        if pool is None:
            raise RuntimeError("the pool of the server is gone")
        call = None
        for event, state in pairwise(args):
            if isinstance(event, cygrpc.RequestCallEvent):
                call = self._accept(grpc_server._Context(event, state, None))  # noqa: SLF001
                break
        try:
            future: Future[T] = pool.submit(self._run, call, run, *args, **kwargs)
        except BaseException:
            if call is not None:
                call.ended()
            raise
        return future

    def _run(self, call: object, run: Callable[..., T], /, *args: object, **kwargs: object) -> T:
        self._here.call = call
        try:
            return run(*args, **kwargs)
        finally:
            self._here.call = None

    def shutdown(self, *_: object, **__: object) -> None:
        """Nothing: the pool is the user's."""
