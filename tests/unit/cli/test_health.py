"""The health check of the doctor: decoding without protobuf, and the meaning of each result."""

import grpc
from grpc_health.v1 import health_pb2

from rpcwheel.cli.diagnosis import Level
from rpcwheel.cli.health import Failed, Serving, judged, serving_in

Status = grpc.StatusCode


def test_responses_are_decoded_as_by_protobuf():
    for status in list(Serving):
        message = health_pb2.HealthCheckResponse(status=int(status))
        assert health_pb2.HealthCheckResponse.ServingStatus.Name(status) == status.name
        assert serving_in(message.SerializeToString()) is status


def test_an_invalid_response_is_a_warning():
    for garbage in [b"\x08", b"hello", b"\x08\x09", b"\x0a\x01a"]:
        assert serving_in(garbage) is None
        note = judged(serving_in(garbage), "", 1.0)
        assert (note.level, note.said) == (Level.WARN, "the answer is no HealthCheckResponse")


def test_each_result_of_the_check_has_level_text_and_advice():
    for answer, service, level, said in [
        (Serving.SERVING, "", Level.OK, "the server is SERVING"),
        (Serving.NOT_SERVING, "a.B", Level.FAIL, "service 'a.B' says NOT_SERVING"),
        (Serving.UNKNOWN, "", Level.WARN, "the server says UNKNOWN"),
        (Serving.SERVICE_UNKNOWN, "a.B", Level.FAIL, "does not know 'a.B'"),
        (Failed(Status.NOT_FOUND, ""), "a.B", Level.FAIL, "does not know 'a.B'"),
        (Failed(Status.NOT_FOUND, ""), "", Level.WARN, "as a whole is not set"),
        (Failed(Status.UNIMPLEMENTED, "Method not found!"), "", Level.NOTE, "no health service"),
        (
            Failed(Status.UNIMPLEMENTED, "Received http2 header with status: 404"),
            "",
            Level.FAIL,
            "HTTP 404",
        ),
        (
            Failed(Status.UNAVAILABLE, "Received http2 header with status: 503"),
            "",
            Level.FAIL,
            "HTTP 503",
        ),
        (Failed(Status.DEADLINE_EXCEEDED, ""), "", Level.FAIL, "within 1 s"),
        (Failed(Status.PERMISSION_DENIED, "no"), "", Level.WARN, "PERMISSION_DENIED no"),
        (Failed(Status.INTERNAL, "oh"), "", Level.FAIL, "failed: INTERNAL oh"),
    ]:
        note = judged(answer, service, 1.0)
        assert note.level is level
        assert said in note.said
        assert note.do or level is Level.OK
