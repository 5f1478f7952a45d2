"""A real gRPC call: `grpc.health.v1.Health/Check`, without protobuf, and what its end means."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

import grpc

from rpcwheel.heartbeat import HealthProbe

from .diagnosis import Level, Note, Trouble

__all__ = ["Answer", "Failed", "Serving", "ask", "judged", "kind_of", "serving_in"]

HOW_TO_ADD: Final = (
    "to have one: pip install grpcio-health-checking, and "
    "health_pb2_grpc.add_HealthServicer_to_server(health.HealthServicer(), server)"
)

_HTTP: Final = re.compile(r"Received http2 header with status: (\d+)")


class Serving(IntEnum):
    """`HealthCheckResponse.ServingStatus`."""

    UNKNOWN = 0
    SERVING = 1
    NOT_SERVING = 2
    SERVICE_UNKNOWN = 3


@dataclass(frozen=True, slots=True)
class Failed:
    """The call ended with an error."""

    code: grpc.StatusCode
    details: str


Answer = Serving | Failed | None
"""What was asked for, why there is none, or None for what is no `HealthCheckResponse`."""


def serving_in(response: bytes) -> Serving | None:
    """`HealthCheckResponse.status`: field 1, a varint; None for what is no such message."""
    if not response:
        return Serving.UNKNOWN
    if len(response) < 2 or response[0] != 0x08 or response[1] not in set(Serving):  # noqa: PLR2004
        return None
    return Serving(response[1])


def ask(channel: grpc.Channel, service: str, timeout: float) -> tuple[Answer, float]:
    """Ask once; gives the answer or the error, and the seconds it took."""
    probe = HealthProbe(service)
    check = channel.unary_unary(probe.method)
    began = time.monotonic()
    try:
        answer: Answer = serving_in(check(probe.request, timeout=timeout))
    except grpc.RpcError as error:
        answer = Failed(error.code(), error.details() or "")  # type: ignore[attr-defined]
    return answer, time.monotonic() - began


def kind_of(answer: Answer) -> object:
    """What two answers have in common that mean the same: the status, or the code of the error."""
    return answer.code if isinstance(answer, Failed) else answer


def judged(answer: Answer, service: str, timeout: float) -> Note:
    """What the answer means."""
    what = f"service {service!r}" if service else "the server"
    match answer:
        case Failed():
            return _error(answer, service, timeout)
        case Serving.SERVING:
            return Note("health", Level.OK, f"{what} is SERVING")
        case Serving.NOT_SERVING:
            return _fail(
                f"{what} says NOT_SERVING", "it starts, drains, or misses what it needs: its log"
            )
        case Serving.SERVICE_UNKNOWN:
            return _unknown(service)
        case Serving.UNKNOWN:
            return Note(
                "health", Level.WARN, f"{what} says UNKNOWN", "the server never set its health"
            )
        case None:
            return Note(
                "health",
                Level.WARN,
                "the answer is no HealthCheckResponse",
                f"something else serves {HealthProbe.method}",
            )


def _error(error: Failed, service: str, timeout: float) -> Note:
    code, details = error.code, error.details
    if status := _HTTP.search(details):
        return _fail(
            f"HTTP {status[1]} instead of a gRPC answer: a proxy, or a web server, stands between",
            "check the proxy's route and its backend; it has to pass HTTP/2 on (grpc_pass in nginx)"
            if status[1] != "404"
            else "it has no route for gRPC there: check path, host name and port",
        )
    match code:
        case grpc.StatusCode.UNIMPLEMENTED:
            return _without(service)
        case grpc.StatusCode.NOT_FOUND:
            return _unknown(service)
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return _fail(
                f"no answer to the health check within {timeout:g} s, though the connection stands",
                "the server hangs: all its threads may be taken, or the event loop blocked; "
                "py-spy dump --pid PID shows by what",
            )
        case grpc.StatusCode.UNAUTHENTICATED | grpc.StatusCode.PERMISSION_DENIED:
            return Note(
                "health",
                Level.WARN,
                f"gRPC works, but the health check is refused: {code.name} {details}".rstrip(),
                "leave health checks open, as load balancers have no credentials either",
            )
        case _:
            return _fail(
                f"the health check failed: {code.name} {details}".rstrip(),
                "look into the server's log",
            )


def _without(service: str) -> Note:
    """There is no health service: what was asked for by name could not be looked at."""
    if service:
        return _fail(
            f"gRPC works, but the server has no health service to ask for {service!r}", HOW_TO_ADD
        )
    return Note("health", Level.NOTE, "gRPC works; the server has no health service", HOW_TO_ADD)


def _unknown(service: str) -> Note:
    if service:
        return _fail(
            f"the server's health service does not know {service!r}",
            "check the name: package and service, as in 'shop.Orders'",
        )
    return Note(
        "health",
        Level.WARN,
        "gRPC works, but the health of the server as a whole is not set",
        'health_servicer.set("", SERVING)',
    )


def _fail(said: str, do: str) -> Note:
    return Note.failed("health", Trouble(said, do))
