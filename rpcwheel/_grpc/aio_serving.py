"""State of a `grpc.aio` server and its calls that gRPC does not expose.

Verified on grpcio 1.66.2 and 1.85.1. `tests/unit/_grpc/test_serving.py` and
`tests/contract/idle/test_request_timeout.py` fail if that changes.
"""

from __future__ import annotations

import asyncio
import gc
from itertools import compress
from operator import methodcaller, not_
from typing import TYPE_CHECKING, Any, Final, NoReturn

import grpc
from grpc._cython import cygrpc

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

RECEIVING: Final = ("_handle_exceptions", "_handle_rpc", "_handle_unary_", "_receive_message")
"""Prefixes of the names of gRPC's nested coroutines, the outermost first, while a call waits for
its single request."""


def is_running(server: Any) -> bool | None:
    """Whether a server was started and has not stopped; None if that is not known."""
    is_running = getattr(getattr(server, "_server", None), "is_running", None)
    return None if is_running is None else bool(is_running())


async def abort(
    context: Any,
    code: grpc.StatusCode,
    details: str,
    metadata: tuple[tuple[str, str], ...] = (),
) -> NoReturn:
    """End a call with a status; raises, as `context.abort` does.

    gRPC keeps the error in the call, and the error's traceback keeps the call. Where many calls end
    so, delete the traceback: else 38 objects of each are left to the garbage collector.
    """
    try:
        await context.abort(code, details, metadata)
    except grpc.aio.InternalError:  # the client has ended the call (grpcio 1.85)
        raise asyncio.CancelledError from None  # other errors are logged as those of a handler
    raise AssertionError("abort has not raised an error")


def serves_call(task: asyncio.Task[Any]) -> bool:
    """Whether it is gRPC's own task of a call; another interceptor may run the next in another."""
    return getattr(task.get_coro(), "__name__", "") == RECEIVING[0]


def is_receiving(task: asyncio.Task[Any]) -> bool:
    """Whether a task that serves a call waits for its single request; False if that is not known.

    Decided by the names of the coroutines in which the task is suspended.
    """
    names: list[str] = []
    waiting: Any = None if task.done() else task.get_coro()
    while waiting is not None and len(names) < len(RECEIVING):
        names.append(getattr(waiting, "__name__", ""))
        waiting = getattr(waiting, "cr_await", None)
    return len(names) == len(RECEIVING) and all(map(str.startswith, names, RECEIVING))


def context_of(task: asyncio.Task[Any]) -> Any:
    """Make a context for the call whose request a task waits for; None if that is not possible.

    gRPC makes a context only when the request has arrived. Without a context the task could only be
    canceled, and the client would never get a status. So the state of the call is searched among
    the objects that the coroutine of the task refers to. Call it on the loop, and only while
    `is_receiving` is true: gRPC frees the call later.
    """
    kind, make = getattr(cygrpc, "RPCState", None), getattr(cygrpc, "_ServicerContext", None)
    if kind is None or make is None:
        return None
    for state in gc.get_referents(*gc.get_referents(task.get_coro())):
        if isinstance(state, kind):
            return make(state, None, None, task.get_loop())
    return None


class RunningContext:
    """Asks the context of a call only while its task runs. Any thread.

    After that, these methods crash the process (SIGSEGV, grpcio 1.85), and a blocking handler may
    begin then, or run for longer.
    """

    __slots__ = ("_context", "_task")

    def __init__(self, task: asyncio.Task[Any] | None, context: Any) -> None:
        self._task = task
        self._context = context

    def peer(self) -> str:
        """Return the address of the client; "" if the call has ended."""
        return self._ask("peer") or ""

    def auth_context(self) -> Mapping[str, Iterable[bytes]]:
        """Return what is known of the client; nothing if the call has ended."""
        return self._ask("auth_context") or {}

    def _ask(self, method: str) -> Any:
        # Functions in C keep the interpreter's lock: no loop ends the task after the check.
        tasks = () if self._task is None else (self._task,)
        running = compress((self._context,), map(not_, map(methodcaller("done"), tasks)))
        return next(map(methodcaller(method), running), None)
