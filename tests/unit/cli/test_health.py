"""The health check of the doctor: decoding without protobuf, and the meaning of each result."""

import grpc
from grpc_health.v1 import health_pb2

from rpcwheel.cli.doctor.health import CallFailed, finding_for
from rpcwheel.cli.findings import Level
from rpcwheel.transport.probe import ServingStatus, serving_status

Status = grpc.StatusCode


def test_responses_are_decoded_as_by_protobuf():
    for status in list(ServingStatus):
        message = health_pb2.HealthCheckResponse(status=int(status))
        assert health_pb2.HealthCheckResponse.ServingStatus.Name(status) == status.name
        assert serving_status(message.SerializeToString()) is status


def test_an_invalid_response_is_a_warning():
    for garbage in [b"\x08", b"hello", b"\x08\x09", b"\x0a\x01a"]:
        finding = finding_for(serving_status(garbage), "", 1.0)
        assert finding.level is Level.WARN
        assert finding.message == "the response is not a HealthCheckResponse"


NO_METHOD = CallFailed(Status.UNIMPLEMENTED, "Method not found!")
UNKNOWN_SERVICE = CallFailed(Status.NOT_FOUND, "")


def answered_by_http(status, code):
    """What gRPC makes of an answer of a web server."""
    return CallFailed(code, f"Received http2 header with status: {status}")


def test_each_result_of_the_check_has_level_text_and_advice():
    for result, service, level, message in [
        (ServingStatus.SERVING, "", Level.OK, "the server is SERVING"),
        (ServingStatus.NOT_SERVING, "a.B", Level.FAIL, "service 'a.B' is NOT_SERVING"),
        (ServingStatus.UNKNOWN, "", Level.WARN, "the health of the server is UNKNOWN"),
        (ServingStatus.SERVICE_UNKNOWN, "a.B", Level.FAIL, "does not know 'a.B'"),
        (UNKNOWN_SERVICE, "a.B", Level.FAIL, "does not know 'a.B'"),
        (UNKNOWN_SERVICE, "", Level.WARN, "as a whole is not set"),
        (NO_METHOD, "", Level.NOTE, "no health service"),
        (NO_METHOD, "a.B", Level.FAIL, "no health service to check 'a.B'"),
        (answered_by_http(404, Status.UNIMPLEMENTED), "", Level.FAIL, "HTTP 404"),
        (answered_by_http(503, Status.UNAVAILABLE), "", Level.FAIL, "HTTP 503"),
        (CallFailed(Status.DEADLINE_EXCEEDED, ""), "", Level.FAIL, "within 1 s"),
        (CallFailed(Status.PERMISSION_DENIED, "no"), "", Level.WARN, "PERMISSION_DENIED no"),
        (CallFailed(Status.INTERNAL, "oh"), "", Level.FAIL, "failed: INTERNAL oh"),
    ]:
        finding = finding_for(result, service, 1.0)
        assert finding.level is level
        assert message in finding.message
        assert finding.advice or level is Level.OK


def test_the_http_status_400_is_that_of_nginx_for_a_client_certificate():
    finding = finding_for(answered_by_http(400, Status.INTERNAL), "", 1.0)
    assert finding.level is Level.FAIL
    assert "--cert" in finding.advice
