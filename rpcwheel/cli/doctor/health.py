"""A gRPC call of the doctor: `grpc.health.v1.Health/Check`, and the meaning of its result."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from typing import Final

import grpc

from rpcwheel.cli.findings import DoctorFinding, Level, Problem
from rpcwheel.transport.probe import HealthProbe, ServingStatus, serving_status

HOW_TO_ADD: Final = (
    "to add it: pip install grpcio-health-checking, and "
    "health_pb2_grpc.add_HealthServicer_to_server(health.HealthServicer(), server)"
)

HTTP_ADVICE: Final = {
    "400": "with TLS, nginx answers so if the client certificate is missing, has expired or is not "
    "trusted: pass another --cert; its error log has the reason",
    "404": "it has no route for gRPC: check path, host name and port",
}
"""By the HTTP status."""

FORWARD: Final = (
    "check the proxy's route and its backend; it must forward HTTP/2 (nginx: grpc_pass)"
)
"""The advice for any other status."""

_HTTP_STATUS: Final = re.compile(r"Received http2 header with status: (\d+)")


@dataclass(frozen=True, slots=True)
class CallFailed:
    """The status of a call that failed."""

    code: grpc.StatusCode
    details: str


Result = ServingStatus | CallFailed | None
"""The result of a health check; None for a response that is not a `HealthCheckResponse`."""


def check(channel: grpc.Channel, service: str, timeout: float) -> tuple[Result, float]:
    """Check the health once, and return the result and the seconds that it took."""
    probe = HealthProbe(service)
    call = channel.unary_unary(probe.method)
    began = time.monotonic()
    try:
        result: Result = serving_status(call(probe.request, timeout=timeout))
    except grpc.RpcError as error:
        result = CallFailed(error.code(), error.details() or "")  # type: ignore[attr-defined]
    return result, time.monotonic() - began


def same(result: Result, other: Result) -> bool:
    """Return whether two results have the same status; the details of failed calls may differ."""
    if isinstance(result, CallFailed) and isinstance(other, CallFailed):
        return result.code is other.code
    return result == other


def finding_for(result: Result, service: str, timeout: float) -> DoctorFinding:
    """Return the finding for the result of a health check."""
    name = f"service {service!r}" if service else "the server"
    match result:
        case CallFailed():
            return _failed_call(result, service, timeout)
        case ServingStatus.SERVING:
            return DoctorFinding("health", Level.OK, f"{name} is SERVING")
        case ServingStatus.NOT_SERVING:
            return _fail(
                f"{name} is NOT_SERVING",
                "it starts, shuts down, or lacks a dependency: look into its log",
            )
        case ServingStatus.SERVICE_UNKNOWN:
            return _unknown_service(service)
        case ServingStatus.UNKNOWN:
            return _warn(f"the health of {name} is UNKNOWN", "the server has not set its health")
        case None:
            return _warn(
                "the response is not a HealthCheckResponse",
                f"the server implements {HealthProbe.method} differently",
            )


def _failed_call(failed: CallFailed, service: str, timeout: float) -> DoctorFinding:
    code, details = failed.code, failed.details
    if status := _HTTP_STATUS.search(details):
        return _fail(
            f"HTTP {status[1]} instead of a gRPC response: a proxy or a web server answers",
            HTTP_ADVICE.get(status[1], FORWARD),
        )
    text = f"{code.name} {details}".rstrip()
    match code:
        case grpc.StatusCode.UNIMPLEMENTED:
            return _no_health_service(service)
        case grpc.StatusCode.NOT_FOUND:
            return _unknown_service(service)
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return _fail(
                f"no response to the health check within {timeout:g} s, but the connection works",
                "the server hangs: all its threads may be busy, or its event loop is blocked; "
                "py-spy dump --pid PID shows the cause",
            )
        case grpc.StatusCode.UNAUTHENTICATED | grpc.StatusCode.PERMISSION_DENIED:
            return _warn(
                f"gRPC works, but the health check is refused: {text}",
                "permit health checks without credentials; load balancers have none either",
            )
    return _fail(f"the health check failed: {text}", "look into the server's log")


def _no_health_service(service: str) -> DoctorFinding:
    if service:
        return _fail(
            f"gRPC works, but the server has no health service to check {service!r}", HOW_TO_ADD
        )
    return DoctorFinding(
        "health", Level.NOTE, "gRPC works; the server has no health service", HOW_TO_ADD
    )


def _unknown_service(service: str) -> DoctorFinding:
    if service:
        return _fail(
            f"the server's health service does not know {service!r}",
            "check the name: package and service, as in 'shop.Orders'",
        )
    return _warn(
        "gRPC works, but the health of the server as a whole is not set",
        'health_servicer.set("", SERVING)',
    )


def _fail(message: str, advice: str) -> DoctorFinding:
    return DoctorFinding.failed("health", Problem(message, advice))


def _warn(message: str, advice: str) -> DoctorFinding:
    return DoctorFinding("health", Level.WARN, message, advice)
