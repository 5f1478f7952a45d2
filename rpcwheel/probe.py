"""What a heartbeat asks a server, and what its answer means.

`grpc.health.v1` is spoken by gRPC servers of any language, and its two messages have one field
each, so they are written and read here by hand: no protobuf is needed. A server without that
service answers UNIMPLEMENTED, which is an answer too: it lives.
"""

from __future__ import annotations

from typing import Final, NamedTuple, Protocol, runtime_checkable

from rpcwheel.errors import ConfigurationError

__all__ = ["ALIVE", "MARK", "UNANSWERED", "HealthProbe", "MethodProbe", "Probe", "ProbeResult"]

MARK: Final = (("rpcwheel-heartbeat", "1"),)
"""Metadata of each probe, by which a server can tell it from use."""

UNANSWERED: Final = frozenset({"UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED"})
"""Statuses that a client makes up itself when nobody answers. Every other one is an answer."""

SERVING: Final = 1
NOT_SERVING: Final = 2
SERVICE_UNKNOWN: Final = 3
"""Of `grpc.health.v1.HealthCheckResponse.ServingStatus`."""


class ProbeResult(NamedTuple):
    """What an answer means."""

    alive: bool
    """Whether it counts as an answer."""
    serving: bool | None = None
    """What the server says of itself; None if it says nothing."""


ALIVE: Final = ProbeResult(alive=True)


@runtime_checkable
class Probe(Protocol):
    """A question to a server: one small unary call. Write your own for a method of your own."""

    @property
    def method(self) -> str:
        """In full: `"/shop.Orders/Ping"`."""

    @property
    def request(self) -> bytes:
        """The request message, serialised."""

    def judge(self, response: bytes) -> ProbeResult:
        """Say what an answer with status OK means; on a worker, or on the loop: don't block."""


class MethodProbe:
    """Calls a method of the server's own; any answer will do, an error status too.

    Args:
        method: In full: `"/shop.Orders/Ping"`. Unary; cheap and without effect on the server.
        request: The request message, serialised: `Ping().SerializeToString()`.

    Raises:
        TypeError, ConfigurationError: The method is no such name; the request is not bytes.
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
                "request must be the serialised message (bytes; of a protobuf message, what "
                f"SerializeToString() gives), not {request!r}"
            )
        self.method = method
        self.request = request

    def judge(self, response: bytes) -> ProbeResult:
        """Any answer means that it lives."""
        return ALIVE

    def __repr__(self) -> str:
        return f"MethodProbe({self.method!r})"


class HealthProbe:
    """Asks `grpc.health.v1.Health/Check`, as a server of any language may offer it.

    Args:
        service: Whose health; `""` for the server as a whole.
        require_serving: Whether NOT_SERVING counts as no answer, so that a connection to a server
            that says so for the whole timeout is dead. By default any answer means that it lives.

    Raises:
        TypeError: The service is no string.
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
        """Read the serving status; what can't be read is alive but says nothing of itself."""
        status = _field_1(response)
        if status == SERVING:
            return ProbeResult(alive=True, serving=True)
        if status in {NOT_SERVING, SERVICE_UNKNOWN}:
            return ProbeResult(alive=not self.require_serving, serving=False)
        return ALIVE

    def __repr__(self) -> str:
        return f"HealthProbe({self.service!r}, require_serving={self.require_serving})"


# The wire form of protobuf, as far as these two messages go


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:  # noqa: PLR2004 - seven bits each
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def _field_1(message: bytes) -> int | None:
    """The last varint with number 1; 0 (the default) if there is none, None if it is garbage."""
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
    """The number at a place, and where it ends; IndexError if it does not end."""
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
