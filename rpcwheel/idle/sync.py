"""The idle connections of a threaded server of grpc.

A call is open from where the server takes it in, also while it waits for a thread or its request,
until grpc says that it has ended, its status on the way to the client: `context.add_callback`. Both
are on the one thread that takes calls in. What runs there takes a lock for a few assignments.

That is so from when the table has its detector, and if no interceptor before the table makes
handlers of its own. Else a call is open from where its handler begins, and as long as the server
has calls that the table does not know, connections that they may be on are kept. Proved on grpcio
1.60 and 1.85.
"""

from __future__ import annotations

import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Self

import grpc

from rpcwheel._grpc.handlers import behavior_of, is_pushing, kind_of
from rpcwheel._grpc.serving import (
    ObservedPool,
    calls_held,
    end_call,
    has_receiving_token,
    is_plain,
    is_receiving,
    pool_of,
)

from .core import NOTHING
from .detector import Detector
from .entry import Call
from .policy import IDLE_TIMEOUT_S
from .table import HEARTBEAT_KEY, Connections, late_details

if TYPE_CHECKING:
    import weakref
    from collections.abc import Callable, Iterable, Iterator

    from rpcwheel._grpc.handlers import Behavior
    from rpcwheel.durations import Duration
    from rpcwheel.rpc import Kind

    from .entry import Connection
    from .table import Method

__all__ = ["ConnectionTable", "IdleConnectionDetector"]

PAUSE_NS: Final = 50_000_000
"""What the thread that takes calls in is given for those that have come."""

LAG_NS: Final = 50_000_000
"""A pause that is longer by this was none: somebody had the interpreter all the time."""


class ConnectionTable(Connections, grpc.ServerInterceptor):
    """The connections of one `grpc.server`, as its calls show them: one of its interceptors.

    Give it first: calls that an interceptor before it refuses are not seen, and do not count.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._pool: weakref.ref[Any] | None = None
        self._here = threading.local()

    def look_at_the_pool(self, pool: weakref.ref[Any] | None) -> None:
        """See calls as they are handed to it; for the detector."""
        self._pool = pool
        self.forget_made()

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], grpc.RpcMethodHandler | None],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler | None:
        """Have a call seen; for the server."""
        handler = continuation(handler_call_details)
        if handler is None:
            return None
        return self.around(handler, handler_call_details.method, self._wrapped, self._made_ready)

    def _made_ready(self, handler: grpc.RpcMethodHandler, method: Method) -> None:
        behavior = behavior_of(handler)
        if self._pool is not None and behavior is not None:
            kind = kind_of(handler)
            streams = kind.streams_requests or kind.streams_responses
            accept = partial(
                self._accept,
                method=method,
                streams=streams,
                awaits_request=not kind.streams_requests,
            )
            ObservedPool.install(behavior, self._pool, accept, self._here)

    def _wrapped(self, kind: Kind, behavior: Behavior, method: Method) -> Behavior:
        if kind.streams_responses and is_pushing(behavior):
            return self._pushing(kind, behavior, method)
        if kind.streams_requests or kind.streams_responses:
            return self._streaming(kind, behavior, method)
        return self._unary(behavior, method)

    def _unary(self, behavior: Behavior, method: Method) -> Behavior:
        def serve(request: object, context: grpc.ServicerContext) -> object:
            call = self._begin(context, method, streams=False)
            answer = behavior(request, context)
            if call is not None:
                call.answered = True
            return answer

        return serve

    def _streaming(self, kind: Kind, behavior: Behavior, method: Method) -> Behavior:
        def serve(request: Any, context: grpc.ServicerContext) -> object:
            call = self._begin(context, method, streams=True)
            if call is None:
                return behavior(request, context)
            if kind.streams_requests:
                request = _Requests(request, call)
            else:
                call.read()
            answer = behavior(request, context)
            if kind.streams_responses:
                return _Answers(answer, call)
            call.wrote()
            return answer

        return serve

    def _pushing(self, kind: Kind, behavior: Behavior, method: Method) -> Behavior:
        def serve(
            request: Any,
            context: grpc.ServicerContext,
            push: Callable[[object], None],
        ) -> object:
            call = self._begin(context, method, streams=True)
            if call is None:
                return behavior(request, context, push)
            if kind.streams_requests:
                request = _Requests(request, call)
            else:
                call.read()

            def pushed(answer: object) -> None:
                if answer is not None:  # None ends the stream
                    call.wrote()
                push(answer)

            return behavior(request, context, pushed)

        return serve

    def _begin(
        self, context: grpc.ServicerContext, method: Method, *, streams: bool
    ) -> _Served | None:
        """Note that a handler is called; None if it can't be told where the call comes from."""
        call: _Served | None = getattr(self._here, "call", None)
        if call is not None:
            self._here.call = None
            return call
        return self._accept(context, method, streams=streams)

    def _accept(
        self,
        context: grpc.ServicerContext,
        method: Method,
        *,
        streams: bool,
        awaits_request: bool = False,
    ) -> _Served | None:
        """Note that a call begins; None if it can't be told where it comes from."""
        call = None
        try:
            beats = method.heartbeat or _is_heartbeat(context.invocation_metadata())
            peer = context.peer()
            if not peer:  # its client has gone
                return None
            call = _Served(self, context, peer, streams, beats)
            call.awaits_request = awaits_request
            if not context.add_callback(call.ended):
                call.ended()
        except Exception:  # noqa: BLE001 - another's context; the detector tells it, and is careful
            self.has_hidden()
            if call is not None:
                call.ended()
            return None
        call.ask_what_it_is()
        return call

    def end_late_requests(self, limit_ns: int) -> None:
        """End calls that have waited for their single request for `limit_ns`; for the detector."""
        if not has_receiving_token():
            self.can_end_late_requests = False
            return
        with self.lock:
            calls = [call for entry in self.entries() for call in entry.calls]
        now_ns = self.now_ns()
        for call in calls:
            if isinstance(call, _Served) and call.receiving_ns(now_ns) >= limit_ns:
                end_call(call.context, late_details(limit_ns), grpc.StatusCode.DEADLINE_EXCEEDED)


class _Served(Call):
    """A call that is served in a thread."""

    __slots__ = ("_receives_since_ns", "awaits_request", "context")

    def __init__(
        self,
        connections: Connections,
        context: grpc.ServicerContext,
        peer: str,
        streams: bool,
        heartbeat: bool,
    ) -> None:
        self.context = context
        self.awaits_request = False
        """Whether the server must receive a single request before it can call the handler."""
        self._receives_since_ns: int | None = None
        super().__init__(connections, peer, streams=streams, heartbeat=heartbeat)

    def ask_what_it_is(self) -> None:
        """Whether its connection is plaintext, which a call alone can know; the first is asked."""
        if self._connections.is_new(self):
            self.entry.seen.plain = is_plain(self.context)

    def receiving_ns(self, now_ns: int) -> int:
        """Return how long the call has waited for its single request; 0 if it does not wait for it.

        Counted from the first call of this method that finds it waiting. A call that waits for a
        free thread does not wait for its request: gRPC receives the request on that thread.
        """
        if not (self.awaits_request and is_receiving(self.context)):
            return 0
        if self._receives_since_ns is None:
            self._receives_since_ns = now_ns
        return now_ns - self._receives_since_ns

    def finish(self, details: str) -> None:
        end_call(self.context, details)


def _is_heartbeat(metadata: Iterable[tuple[str, str | bytes]]) -> bool:
    for key, _ in metadata:  # noqa: SIM110 - `any` takes three times as long
        if key == HEARTBEAT_KEY:
            return True
    return False


class _Requests:
    """The messages of a request stream, each seen as the handler takes it."""

    __slots__ = ("_call", "_requests")

    def __init__(self, requests: Iterator[object], call: Call) -> None:
        self._requests = requests
        self._call = call

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> object:
        request = next(self._requests)
        self._call.read()
        return request

    def next(self) -> object:
        """As `next(...)` on it; grpc's own has it too."""
        return next(self)

    def __getattr__(self, name: str) -> object:
        return getattr(self._requests, name)


class _Answers:
    """The messages of a response stream, each seen as grpc takes it."""

    __slots__ = ("_answers", "_call")

    def __init__(self, answers: Iterator[object], call: Call) -> None:
        self._answers = answers
        self._call = call

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> object:
        answer = next(self._answers)
        self._call.wrote()
        return answer


class IdleConnectionDetector(Detector):
    """Closes the connections of a `grpc.server` that do nothing any more.

        connections = ConnectionTable()
        server = grpc.server(pool, interceptors=[connections])
        port = server.add_insecure_port("[::]:50051")
        with IdleConnectionDetector(server, 180.0, connections=connections, ports=port):
            server.start()
            server.wait_for_termination()

    It ends with the server, or by `close()`. What it needs of the system is Linux; elsewhere, and
    for unix sockets, it tells of idle connections and closes none.
    """

    def __init__(
        self,
        server: grpc.Server,
        idle_timeout: Duration | None = IDLE_TIMEOUT_S,
        *,
        connections: ConnectionTable,
        **settings: Any,
    ) -> None:
        if isinstance(server, grpc.aio.Server) or not hasattr(server, "wait_for_termination"):
            raise TypeError(f"server must be what grpc.server() gave, not {server!r}")
        if not isinstance(connections, ConnectionTable):
            raise TypeError(
                "connections must be the ConnectionTable of rpcwheel.idle among the server's "
                f"interceptors, not {connections!r}"
            )
        self._asked_ns = connections.heard_ns
        super().__init__(server, idle_timeout, connections=connections, **settings)
        connections.look_at_the_pool(pool_of(server))

    __init__.__doc__ = Detector.__init__.__doc__

    def _is_over(self) -> bool:
        server = self._server()
        return server is None or not server.wait_for_termination(timeout=0)  # type: ignore[attr-defined]

    def _settle(self) -> bool:
        """Give the thread that takes calls in a while; no such while if it was not ours either."""
        began_ns = time.monotonic_ns()
        time.sleep(PAUSE_NS / 1e9)
        if time.monotonic_ns() - began_ns >= PAUSE_NS + LAG_NS:
            return False
        self._hear(began_ns)
        return True

    def _look(self) -> None:
        asked_ns, self._asked_ns = self._asked_ns, time.monotonic_ns()
        self._hear(asked_ns)
        super()._look()

    def _hear(self, asked_ns: int) -> None:
        """Note that what had come in by then is known, if it is."""
        if self._all_known():
            self._connections.heard_ns = max(asked_ns, self._connections.heard_ns)

    def _all_known(self) -> bool:
        """Whether the table knows all the calls that the server has."""
        held = calls_held(self._server())
        return held is not None and held <= self._connections.open_calls

    def _coming_ago_ns(self, settled: bool) -> int:
        if settled and self._all_known():
            return NOTHING
        return time.monotonic_ns() - self._connections.heard_ns

    def check(self) -> list[Connection]:
        """Look now, and close what is to be closed.

        Returns:
            The connections that are idle; none after `close()`. Those that are closed are so within
            the next tenths of a second.

        Any thread; waits for a look that is under way. Milliseconds for a thousand connections.
        """
        return self._round()

    def close(self) -> None:
        """Look no more; afterwards no connection is touched. Idempotent, any thread."""
        self._stop()
        self._free()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
