"""Idle connections of a `grpc.server`: the table of its calls, and the detector.

`ConnectionTable` is the interceptor that enters each call into a `Table`. `IdleConnectionDetector`
reads the table and closes idle connections; its rounds are in `DetectorBase`, and this module has
the parts that depend on `grpc.server`.

A connection must not be closed while a call is on it, so each call should be in the table as early
as possible. gRPC accepts calls on one thread and submits each to the server's pool. The detector
lets the table observe the pool (`ObservedPool`). Then a call is in the table from the moment when
gRPC accepts it, also while it waits for a free thread or for its request, until gRPC reports that
it has ended (`context.add_callback`; its status may still be on the way to the client). Both happen
on the thread that accepts calls, so nothing there takes longer than a lock and a few assignments.

Two kinds of calls get into the table only when their handlers begin: those that begin before there
is a detector, and those whose handlers are made by an interceptor before the table. Therefore the
detector compares the number of calls in the table with gRPC's own. While gRPC has more, connections
on which such a call may be are kept. Tried with grpcio 1.60 and 1.85.
"""

from __future__ import annotations

import time
from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import grpc

from rpcwheel._concurrency.closing import Closing
from rpcwheel._grpc.handlers import behavior_of, kind_of, with_behavior
from rpcwheel._grpc.serving import (
    ObservedPool,
    end_call,
    has_receiving_token,
    is_receiving,
    pool_of,
    unfinished_calls,
)

from .detector import DetectorBase
from .table import MAX_METHODS, Requests, Responses, ServedCall, Table, late_request_details

if TYPE_CHECKING:
    import weakref
    from collections.abc import Callable, Iterable

    from rpcwheel._grpc.handlers import Behavior
    from rpcwheel.durations import Duration
    from rpcwheel.timer.api import Timer

    from .policy import IdlePolicy
    from .table import Connection

__all__ = ["ConnectionTable", "IdleConnectionDetector"]

PAUSE_NS: Final = 50_000_000
"""How long the detector sleeps, so that gRPC's thread can accept the calls that have arrived."""

MAX_DELAY_NS: Final = 50_000_000
"""If the detector wakes up later than this, another thread has held the interpreter for the whole
pause. Then gRPC's thread may have accepted nothing, and the pause does not count."""


class ConnectionTable(grpc.ServerInterceptor):
    """The server interceptor that shows an `IdleConnectionDetector` the calls of its server.

    It should be the first interceptor: it does not see calls that an interceptor before it refuses.
    """

    def __init__(self) -> None:
        self._table = Table()
        self._pool: weakref.ref[Any] | None = None
        self._accepted: ContextVar[_Call | None] = ContextVar("rpcwheel_accepted", default=None)
        """The accepted call that is about to be served in this context, set by `ObservedPool`;
        None: it has not reported one."""
        self._observed: dict[str, tuple[grpc.RpcMethodHandler, grpc.RpcMethodHandler] | None] = {}
        """By method, its handler and the observed form of that. None: the method has had two
        handlers, as if an interceptor makes one for each call, so its handlers are not cached."""

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], grpc.RpcMethodHandler | None],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler | None:
        """Observe a call; called by the server."""
        handler = continuation(handler_call_details)
        if handler is None:
            return None
        method = handler_call_details.method
        cached = self._observed.get(method)
        if cached is not None and cached[0] is handler:
            return cached[1]
        is_first_handler = method not in self._observed
        behavior = behavior_of(handler)
        if behavior is None:
            return handler
        observed = self._observe(handler, behavior, method)
        if len(self._observed) >= MAX_METHODS:
            self._observed.clear()
        self._observed[method] = (handler, observed) if is_first_handler else None
        return observed

    def _observe_pool(self, pool: weakref.ref[Any] | None) -> None:
        """Observe calls as they are submitted to the server's thread pool; None: it is unknown."""
        self._pool = pool
        self._observed.clear()

    def _observe(
        self, handler: grpc.RpcMethodHandler, behavior: Behavior, method: str
    ) -> grpc.RpcMethodHandler:
        """Return a handler that enters its calls into the table and counts their messages."""
        kind = kind_of(handler)
        streams = kind.streams_requests or kind.streams_responses

        def serve(request: Any, context: grpc.ServicerContext, *push: Any) -> object:
            call = self._accepted.get()
            if call is None:  # the pool has not reported it
                call = self._accept(context, method, streams, awaits_request=False)
            else:
                self._accepted.set(None)
            if call is None:  # its connection is not known
                return behavior(request, context, *push)
            if kind.streams_requests:
                request = Requests(request, call)
            elif streams:  # the request of a unary call is counted when it begins
                call.note_read()
            if push:  # `experimental_non_blocking`
                return behavior(request, context, partial(_push, push[0], call))
            response = behavior(request, context)
            if kind.streams_responses:
                return Responses(response, call)
            call.note_write()
            return response

        observed = with_behavior(handler, serve)
        if self._pool is not None:
            accept = partial(
                self._accept,
                method=method,
                streams=streams,
                awaits_request=not kind.streams_requests,
            )
            ObservedPool.install(serve, self._pool, accept, self._accepted)
        return observed

    def _accept(
        self,
        context: grpc.ServicerContext,
        method: str,
        streams: bool,
        awaits_request: bool,
    ) -> _Call | None:
        """Enter a call that begins into the table; None if its connection is not known."""
        table, call = self._table, None
        table.has_seen_calls = True
        try:
            metadata = context.invocation_metadata()
            heartbeat = table.is_heartbeat(method, metadata)
            peer = context.peer()
            if not peer:  # the client has gone
                return None
            call = _Call(table, peer, context, streams, heartbeat, awaits_request)
            if not context.add_callback(call.note_end):
                call.note_end()
        except Exception:  # noqa: BLE001 - a context of another package
            table.hidden_call_ns = table.now_ns()  # the detector reports this to the user
            if call is not None:
                call.note_end()
            return None
        call.describe(context, metadata)
        return call


def _push(push: Callable[[object], None], call: ServedCall, response: object) -> None:
    if response is not None:  # None ends the stream
        call.note_write()
    push(response)


class _Call(ServedCall):
    """A call of a `grpc.server`, from its acceptance to its end."""

    __slots__ = ("_receiving_since_ns", "awaits_request", "context")

    def __init__(
        self,
        table: Table,
        peer: str,
        context: grpc.ServicerContext,
        streams: bool,
        heartbeat: bool,
        awaits_request: bool,
    ) -> None:
        self.context = context
        self.awaits_request = awaits_request
        """Whether the server must receive a single request before it can call the handler."""
        self._receiving_since_ns: int | None = None
        super().__init__(table, peer, streams=streams, heartbeat=heartbeat)

    def receiving_ns(self, now_ns: int) -> int:
        """How long the call has waited for its single request; 0 if it does not wait for it.

        Counted from the first call of this method that finds it waiting. A call that waits for a
        free thread does not wait for its request: gRPC receives the request on that thread.
        """
        if not (self.awaits_request and is_receiving(self.context)):
            return 0
        if self._receiving_since_ns is None:
            self._receiving_since_ns = now_ns
        return now_ns - self._receiving_since_ns

    def finish(self, details: str) -> None:
        end_call(self.context, details)


class IdleConnectionDetector(DetectorBase, Closing):
    """The detector of a `grpc.server`: lists its connections and closes those that are idle.

        connections = ConnectionTable()
        server = grpc.server(pool, interceptors=[connections])
        port = server.add_insecure_port("[::]:50051")
        with IdleConnectionDetector(server, 180.0, connections=connections, ports=port) as detector:
            server.start()
            for connection in detector.connections():
                print(connection.peer, connection.user_agent, connection.idle_s)
            server.wait_for_termination()

    It ends with the server, or by `close()`. Connections are closed on Linux, and only TCP
    connections; elsewhere, and for unix sockets, idle connections are reported and not closed.
    """

    def __init__(
        self,
        server: grpc.Server,
        policy: IdlePolicy | Duration | None = None,
        *,
        connections: ConnectionTable,
        ports: int | str | Iterable[int | str] | None = None,
        timer: Timer | None = None,
    ) -> None:
        """Check the connections every `check_interval`, until `close()`.

        Args:
            server: The server; the detector ends with it, and keeps no reference to it.
            policy: An `IdlePolicy`, or seconds: its `idle_timeout`. None: the defaults.
            connections: The table among the server's interceptors. Each server has its own.
            ports: Where the server listens: what `add_insecure_port()` returned, or the address,
                which is better if the process listens at the same port of another address. No
                socket of another address or port is closed. None: wherever a call has come in.
            timer: Any rpcwheel timer; None: `shared_timer()`.

        Raises:
            TypeError: An argument is of a wrong type.
            ConfigurationError: A value is out of range, or another detector has the table.
            OSError: The process has no free descriptor. Two are reserved, so that checks need none.
        """
        if isinstance(server, grpc.aio.Server) or not hasattr(server, "wait_for_termination"):
            raise TypeError(f"server must be what grpc.server() gave, not {server!r}")
        if not isinstance(connections, ConnectionTable):
            raise TypeError(
                "connections must be the ConnectionTable of rpcwheel.idle among the server's "
                f"interceptors, not {connections!r}"
            )
        self._last_check_ns = connections._table.accounted_ns
        super().__init__(server, policy, table=connections._table, ports=ports, timer=timer)
        connections._observe_pool(pool_of(server))

    def connections(self) -> list[Connection]:
        """List the connections of the server, oldest first; none after `close()`.

        Any thread. Scans the sockets of the process, which takes milliseconds for a thousand
        connections, and waits for a check that runs. On systems other than Linux only connections
        on which a call was made are listed, even if they are closed by now.
        """
        return self._list_connections()

    def check(self) -> list[Connection]:
        """Check all connections now, and close idle ones.

        Any thread. Waits for a check that runs; milliseconds for a thousand connections.

        Returns:
            The idle connections, oldest first; none after `close()`. They are closed within the
            next tenths of a second.
        """
        return self._run_round(check=True)

    def close(self) -> None:
        """End detection. Afterwards no connection is closed. Idempotent, any thread."""
        self._stop()
        self._free()

    # Hooks of `DetectorBase`, which documents them. The basis of three of them is
    # `Table.accounted_ns`: all calls whose bytes arrived before this time are in the table.

    def _check_server_ended(self) -> bool:
        server = self._server()
        return server is None or not server.wait_for_termination(timeout=0)  # type: ignore[attr-defined]

    def _pause(self) -> bool:
        began_ns = time.monotonic_ns()
        time.sleep(PAUSE_NS / 1e9)
        if time.monotonic_ns() - began_ns >= PAUSE_NS + MAX_DELAY_NS:
            return False  # the thread that accepts calls did not get the interpreter either
        self._account_until(began_ns)
        return True

    def _account_for_calls(self) -> None:
        # Since the last check gRPC had time to accept the calls that had arrived until then.
        last_ns, self._last_check_ns = self._last_check_ns, time.monotonic_ns()
        self._account_until(last_ns)

    def _unknown_calls_since_ns(self, paused: bool) -> int | None:
        if paused and self._knows_all_calls():
            return None
        return self._table.accounted_ns  # calls that arrived later may be unknown

    def _end_late_requests(self, limit_ns: int) -> bool:
        if not has_receiving_token():
            return False
        with self._table.lock:
            calls = [call for entry in self._table.entries() for call in entry.calls]
        now_ns = self._table.now_ns()
        for call in calls:
            if isinstance(call, _Call) and call.receiving_ns(now_ns) >= limit_ns:
                details = late_request_details(limit_ns)
                end_call(call.context, details, grpc.StatusCode.DEADLINE_EXCEEDED)
        return True

    def _account_until(self, arrived_ns: int) -> None:
        """Note that all calls that arrived before a time are in the table, if all calls are.

        The time, by `time.monotonic_ns`, is so long ago that gRPC has accepted these calls.
        """
        if self._knows_all_calls():
            self._table.accounted_ns = max(arrived_ns, self._table.accounted_ns)

    def _knows_all_calls(self) -> bool:
        """Whether all calls that gRPC has accepted are in the table; False if it can't be known."""
        unfinished = unfinished_calls(self._server())
        return unfinished is not None and unfinished <= self._table.open_calls
