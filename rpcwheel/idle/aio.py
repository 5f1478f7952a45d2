"""Idle connections of a `grpc.aio.server`: `ConnectionTable` and `IdleConnectionDetector`.

    from rpcwheel.idle.aio import ConnectionTable, IdleConnectionDetector

    connections = ConnectionTable()
    server = grpc.aio.server(interceptors=[connections])
    port = server.add_insecure_port("[::]:50051")
    async with IdleConnectionDetector(server, 180.0, connections=connections, ports=port):
        await server.start()
        await server.wait_for_termination()

Calls are observed on the event loop. Sockets are examined on a worker thread, so that no call waits
for that.

A call is in flight from when its handler begins until its task has ended: then its status has been
sent. It is ended by `abort` from another task, which sends the status at once, whatever the handler
waits for; the handler gets `CancelledError`, as if the client had left. A plain function in a pool
cannot be ended so, and it is not known when its response has been sent: its call is in flight as
long as it runs, and the client sees the end of the connection.

What a call holds in gRPC is freed when its task has ended, and to use it afterwards corrupts memory
(`rpc_state.call`, grpcio 1.85). So the task is checked right before: on the loop, or by
`RunningContext`.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
import weakref
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import grpc

from rpcwheel._concurrency.closing import AsyncClosing
from rpcwheel._concurrency.loop import call_on_loop, on_worker, running_loop
from rpcwheel._grpc.aio_serving import (
    RunningContext,
    context_of,
    is_receiving,
    is_running,
    serves_call,
)
from rpcwheel._grpc.handlers import behavior_of, kind_of, with_behavior

from .detector import DetectorBase
from .table import Requests, Responses, ServedCall, Table, late_request_details

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable

    from rpcwheel._grpc.handlers import Behavior
    from rpcwheel.durations import Duration
    from rpcwheel.rpc import Kind
    from rpcwheel.timer.api import Timer

    from .policy import IdlePolicy
    from .table import Connection

    Continuation = Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler | None]]
    Task = asyncio.Task[Any]
    Begin = Callable[[bool, Any], "_Call | None"]

__all__ = ["ConnectionTable", "IdleConnectionDetector"]

PAUSE_S: Final = 0.05
"""Time for the loop to take calls that have arrived; a worker thread waits for it."""

MAX_DELAY_S: Final = 0.05
"""If the loop is later than this, calls may have arrived that no interceptor has seen."""

LOOP_ROUNDS: Final = 4
"""A call that gRPC has accepted needs two rounds of the loop until its interceptor runs; a loop in
which something else takes long may need more."""


class ConnectionTable(grpc.aio.ServerInterceptor):
    """The server interceptor that shows an `IdleConnectionDetector` the calls of its server.

    Give it first: calls that an interceptor before it refuses do not count as use.
    """

    def __init__(self) -> None:
        self._table = Table()
        self._arriving: dict[Task, int] = {}
        """Calls whose handler has not begun, with the `accounted_ns` of when each was seen. The
        time when it was seen says less, as the loop may have been late."""

    def intercept_service(  # type: ignore[override]  # grpc.aio takes None as grpc does
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Awaitable[grpc.RpcMethodHandler | None]:
        """Observe a call; called by the server.

        Raises:
            TypeError: It is a `grpc.server`, which would take a coroutine for a handler, and end
                the thread that accepts calls.
        """
        if running_loop() is None:
            raise TypeError(
                "this ConnectionTable is for grpc.aio.server(), and this is a grpc.server(); use "
                "that of rpcwheel.idle"
            )
        return self._intercept(continuation, handler_call_details)

    async def _intercept(
        self, continuation: Continuation, details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler | None:
        handler = await continuation(details)
        if handler is None:
            return None
        behavior, task = behavior_of(handler), asyncio.current_task()
        if behavior is None or task is None:
            return handler
        self._table.has_seen_calls = True
        self._arriving[task] = self._table.accounted_ns
        task.add_done_callback(self._remove_arriving)
        begin = partial(self._begin, weakref.ref(task), serves_call(task), details)
        # grpc.aio checks these conditions in this order to decide how to call a behavior.
        if inspect.iscoroutinefunction(behavior):
            observe = _observe_coroutine
        elif inspect.isasyncgenfunction(behavior):
            observe = _observe_generator
        else:
            observe = _observe_plain_function
        return with_behavior(handler, observe(kind_of(handler), behavior, begin))

    def _remove_arriving(self, task: Task) -> None:
        self._arriving.pop(task, None)

    def _begin(
        self,
        reference: weakref.ref[Task],
        ends_with_call: bool,
        details: Any,
        streams: bool,
        context: Any,
    ) -> _Call | None:
        """Note that a call begins; None if its connection is not known. Any thread."""
        table, call, task, loop = self._table, None, reference(), running_loop()
        if loop is None and not ends_with_call:  # so it is not known whether the call has ended
            table.hidden_call_ns = table.now_ns()
            return None
        try:
            # Details of another library's interceptor may have no metadata.
            metadata = getattr(details, "invocation_metadata", None) or ()
            heartbeat = table.is_heartbeat(details.method, metadata)
            # A handler on the loop runs in the task of the call, or in one that this waits for.
            running = RunningContext(asyncio.current_task() if loop else task, context)
            peer = running.peer()
            if peer:  # empty if the client has gone, or the call has ended
                # Only the loop may follow the task. What a pool runs is in flight as long as it
                # runs, as its context has no way to end it.
                followed = task if task and task.get_loop() is loop else None
                call = _Call(table, peer, followed, context, streams, heartbeat)
                call.describe(running, metadata)
            if task is not None:  # after the call was counted
                self._remove_arriving(task)
        except Exception:  # noqa: BLE001 - a context of another package; the detector reports it
            table.hidden_call_ns = table.now_ns()
            if call is not None:
                call.note_end()
            return None
        return call


def _observe_coroutine(kind: Kind, behavior: Behavior, begin: Begin) -> Behavior:
    """Wrap a coroutine function: one response, or streams by `context.read()` and `write()`."""
    streams = kind.streams_requests or kind.streams_responses

    async def serve(request: Any, context: Any) -> object:
        call = begin(streams, context)
        if call is None:
            return await behavior(request, context)
        try:
            if streams:
                request, context = _count_messages(kind, request, call), _Context(context, call)
            response = await behavior(request, context)
            if not kind.streams_responses:
                call.note_write()
            return response
        finally:
            call.note_return()

    return serve


def _observe_generator(kind: Kind, behavior: Behavior, begin: Begin) -> Behavior:
    async def serve(request: Any, context: Any) -> AsyncGenerator[object, None]:
        call = begin(True, context)
        if call is not None:
            request, context = _count_messages(kind, request, call), _Context(context, call)
        responses: AsyncGenerator[object, None] = behavior(request, context)
        try:
            async for response in responses:
                yield response
                if call is not None:
                    call.note_write()
        finally:
            if call is not None:
                call.note_return()
            await responses.aclose()

    return serve


def _observe_plain_function(kind: Kind, behavior: Behavior, begin: Begin) -> Behavior:
    """Wrap a function that grpc.aio runs in a pool, or whose result it iterates there."""
    streams = kind.streams_requests or kind.streams_responses

    def serve(request: Any, context: Any) -> object:
        call = begin(streams, context)
        if call is None:
            return behavior(request, context)
        try:
            response = behavior(
                _count_messages(kind, request, call) if streams else request, context
            )
            if kind.streams_responses:
                return Responses(iter(response), call)
            call.note_write()
        except BaseException:
            call.note_return()
            raise
        call.note_return()
        return response

    return serve


def _count_messages(kind: Kind, request: Any, call: ServedCall) -> Any:
    """The argument for the handler: the one request, or a stream that counts its messages."""
    if kind.streams_requests:
        return Requests(request, call)
    call.note_read()
    return request


class _Context:
    """gRPC's context, with `read` and `write` that count messages."""

    __slots__ = ("_rpcwheel_call", "_rpcwheel_context")

    def __init__(self, context: Any, call: ServedCall) -> None:
        object.__setattr__(self, "_rpcwheel_context", context)
        object.__setattr__(self, "_rpcwheel_call", call)

    async def read(self) -> object:
        message = await self._rpcwheel_context.read()
        if message is not grpc.aio.EOF:
            self._rpcwheel_call.note_read()
        return message

    async def write(self, message: object) -> None:
        await self._rpcwheel_context.write(message)
        self._rpcwheel_call.note_write()

    def add_done_callback(self, callback: Callable[[Any], object]) -> None:
        """Call `callback` at the end of the call, with the context that the handler has."""
        self._rpcwheel_context.add_done_callback(lambda _: callback(self))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rpcwheel_context, name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self._rpcwheel_context, name, value)


class _Call(ServedCall):
    """A call that is served by a task, or in a pool."""

    __slots__ = ("_context", "_ending", "_task")

    def __init__(
        self,
        table: Table,
        peer: str,
        task: Task | None,
        context: Any,
        streams: bool,
        heartbeat: bool,
    ) -> None:
        self._task = task
        self._context: Any = None if task is None else context
        self._ending: Task | None = None
        super().__init__(table, peer, streams=streams, heartbeat=heartbeat)
        if task is not None:
            task.add_done_callback(self._task_ended)

    def _task_ended(self, _: Task) -> None:
        self.note_end()
        self._task = self._context = None  # no cycle: what a call holds is freed at once

    def takes_no_responses(self) -> bool:
        task = self._task  # its callbacks come later than its end
        return self.is_over or (task is not None and task.done())

    def note_return(self) -> None:
        if self._task is None:  # nothing else reports the end of the call
            self.note_end()

    def finish(self, details: str) -> None:
        task = self._task
        if task is not None:
            call_on_loop(task.get_loop(), self._finish, task, details)

    def _finish(self, task: Task, details: str) -> None:
        """End the call, on the loop. Begin to send the status before the handler is cancelled."""
        is_done = getattr(self._context, "done", None)  # a plain function's context has none
        if is_done is not None and not is_done():
            loop = task.get_loop()
            self._ending = loop.create_task(self._abort(task, is_done, details))
            loop.call_soon(task.cancel)

    async def _abort(self, task: Task, is_done: Callable[[], bool], details: str) -> None:
        if task.done() or is_done():
            return
        with suppress(Exception):  # `abort` raises; if it failed, the socket is shut down next
            await self._context.abort(grpc.StatusCode.UNAVAILABLE, details)


class IdleConnectionDetector(DetectorBase, AsyncClosing):
    """The detector of a `grpc.aio.server`: lists its connections and closes those that are idle.

    Create it on the server's loop. It ends with the server, or by `close()`. Connections are closed
    on Linux, and only TCP connections; elsewhere, and for unix sockets, idle connections are
    reported and not closed.
    """

    def __init__(
        self,
        server: grpc.aio.Server,
        policy: IdlePolicy | Duration | None = None,
        *,
        connections: ConnectionTable,
        ports: int | str | Iterable[int | str] | None = None,
        timer: Timer | None = None,
    ) -> None:
        """Check the connections; arguments and errors as in `rpcwheel.idle.IdleConnectionDetector`.

        Raises:
            RuntimeError: No event loop runs.
            TypeError: The server or the table is not one of `grpc.aio`.
        """
        self._loop = asyncio.get_running_loop()
        self._has_run = False
        if isinstance(server, grpc.Server) or not hasattr(server, "wait_for_termination"):
            raise TypeError(f"server must be what grpc.aio.server() gave, not {server!r}")
        if not isinstance(connections, ConnectionTable):
            raise TypeError(
                "connections must be the ConnectionTable of rpcwheel.idle.aio among the server's "
                f"interceptors, not {connections!r}"
            )
        self._arriving = connections._arriving
        self._receiving: weakref.WeakKeyDictionary[Task, int] = weakref.WeakKeyDictionary()
        """Calls that wait for their single request, and when they were first found waiting."""
        self._ending: set[Task] = set()
        """Tasks that end calls, which the loop does not keep alive."""
        self._can_end_late_requests = True
        super().__init__(server, policy, table=connections._table, ports=ports, timer=timer)

    def _check_server_ended(self) -> bool:
        running = is_running(self._server())
        self._has_run = self._has_run or bool(running)
        return (
            super()._check_server_ended()
            or self._loop.is_closed()
            or (self._has_run and running is False)
        )

    def _pause(self) -> bool:
        accounted = threading.Event()
        if not self._account_on_loop(accounted.set):  # closed: it accepts no calls
            return True
        return accounted.wait(PAUSE_S + MAX_DELAY_S)

    def _account_for_calls(self) -> None:
        self._account_on_loop(lambda: None)

    def _account_on_loop(self, done: Callable[[], object]) -> bool:
        """Have the loop note that it has seen all calls that have arrived by now.

        Returns:
            False if the loop is closed.
        """
        loop, table, now_ns = self._loop, self._table, time.monotonic_ns()

        def wait_for_rounds(count: int) -> None:
            if count:
                loop.call_soon(wait_for_rounds, count - 1)
                return
            table.accounted_ns = max(table.accounted_ns, now_ns)
            done()

        return call_on_loop(loop, loop.call_later, PAUSE_S, wait_for_rounds, LOOP_ROUNDS)

    def _unknown_calls_since_ns(self, paused: bool) -> int | None:
        # Without a pause, not even all arriving calls are known.
        default = None if paused else self._table.accounted_ns
        return min(list(self._arriving.values()), default=default)

    def _end_late_requests(self, limit_ns: int) -> bool:
        now_ns, since_by_task = self._table.now_ns(), self._receiving
        receiving = [task for task in list(self._arriving) if is_receiving(task)]
        self._receiving = weakref.WeakKeyDictionary(
            {task: since_by_task.get(task, now_ns) for task in receiving}
        )
        for task, since_ns in self._receiving.items():
            if now_ns - since_ns >= limit_ns:
                call_on_loop(task.get_loop(), self._end_late_request, task, limit_ns)
        return self._can_end_late_requests

    def _end_late_request(self, task: Task, limit_ns: int) -> None:
        """Start a task that ends the call. On the loop."""
        details = late_request_details(limit_ns)
        ending = task.get_loop().create_task(self._abort_late_request(task, details))
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)

    async def _abort_late_request(self, task: Task, details: str) -> None:
        if not is_receiving(task):  # the request has arrived meanwhile
            return
        context = context_of(task)
        if context is None:
            self._can_end_late_requests = False
            return
        task.cancel()  # takes effect in the next round of the loop, when `abort` sends the status
        with suppress(Exception):  # `abort` always raises
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, details)

    async def connections(self) -> list[Connection]:
        """List the connections of the server, oldest first; none after `close()`.

        A worker thread scans the sockets of the process, which takes milliseconds for a thousand
        connections, after a check that runs. On systems other than Linux only connections on which
        a call was made are listed, even if they are closed by now.
        """
        return await on_worker(self._list_connections, key=("idle", id(self)))

    async def check(self) -> list[Connection]:
        """Check all connections now, and close idle ones.

        On any loop. A worker thread checks, after a check that runs.

        Returns:
            The idle connections, oldest first; none after `close()`. They are closed within the
            next tenths of a second.
        """
        return await on_worker(lambda: self._run_round(check=True), key=("idle", id(self)))

    def close(self) -> None:
        """End detection. Afterwards no connection is closed. Idempotent, any thread, no wait."""
        self._stop()
