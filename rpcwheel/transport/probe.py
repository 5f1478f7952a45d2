"""The call that a heartbeat or health check makes, and the meaning of its response.

gRPC servers in any language can offer `grpc.health.v1`. Its two messages have one field each, so
they are encoded and decoded here without protobuf. A server without that service answers
UNIMPLEMENTED, which is an answer too: the server is alive.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any, Final, NamedTuple, Protocol, runtime_checkable

from rpcwheel._grpc.calls import has_status, value_of
from rpcwheel._grpc.wire import fields, text_field
from rpcwheel.errors import ConfigurationError
from rpcwheel.rpc import HEARTBEAT_KEY

__all__ = [
    "ALIVE",
    "MARK",
    "UNANSWERED",
    "HealthProbe",
    "MethodProbe",
    "Probe",
    "ProbeResult",
    "checked_probe",
]

MARK: Final = ((HEARTBEAT_KEY, "1"),)
"""Metadata of each probe, by which a server can tell probes from other calls."""

UNANSWERED: Final = frozenset({"UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED"})
"""Statuses that the client sets itself if there is no answer. Every other status is an answer."""

SERVER_HEALTH_TIMEOUT_S: Final = 1.0
"""How long a circuit breaker waits for the answer of `SERVER_HEALTH`."""


class ServingStatus(IntEnum):
    """`grpc.health.v1.HealthCheckResponse.ServingStatus`."""

    UNKNOWN = 0
    SERVING = 1
    NOT_SERVING = 2
    SERVICE_UNKNOWN = 3


class ProbeResult(NamedTuple):
    """The meaning of a response."""

    alive: bool
    """Whether it counts as an answer."""
    serving: bool | None = None
    """Whether the server says that it serves; None: it says nothing about it."""


ALIVE: Final = ProbeResult(alive=True)


@runtime_checkable
class Probe(Protocol):
    """One small unary call to a server. Implement this protocol to interpret responses yourself."""

    @property
    def method(self) -> str:
        """The full method name: `"/shop.Orders/Ping"`."""

    @property
    def request(self) -> bytes:
        """The serialized request."""

    def judge(self, response: bytes) -> ProbeResult:
        """Interpret a response with status OK.

        On a worker thread, or on the event loop, where it must not block.
        """


class MethodProbe:
    """Calls a unary method. Every answer counts, also an error status from the server.

    Args:
        method: The full method name: `"/shop.Orders/Ping"`. Choose a cheap method without effects.
        request: The serialized request: `Ping().SerializeToString()`.

    Raises:
        TypeError: `method` is not a string, or `request` is not bytes.
        ConfigurationError: `method` is not a full method name.
    """

    __slots__ = ("method", "request")

    def __init__(self, method: str, request: bytes = b"") -> None:
        if not isinstance(method, str):
            raise TypeError(f"method must be a string such as '/shop.Orders/Ping', not {method!r}")
        service, slash, name = method.removeprefix("/").partition("/")
        if not (method.startswith("/") and service and slash and name) or "/" in name:
            raise ConfigurationError(
                f"method must be a full method name such as '/shop.Orders/Ping', not {method!r}"
            )
        if not isinstance(request, bytes):
            raise TypeError(
                "request must be the serialized message in bytes (for protobuf, the result of "
                f"SerializeToString()), not {request!r}"
            )
        self.method = method
        self.request = request

    def judge(self, response: bytes) -> ProbeResult:
        """Every response counts as an answer."""
        return ALIVE

    def __repr__(self) -> str:
        return f"MethodProbe({self.method!r})"


class HealthProbe:
    """Calls `grpc.health.v1.Health/Check`.

    Args:
        service: The service to check; `""` for the whole server.
        require_serving: Whether NOT_SERVING counts as no answer, so that a connection to a server
            that answers so for the whole timeout is dead. By default every answer counts.

    Raises:
        TypeError: An argument is of the wrong type.
    """

    __slots__ = ("request", "require_serving", "service")

    method: Final = "/grpc.health.v1.Health/Check"

    def __init__(self, service: str = "", *, require_serving: bool = False) -> None:
        if not isinstance(service, str):
            raise TypeError(f"service must be a string such as 'shop.Orders', not {service!r}")
        if not isinstance(require_serving, bool):
            raise TypeError(f"require_serving must be True or False, not {require_serving!r}")
        self.service = service
        self.require_serving = require_serving
        self.request = text_field(1, service) if service else b""

    def judge(self, response: bytes) -> ProbeResult:
        """Read the serving status. A response without one counts as an answer."""
        status = serving_status(response)
        if status == ServingStatus.SERVING:
            return ProbeResult(alive=True, serving=True)
        if status in {ServingStatus.NOT_SERVING, ServingStatus.SERVICE_UNKNOWN}:
            return ProbeResult(alive=not self.require_serving, serving=False)
        return ALIVE

    def __repr__(self) -> str:
        return f"HealthProbe({self.service!r}, require_serving={self.require_serving})"


SERVER_HEALTH: Final = HealthProbe()
"""Asks for the health of the whole server."""


def is_answered(response: bytes | None, error: BaseException | None) -> bool:
    """Whether a call of `SERVER_HEALTH` was answered by a server that serves.

    The call has a response, or an error if it failed.
    """
    if response is not None:
        return SERVER_HEALTH.judge(response).serving is not False
    if error is None or not has_status(error):  # such as one of an interceptor
        return False
    return getattr(value_of(error, "code"), "name", "CANCELLED") not in UNANSWERED


def checked_probe(probe: object) -> Probe:
    """Return `probe`.

    Raises:
        TypeError: It is not a probe, or its request is not bytes.
        ConfigurationError: Its method is not a full method name.
    """
    if isinstance(probe, type) or not isinstance(probe, Probe) or not callable(probe.judge):
        raise TypeError(
            "probe must be HealthProbe(), MethodProbe('/shop.Orders/Ping'), or an object with "
            f"`method`, `request` and `judge(response)`; not {probe!r}"
        )
    method: object = probe.method
    if not isinstance(method, str) or not method.startswith("/"):
        raise ConfigurationError(
            f"a probe's method must be a full name such as '/shop.Orders/Ping', not {method!r}"
        )
    request: object = probe.request
    if not isinstance(request, bytes):
        raise TypeError(f"a probe's request must be serialized, in bytes, not {request!r}")
    return probe


def serving_status(response: bytes) -> ServingStatus | None:
    """Read a `HealthCheckResponse`; None if it is none, or has an unknown status."""
    status: Any = 0  # the default
    try:
        for number, _, value in fields(response):
            if number == 1:
                status = value
        return ServingStatus(status)
    except (ValueError, TypeError):
        return None
