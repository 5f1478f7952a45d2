"""Hides from the publisher whether a server is one of `grpc` or of `grpc.aio`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rpcwheel._grpc.serving import is_running, services_of
from rpcwheel.errors import is_coroutine_function

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable


class ServerGone(Exception):
    """The event loop of a server of `grpc.aio` has ended, so the server can't be used any more."""


class ServerAdapter:
    """Adapts a server of `grpc`; its subclass adapts one of `grpc.aio`.

    Blocking; not for event loops.
    """

    def __init__(self, server: Any) -> None:
        self._server = server

    @property
    def is_gone(self) -> bool:
        """Whether `call` and `stop` have no effect any more."""
        return False

    @property
    def is_running(self) -> bool:
        """Whether the server was started and not stopped."""
        return bool(is_running(self._server))

    def service_names(self) -> tuple[str, ...]:
        """The services that the server has handlers for; () if that can't be known."""
        return services_of(self._server)

    def start(self) -> None:
        """Start the server, which must not run; raises as `call`."""
        self.call(self._server.start)

    def add_insecure_port(self, address: str) -> int:
        """Have the server listen without TLS; returns the number of the port. Raises as gRPC."""
        port: int = self.call(self._server.add_insecure_port, address)
        return port

    def check_callback(self, name: str, function: object) -> None:
        """Raise `TypeError` if `call` can't run this function of the user."""
        if is_coroutine_function(function):
            raise TypeError(
                f"{name} is a coroutine function, but it would be called on a thread without an "
                "event loop; give a plain function, or use rpcwheel.aio with a grpc.aio.server()"
            )

    def call(self, function: Callable[..., Any], *args: object) -> Any:
        """Call a method of the server, or user code, where the server runs; returns the result.

        Raises:
            ServerGone: The server's event loop has ended.
        """
        return function(*args)

    def stop(self, grace_s: float) -> threading.Event:
        """Begin to stop: accept no more calls, and let running calls continue for `grace_s`.

        May be called again with 0 to end the running calls at once.

        Returns:
            An event that is set when the server has stopped.

        Raises:
            ServerGone: The server's event loop has ended.
        """
        stopped: threading.Event = self._server.stop(grace_s)
        return stopped
