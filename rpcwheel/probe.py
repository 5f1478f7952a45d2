"""The call that a heartbeat makes, and the meaning of its response.

gRPC servers in all languages offer `grpc.health.v1`. Its two messages have one field each, so they
are encoded and decoded here, without protobuf. A server without this service answers UNIMPLEMENTED,
which also shows that it is alive.
"""

from __future__ import annotations

from typing import Final, NamedTuple, Protocol, runtime_checkable

from rpcwheel.errors import ConfigurationError

__all__ = ["ALIVE", "MARK", "UNANSWERED", "HealthProbe", "MethodProbe", "Probe", "ProbeResult"]

MARK: Final = (("rpcwheel-heartbeat", "1"),)
"""Metadata of each probe, which distinguishes it from calls of users."""

UNANSWERED: Final = frozenset({"UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED"})
"""Statuses that the client itself sets without an answer. Every other status is an answer."""

SERVING: Final = 1
NOT_SERVING: Final = 2
SERVICE_UNKNOWN: Final = 3
"""Of `grpc.health.v1.HealthCheckResponse.ServingStatus`."""


class ProbeResult(NamedTuple):
    """The meaning of a response."""

    alive: bool
    """Whether the response shows that the server is alive."""
    serving: bool | None = None
    """The serving status in the response; None if it has none."""


ALIVE: Final = ProbeResult(alive=True)


@runtime_checkable
class Probe(Protocol):
    """One small unary call to a server. Implement it to probe with your own method."""

    @property
    def method(self) -> str:
        """The full name of the method: `"/shop.Orders/Ping"`."""

    @property
    def request(self) -> bytes:
        """The request message, serialized."""

    def judge(self, response: bytes) -> ProbeResult:
        """Interpret a response with status OK. Must not block; runs on a worker or on the loop."""


class MethodProbe:
    """Calls a method of the server. Each answer counts, also an error status.

    Args:
        method: The full name of a unary method: `"/shop.Orders/Ping"`. It should be cheap, and
            without effect on the server.
        request: The request message, serialized: `Ping().SerializeToString()`.

    Raises:
        TypeError, ConfigurationError: The method is not a full name; the request is not bytes.
    """

    __slots__ = ("method", "request")

    def __init__(self, method: str, request: bytes = b"") -> None:
        if not isinstance(method, str):
            raise TypeError(f"method must be a string such as '/shop.Orders/Ping', not {method!r}")
        service, slash, name = method.removeprefix("/").partition("/")
        if not (method.startswith("/") and service and slash and name) or "/" in name:
            raise ConfigurationError(
                f"method must name one method in full, as '/shop.Orders/Ping'; not {method!r}"
            )
        if not isinstance(request, bytes):
            raise TypeError(
                "request must be the serialized message (bytes; of a protobuf message, what "
                f"SerializeToString() gives), not {request!r}"
            )
        self.method = method
        self.request = request

    def judge(self, response: bytes) -> ProbeResult:
        """Return `ALIVE`, whatever the response is."""
        return ALIVE

    def __repr__(self) -> str:
        return f"MethodProbe({self.method!r})"


class HealthProbe:
    """Calls `grpc.health.v1.Health/Check`, the standard health check.

    Args:
        service: The service to check; `""` for the whole server.
        require_serving: Whether NOT_SERVING counts as no answer, so that the connection is dead if
            the server returns it for the whole timeout. By default, each answer counts.

    Raises:
        TypeError: The service is not a string.
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
        name = service.encode()
        self.request = b"\x0a" + _varint(len(name)) + name if name else b""

    def judge(self, response: bytes) -> ProbeResult:
        """Read the serving status. A response that cannot be decoded is alive, without a status."""
        status = _field_1(response)
        if status == SERVING:
            return ProbeResult(alive=True, serving=True)
        if status in {NOT_SERVING, SERVICE_UNKNOWN}:
            return ProbeResult(alive=not self.require_serving, serving=False)
        return ALIVE

    def __repr__(self) -> str:
        return f"HealthProbe({self.service!r}, require_serving={self.require_serving})"


# The encoding of protobuf, as far as these two messages need it


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:  # noqa: PLR2004 - seven bits each
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def _field_1(message: bytes) -> int | None:
    """The last varint with number 1; 0 (the default) if there is none, None if it is invalid."""
    value, place = 0, 0
    try:
        while place < len(message):
            tag, place = _read_varint(message, place)
            match tag & 7:
                case 0:
                    number, place = _read_varint(message, place)
                    value = number if tag >> 3 == 1 else value
                case 1:
                    place += 8
                case 2:
                    length, place = _read_varint(message, place)
                    place += length
                case 5:
                    place += 4
                case _:
                    return None
    except (IndexError, TypeError):
        return None
    return value if place == len(message) else None


def _read_varint(message: bytes, place: int) -> tuple[int, int]:
    """The number at an offset, and the offset of its end; IndexError if it does not end."""
    number = shift = 0
    while True:
        byte = message[place]
        place += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:  # noqa: PLR2004 - the last one
            return number, place
        shift += 7
        if shift > 63:  # noqa: PLR2004 - bits of the longest
            raise IndexError
