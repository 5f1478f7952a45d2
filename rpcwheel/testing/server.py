"""A gRPC server that fails on command.

    with FlakyServer() as server, kit.channel(server.target) as channel:
        server.fail(times=2)  # the next two calls fail with UNAVAILABLE

Handlers run on threads, for clients of `grpc` and of `grpc.aio` alike.
"""

from __future__ import annotations

import math
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, cast

import grpc

from rpcwheel._concurrency.closing import Closing
from rpcwheel._grpc.calls import checked_metadata
from rpcwheel._grpc.handlers import behavior_of, time_left, with_behavior
from rpcwheel.durations import to_ns, to_seconds
from rpcwheel.errors import ConfigurationError
from rpcwheel.methods import checked_pattern, matches
from rpcwheel.rpc import CODES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from rpcwheel.durations import Duration

    Metadata = tuple[tuple[str, str | bytes], ...]

THREADS: Final = 64
"""How many calls run or are frozen at the same time; others wait for a thread."""


@dataclass(frozen=True, slots=True)
class ReceivedCall:
    """A call that has arrived at a `FlakyServer`."""

    method: str
    """The full name, such as `/shop.Orders/Get`."""

    requests: list[Any]
    """The request messages that the server has read so far. They are bytes, unless the handler has
    a deserializer."""

    metadata: Metadata
    """The metadata that the client has sent."""

    time: float
    """When the call began, on the clock of `time.monotonic()`."""

    time_remaining: float | None
    """Seconds from `time` to the deadline of the client; None without a deadline."""


@dataclass(slots=True, eq=False)
class _Fault:
    """A failure that applies to calls."""

    method: str
    """The full name of the method, or a pattern."""
    left: int | None
    """How many more calls it applies to; None: all."""
    delay_s: float = 0.0
    """How long they wait before their handler runs."""
    loses_response: bool = False
    code: grpc.StatusCode | None = None
    """The status with which they fail before their handler runs; None if they do not."""
    details: str = ""
    trailing_metadata: Metadata = ()


class FlakyServer(Closing):
    """A server on a port of 127.0.0.1 that fails on command. For tests.

    It starts at once. Give it handlers as to a server of gRPC::

        add_OrdersServicer_to_server(Orders(), server)

    A call of a method without a handler begins with its first request message, and gets each
    request message back. gRPC's own services, such as `grpc.health.v1.Health`, are unimplemented
    without a handler.

    `fail`, `freeze`, `delay` and `lose_response` with `times` apply to so many of the next calls,
    in the order in which they were given. Those without `times` apply to all other calls, and the
    last one wins. Only one applies to a call. All apply to heartbeats and health checks too, unless
    they are limited to a `method`.

    Thread-safe, but call `stop`, `start` and `close` on one thread at a time.
    """

    calls: list[ReceivedCall]
    """All calls in the order of their arrival, including failed ones."""

    def __init__(self) -> None:
        self.calls = []
        self._handlers: list[grpc.GenericRpcHandler] = []
        self._faults: list[_Fault] = []
        self._frozen: set[threading.Event] = set()
        self._lock = threading.Lock()
        self._server: grpc.Server | None = None
        # Bound and not listening: while the server is stopped, connections are refused, and the
        # system does not give the port to another program.
        self._reserved = socket.socket()
        self._reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        self._reserved.bind(("127.0.0.1", 0))
        self.port: int = self._reserved.getsockname()[1]
        """The port, the same after `stop` and `start`."""
        self.start()

    @property
    def target(self) -> str:
        """The address for channels: `127.0.0.1:PORT`."""
        return f"127.0.0.1:{self.port}"

    # Handlers

    def add_generic_rpc_handlers(self, handlers: Iterable[grpc.GenericRpcHandler]) -> None:
        """Serve methods with these handlers from now on, as `grpc.Server` does.

        Their functions run on threads, so they must not be coroutine functions.
        """
        self._handlers += handlers

    def add_registered_method_handlers(self, service: str, handlers: Any) -> None:
        """Do nothing: generated code passes the same handlers to `add_generic_rpc_handlers`."""

    # Commands

    def fail(
        self,
        times: int | None = None,
        code: grpc.StatusCode | str = grpc.StatusCode.UNAVAILABLE,
        *,
        method: str = "*",
        details: str = "the test lets this call fail",
        trailing_metadata: Sequence[tuple[str, str | bytes]] = (),
    ) -> None:
        """Let calls fail before their handler runs.

        Args:
            times: How many of the next calls; None for all until `recover`.
            code: The status code or its name.
            method: The full name of the method whose calls fail, or a pattern such as
                `"/shop.Orders/*"`.
            details: The details of the status.
            trailing_metadata: Sent with the status, such as `[("grpc-retry-pushback-ms", "5")]`.

        Raises:
            ConfigurationError: `times`, `code`, `method` or `trailing_metadata` is invalid.
            TypeError: `times` is not an integer.
        """
        name = getattr(code, "name", code)
        if name not in CODES:
            raise ConfigurationError(f"code must be a status code other than OK, not {code!r}")
        try:
            trailing = checked_metadata(trailing_metadata)
        except ConfigurationError as error:
            raise ConfigurationError(f"trailing_metadata: {error}") from None
        code = grpc.StatusCode[name]
        self._add(_Fault(method, times, code=code, details=details, trailing_metadata=trailing))

    def freeze(self, times: int | None = None, *, method: str = "*") -> None:
        """Let calls hang before their handler runs.

        They end when the client cancels them or their deadline passes. Connections remain: pings
        of HTTP/2 are answered.

        Args:
            times: How many of the next calls; None for all until `recover`.
            method: The full name of the method whose calls hang, or a pattern such as
                `"/shop.Orders/*"`.

        Raises:
            ConfigurationError: `times` or `method` is invalid.
            TypeError: `times` is not an integer.
        """
        self._add(_Fault(method, times, math.inf))

    def delay(self, seconds: Duration, times: int | None = None, *, method: str = "*") -> None:
        """Let calls wait before their handler runs.

        Args:
            seconds: Seconds of real time, or a `timedelta`. A `ManualTimer` does not move them.
            times: How many of the next calls; None for all until `recover`.
            method: The full name of the method whose calls wait, or a pattern such as
                `"/shop.Orders/*"`.

        Raises:
            ConfigurationError: `seconds`, `times` or `method` is invalid.
            TypeError: `times` is not an integer, or `seconds` is neither a number nor a
                `timedelta`.
        """
        delay_ns = to_ns(seconds, subject="seconds")
        if delay_ns < 0:
            raise ConfigurationError(f"seconds must not be negative, not {seconds!r}")
        self._add(_Fault(method, times, to_seconds(delay_ns)))

    def lose_response(self, times: int | None = None, *, method: str = "*") -> None:
        """Let handlers run, and calls fail with UNAVAILABLE instead of getting the response.

        As if the connection had been lost right after the server executed the call. A handler
        with a response stream runs until its first response message. If a handler fails, its
        status is sent.

        Args:
            times: How many of the next calls; None for all until `recover`.
            method: The full name of the method whose responses are lost, or a pattern such as
                `"/shop.Orders/*"`.

        Raises:
            ConfigurationError: `times` or `method` is invalid.
            TypeError: `times` is not an integer.
        """
        self._add(_Fault(method, times, loses_response=True))

    def recover(self) -> None:
        """End all failures. Frozen and delayed calls continue with their handler."""
        with self._lock:
            self._faults.clear()
            for go_on in self._frozen:
                go_on.set()

    def stop(self) -> None:
        """Close all connections at once; new ones are refused. Idempotent.

        Calls under way end with UNAVAILABLE.
        """
        server, self._server = self._server, None
        if server is not None:
            server.stop(None).wait()
            self._pool.shutdown(wait=False)

    def start(self) -> None:
        """Serve again on the same port. Idempotent.

        A channel of gRPC connects again after about a second, unless it has other options
        (`rpcwheel.options.channel_options(first_reconnect=0.1)`).
        """
        if self._server is not None:
            return
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="flaky-server")
        self._server = grpc.server(self._pool, options=[("grpc.so_reuseport", 1)])
        self._server.add_generic_rpc_handlers([_Services(self._service)])
        self._server.add_insecure_port(self.target)
        self._server.start()

    def close(self) -> None:
        """Stop, and give the port back. Idempotent."""
        self.stop()
        self._reserved.close()

    def _add(self, fault: _Fault) -> None:
        if fault.left is not None and not isinstance(fault.left, int):
            raise TypeError(f"times must be a whole number or None, not {fault.left!r}")
        if fault.left is not None and fault.left < 1:
            raise ConfigurationError(
                f"times must be 1 or more, or None for all calls, not {fault.left!r}"
            )
        try:
            checked_pattern(fault.method)
        except ConfigurationError as error:
            raise ConfigurationError(f"method: {error}") from None
        with self._lock:
            self._faults.append(fault)

    # Calls

    def _service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        method: str = details.method
        candidates = (handlers.service(details) for handlers in self._handlers)
        handler = next((candidate for candidate in candidates if candidate is not None), None)
        if handler is None:
            handler = grpc.stream_stream_rpc_method_handler(partial(self._echo, method))
            return cast("grpc.RpcMethodHandler", handler)
        behavior: Any = behavior_of(handler)
        is_stream: bool = handler.request_streaming

        def run(request: Any, context: grpc.ServicerContext, *push: Any) -> Any:
            read: list[Any] = [] if is_stream else [request]
            loses_response = self._begin(method, read, context)
            if loses_response and push:
                push = (lambda _: None,)
            response = behavior(_recorded(request, read) if is_stream else request, context, *push)
            if loses_response:
                if handler.response_streaming and not push:
                    next(iter(response), None)
                _lose(context)
            return response

        return with_behavior(handler, run)

    def _echo(
        self, method: str, requests: Iterator[bytes], context: grpc.ServicerContext
    ) -> Iterator[bytes]:
        """Return the request messages, for every kind of call."""
        read = list(islice(requests, 1))
        first = tuple(read)
        loses_response = self._begin(method, read, context)
        if method.startswith("/grpc."):
            context.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
        if loses_response:
            _lose(context)
        yield from first
        yield from _recorded(requests, read)

    def _begin(self, method: str, read: list[Any], context: grpc.ServicerContext) -> bool:
        """Record a call, and do what the commands say. Whether its response is to be lost."""
        metadata = tuple((key, value) for key, value in context.invocation_metadata())
        call = ReceivedCall(method, read, metadata, time.monotonic(), time_left(context))
        go_on = threading.Event()
        with self._lock:
            self.calls.append(call)
            fault = self._next_fault(method)
            if fault is not None and fault.delay_s > 0:
                self._frozen.add(go_on)
        if fault is None or fault.loses_response:
            return fault is not None
        if fault.code is not None:
            context.set_trailing_metadata(fault.trailing_metadata)
            context.abort(fault.code, fault.details)
        if context.add_callback(go_on.set):  # False: the call has ended
            go_on.wait(min(fault.delay_s, threading.TIMEOUT_MAX))
        with self._lock:
            self._frozen.discard(go_on)
        if not context.is_active():
            context.abort(grpc.StatusCode.CANCELLED, "the call has ended while it was frozen")
        return False

    def _next_fault(self, method: str) -> _Fault | None:
        faults = [fault for fault in self._faults if matches(fault.method, method)]
        for fault in faults:
            if fault.left is not None:
                fault.left -= 1
                if not fault.left:
                    self._faults.remove(fault)
                return fault
        return faults[-1] if faults else None


class _Services(grpc.GenericRpcHandler):
    """All methods of a server."""

    def __init__(self, find: Callable[[grpc.HandlerCallDetails], grpc.RpcMethodHandler]) -> None:
        self._find = find

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        """Return the handler of a method."""
        return self._find(details)


def _lose(context: grpc.ServicerContext) -> None:
    context.abort(grpc.StatusCode.UNAVAILABLE, "the test lost the response")


def _recorded(requests: Iterator[Any], read: list[Any]) -> Iterator[Any]:
    for request in requests:
        read.append(request)
        yield request
