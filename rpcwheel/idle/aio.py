"""The idle connections of a server of grpc.aio: the twins of `ConnectionTable` and the detector.

    from rpcwheel.idle.aio import ConnectionTable, IdleConnectionDetector

    connections = ConnectionTable()
    server = grpc.aio.server(interceptors=[connections])
    port = server.add_insecure_port("[::]:50051")
    async with IdleConnectionDetector(server, 180.0, connections=connections, ports=port):
        await server.start()
        await server.wait_for_termination()

Calls are seen on the loop; the looks at the sockets are a worker's, so that they hold up no call.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
import weakref
from contextlib import suppress
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final, Self

import grpc

from rpcwheel._concurrency.loop import call_on_loop, on_worker, running_loop
from rpcwheel._grpc.aio_serving import context_of, is_receiving, is_running
from rpcwheel._grpc.handlers import behavior_of, kind_of, with_behavior

from .aio_calls import Answers, Context, Served, seen
from .core import NOTHING
from .detector import Detector
from .policy import IDLE_TIMEOUT_S
from .table import HEARTBEAT_KEY, Connections, late_details

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable

    from rpcwheel._grpc.handlers import Behavior
    from rpcwheel.durations import Duration
    from rpcwheel.rpc import Kind

    from .entry import Connection
    from .table import Method

    Continuation = Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler | None]]
    Task = asyncio.Task[Any]

__all__ = ["ConnectionTable", "IdleConnectionDetector"]

PAUSE_S: Final = 0.05
"""What a loop is given for calls that have come in; it is the worker that waits."""

LAG_S: Final = 0.05
"""A loop that is later than this was busy, and may have calls waiting that nobody has seen."""

HOPS: Final = 4
"""From one round of the loop to the next, so many: a call that gRPC has handed over needs two until
its interceptor runs, and a loop in which something else takes long may not have come to them."""

TASK: Final[ContextVar[Callable[[], Task | None]]] = ContextVar(
    "rpcwheel_idle_task", default=lambda: None
)
"""Gives the task that serves the call, wherever an interceptor has its handler run."""


class ConnectionTable(Connections, grpc.aio.ServerInterceptor):
    """The connections of one `grpc.aio.server`, as its calls show them: one of its interceptors.

    Give it first: calls that an interceptor before it refuses are not seen, and do not count.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._arriving: dict[Task, int] = {}
        """Calls whose handler has not begun, and after when each has come in: the `heard_ns` of
        then. When it was seen says less, as the loop may have been late."""
        self._receiving: weakref.WeakKeyDictionary[Task, int] = weakref.WeakKeyDictionary()
        """Calls that wait for their single request, and when they were first found waiting."""
        self._ending: set[Task] = set()
        self._here = threading.local()

    def intercept_service(  # type: ignore[override]  # grpc.aio takes None as grpc does
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Awaitable[grpc.RpcMethodHandler | None]:
        """Have a call seen; for the server.

        Raises:
            TypeError: It is a server of grpc's other world, which would take a coroutine for a
                handler, and end the thread that serves all calls.
        """
        if running_loop() is None:
            raise TypeError(
                "this ConnectionTable is for grpc.aio.server(), and this is a grpc.server(); use "
                "that of rpcwheel.idle"
            )
        return self._intercepted(continuation, handler_call_details)

    async def _intercepted(
        self, continuation: Continuation, details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler | None:
        handler = await continuation(details)
        if handler is None:
            return None
        self.has_intercepted = True
        made = self.around(handler, details.method, self._wrapped)
        task = asyncio.current_task()
        if task is not None:
            itself = weakref.ref(task)
            TASK.set(itself)  # a task that its own context held would be a cycle
            self._arriving[task] = self.heard_ns
            task.add_done_callback(self._arrived)
            if not _begins_on_the_loop(made):
                return self._followed(made, itself)
        return made

    def _followed(
        self,
        handler: Any,
        task: Callable[[], Task | None],
    ) -> grpc.RpcMethodHandler:
        """The handler for this one call, which tells the pool's thread whose task it serves."""
        behavior: Any = behavior_of(handler)

        def begun(request: object, context: object) -> object:
            self._here.task = task
            return behavior(request, context)

        return with_behavior(handler, begun)

    def _arrived(self, task: Task) -> None:
        self._arriving.pop(task, None)

    def end_late_requests(self, limit_ns: int) -> None:
        """End calls that have waited for their single request for `limit_ns`; for the detector."""
        now_ns, known = self.now_ns(), self._receiving
        found = [task for task in list(self._arriving) if is_receiving(task)]
        self._receiving = weakref.WeakKeyDictionary({one: known.get(one, now_ns) for one in found})
        for task, since_ns in self._receiving.items():
            if now_ns - since_ns >= limit_ns:
                call_on_loop(task.get_loop(), self._end_late, task, late_details(limit_ns))

    def _end_late(self, task: Task, details: str) -> None:
        """Start the task that ends the call. On the loop."""
        ending = task.get_loop().create_task(self._abort_late(task, details))
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)

    async def _abort_late(self, task: Task, details: str) -> None:
        if not is_receiving(task):  # the request has arrived meanwhile
            return
        context = context_of(task)
        if context is None:
            self.can_end_late_requests = False
            return
        task.cancel()  # takes effect in the next round of the loop, when `abort` sends the status
        with suppress(Exception):  # `abort` always raises
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, details)

    def coming_ago_ns(self, settled: bool) -> int:
        """That of `Look`, if told whether the loop had a moment for what has come in. Any thread.

        Without one, calls may have come of which not even the begin was seen.
        """
        nothing = None if settled else self.heard_ns
        since_ns = min(list(self._arriving.values()), default=nothing)
        return NOTHING if since_ns is None else time.monotonic_ns() - since_ns

    def _wrapped(self, kind: Kind, behavior: Behavior, method: Method) -> Behavior:
        """The behavior in one of the same nature; asked in the same order as grpc.aio asks."""
        if inspect.iscoroutinefunction(behavior):
            return self._awaited(kind, behavior, method)
        if inspect.isasyncgenfunction(behavior):
            return self._generating(kind, behavior, method)
        return self._plain(kind, behavior, method)

    def _awaited(self, kind: Kind, behavior: Behavior, method: Method) -> Behavior:
        """For one answer, and for streams in the style of `context.read()` and `.write()`."""
        streams = kind.streams_requests or kind.streams_responses

        async def serve(request: Any, context: Any) -> object:
            call = self._begin(context, method, streams=streams)
            if call is None:
                return await behavior(request, context)
            try:
                if streams:
                    request, context = seen(kind, request, call), Context(context, call)
                answer = await behavior(request, context)
                if not kind.streams_responses:
                    call.wrote()
                return answer
            finally:
                call.returned()

        return serve

    def _generating(self, kind: Kind, behavior: Behavior, method: Method) -> Behavior:
        async def serve(request: Any, context: Any) -> AsyncGenerator[object, None]:
            call = self._begin(context, method, streams=True)
            if call is not None:
                request, context = seen(kind, request, call), Context(context, call)
            answers: AsyncGenerator[object, None] = behavior(request, context)
            try:
                async for answer in answers:
                    yield answer
                    if call is not None:
                        call.wrote()
            finally:
                if call is not None:
                    call.returned()
                await answers.aclose()

        return serve

    def _plain(self, kind: Kind, behavior: Behavior, method: Method) -> Behavior:
        """For a function that grpc.aio runs in a pool, or calls, to iterate the result there."""
        streams = kind.streams_requests or kind.streams_responses

        def serve(request: Any, context: Any) -> object:
            call = self._begin(context, method, streams=streams)
            if call is None:
                return behavior(request, context)
            try:
                answer = behavior(seen(kind, request, call) if streams else request, context)
                if kind.streams_responses:
                    return Answers(iter(answer), call)
                call.wrote()
            except BaseException:
                call.returned()
                raise
            call.returned()
            return answer

        return serve

    def _begin(self, context: Any, method: Method, *, streams: bool) -> Served | None:
        """Note that a call begins; None if it can't be told where it comes from."""
        task = TASK.get()()
        call = None
        try:
            beats = method.heartbeat or any(
                key == HEARTBEAT_KEY for key, _ in context.invocation_metadata()
            )
            peer = context.peer()
            if peer:  # else its client has gone
                call = Served(self, peer, streams=streams, heartbeat=beats)
                call.served_by(task, context)
            begun = getattr(self._here, "task", TASK.get())() if task is None else task
            if begun is not None:  # and after the call was counted
                self._arrived(begun)
        except Exception:  # noqa: BLE001 - another's context; the detector tells it, and is careful
            self.has_hidden()
            if call is not None:
                call.ended()
            return None
        return call


def _begins_on_the_loop(handler: grpc.RpcMethodHandler) -> bool:
    """Whether the handler is called there: all but plain functions, which wait for a pool."""
    if kind_of(handler).streams_responses:
        return True
    return inspect.iscoroutinefunction(behavior_of(handler))


class IdleConnectionDetector(Detector):
    """Closes the connections of a `grpc.aio.server` that do nothing any more.

    Made on the server's loop. It ends with the server, or by `close()`. What it needs of the system
    is Linux; elsewhere, and for unix sockets, it tells of idle connections and closes none.
    """

    def __init__(
        self,
        server: grpc.aio.Server,
        idle_timeout: Duration | None = IDLE_TIMEOUT_S,
        *,
        connections: ConnectionTable,
        **settings: Any,
    ) -> None:
        """Begin to look; for the arguments and errors see `rpcwheel.idle.IdleConnectionDetector`.

        Raises:
            RuntimeError: No loop is running.
            TypeError: The server, or the table, is of the other world, or something else.
        """
        self._loop = asyncio.get_running_loop()
        self._ran = False
        if isinstance(server, grpc.Server) or not hasattr(server, "wait_for_termination"):
            raise TypeError(f"server must be what grpc.aio.server() gave, not {server!r}")
        if not isinstance(connections, ConnectionTable):
            raise TypeError(
                "connections must be the ConnectionTable of rpcwheel.idle.aio among the server's "
                f"interceptors, not {connections!r}"
            )
        self._table = connections
        super().__init__(server, idle_timeout, connections=connections, **settings)

    def _is_over(self) -> bool:
        running = is_running(self._server())
        self._ran = self._ran or bool(running)
        return super()._is_over() or self._loop.is_closed() or (self._ran and running is False)

    def _look(self) -> None:
        self._ask(lambda: None)
        super()._look()

    def _settle(self) -> bool:
        """Give the loop a while, in which what has come in before reaches its handler."""
        passed = threading.Event()
        if not self._ask(passed.set):  # closed: nobody takes calls in
            return True
        return passed.wait(PAUSE_S + LAG_S)

    def _ask(self, heard: Callable[[], None]) -> bool:
        """Have the loop say when it has seen what has come in by now; False if it is closed."""
        loop, table, asked_ns = self._loop, self._table, time.monotonic_ns()

        def hop(left: int) -> None:
            if left:
                loop.call_soon(hop, left - 1)
                return
            table.heard_ns = max(table.heard_ns, asked_ns)
            heard()

        return call_on_loop(loop, loop.call_later, PAUSE_S, hop, HOPS)

    def _coming_ago_ns(self, settled: bool) -> int:
        return self._table.coming_ago_ns(settled)

    async def check(self) -> list[Connection]:
        """Look now, and close what is to be closed.

        Returns:
            The connections that are idle; none after `close()`. Those that are closed are so within
            the next tenths of a second.

        On any loop; a worker looks, after a look that is under way.
        """
        return await on_worker(self._round, key=("idle", id(self)))

    def close(self) -> None:
        """Look no more; afterwards no connection is touched. Idempotent, any thread, no wait."""
        self._stop()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()
