"""What a heartbeat asks, and what the answers mean."""

import grpc
import pytest
from grpc_health.v1 import health_pb2
from hypothesis import given
from hypothesis import strategies as st

from rpcwheel._grpc.finished import FinishedError
from rpcwheel.heartbeat import HealthProbe, MethodProbe, Probe
from rpcwheel.transport.probe import ProbeResult, is_answered

STATUS = health_pb2.HealthCheckResponse


@pytest.mark.parametrize("service", ["", "a", "x" * 127, "x" * 128, "\u00fc" * 64, "x" * 300])
def test_the_request_of_the_health_probe_is_that_of_the_standard_service(service):
    probe = HealthProbe(service)
    assert health_pb2.HealthCheckRequest.FromString(probe.request).service == service
    assert probe.method == "/grpc.health.v1.Health/Check"


def test_every_status_is_an_answer_unless_the_probe_requires_serving():
    for status, serving in [
        (STATUS.SERVING, True),
        (STATUS.NOT_SERVING, False),
        (STATUS.SERVICE_UNKNOWN, False),
        (STATUS.UNKNOWN, None),
    ]:
        response = STATUS(status=status).SerializeToString()
        assert HealthProbe().judge(response) == ProbeResult(alive=True, serving=serving)
        requires = HealthProbe("a", require_serving=True)
        assert requires.judge(response).alive is (serving is not False)


def test_unknown_fields_are_skipped():
    for unknown in [
        b"\x10\x96\x01",  # 2: a varint
        b"\x11\x01\x02\x03\x04\x05\x06\x07\x08",  # 2: eight bytes
        b"\x12\x03\x08\x02\x08",  # 2: three bytes, that look like the field
        b"\x15\x01\x02\x03\x04",  # 2: four bytes
        b"\xfa\xff\xff\xff\x0f\x01\x08",  # the greatest number there is
    ]:
        serving = ProbeResult(alive=True, serving=True)
        assert HealthProbe().judge(unknown + b"\x08\x01") == serving
        assert HealthProbe().judge(b"\x08\x01" + unknown) == serving


def test_a_malformed_response_counts_as_an_answer_without_a_status():
    for malformed in [
        b"\x08",
        b"\x0b\x0c",
        b"\x0f",
        b"\x12\x7f\x08\x01",
        b"\x15\x01",
        b"\xff" * 11,
        b"\x08" * 3,
    ]:
        assert HealthProbe(require_serving=True).judge(malformed) == ProbeResult(
            alive=True, serving=None
        )


@given(st.binary(max_size=40))
def test_every_response_is_decoded_as_protobuf_decodes_it(response):
    result = HealthProbe().judge(response)
    try:
        status = STATUS.FromString(response).status
    except Exception:  # noqa: BLE001 - one of several types
        return
    known = {STATUS.SERVING: True, STATUS.NOT_SERVING: False, STATUS.SERVICE_UNKNOWN: False}
    # protobuf truncates numbers of 64 bits to 32, and reads groups; no server sends those
    if b"\x80" not in response and not any(byte & 7 in {3, 4} for byte in response):
        assert result.serving in {known.get(status), None}


def test_a_method_probe_counts_every_answer():
    probe = MethodProbe("/shop.Orders/Ping", b"abc")
    assert (probe.method, probe.request) == ("/shop.Orders/Ping", b"abc")
    assert probe.judge(b"whatever") == ProbeResult(alive=True, serving=None)
    assert MethodProbe("/a/b").request == b""


def test_both_probes_have_a_repr():
    for probe in [HealthProbe(), MethodProbe("/a/b")]:
        assert isinstance(probe, Probe)
        assert type(probe).__name__ in repr(probe)


@pytest.mark.parametrize(
    ("response", "code", "answered"),
    [
        (b"", "OK", True),
        (b"\x08\x01", "OK", True),
        (b"\x08\x02", "OK", False),
        (None, "UNIMPLEMENTED", True),
        (None, "INTERNAL", True),
        (None, "PERMISSION_DENIED", True),
        (None, "UNKNOWN", True),
        (None, "UNAVAILABLE", False),
        (None, "DEADLINE_EXCEEDED", False),
        (None, "CANCELLED", False),
    ],
)
def test_a_check_is_answered_unless_unreachable_or_not_serving(response, code, answered):
    error = None if code == "OK" else FinishedError(grpc.StatusCode[code], "")
    assert is_answered(response, error) is answered
